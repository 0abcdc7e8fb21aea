"""Masks along drafts: how far a grammar follows them, and that nobody waits long for it."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import wait

import pytest

from test_grammar import EOS, PERSON, allowed, constraint, grammars, tokenizer  # noqa: F401
from text.grammar import THREADS, Constraint


class Stub:
    """Has the attributes that it is given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


NAMED_ANN, THOUGHT, END = '{"name": "Ann", "age": 7}', "no no no", "</t>"


@pytest.mark.parametrize(
    ("asked", "text", "params"),
    [
        ({"json": PERSON}, NAMED_ANN, {}),
        ({"json": PERSON}, NAMED_ANN, {"min_tokens": 9, "allowed_token_ids": list(range(1000))}),
        ({"regex": "[a-z ]{2,40}"}, "to be or not to be", {"min_tokens": 4, "bad_word_ids": ((260, 261), (300,))}),
        ({"json": PERSON}, THOUGHT + END + NAMED_ANN, {"reasoning_end_ids": END}),
        (None, THOUGHT + END + THOUGHT, {"reasoning_end_ids": END, "thinking_token_budget": 3}),
        ({"choice": ["yes"]}, "<t>" + THOUGHT + END + "yes", {"reasoning_start_ids": "<t>", "reasoning_end_ids": END}),
        ({"choice": ["<that>"]}, "<that>", {"reasoning_start_ids": "<think>", "reasoning_end_ids": END}),
    ],
)  # fmt: skip
def test_masks_lead_along_the_drafts(constraint, tokenizer, monkeypatch, asked, text, params):
    """Each is the one that its tokens get later, and what is refused then leaves no trace."""
    monkeypatch.setattr("text.grammar.PATIENCE", 60.0)
    marks = {name: tuple(tokenizer.encode(mark, False)) for name, mark in params.items() if isinstance(mark, str)}

    def after(output):
        made = constraint(asked, **params | marks)
        made.advance(output)
        return made

    ids, walked, seen = tokenizer.encode(text, False), constraint(asked, **params | marks), 0
    for start in range(len(ids)):
        drafts, masks = ids[start : start + 5], []
        for i, draft in enumerate(drafts):
            if draft not in allowed(after(ids[: start + i])):
                break
            masks.append(after(ids[: start + i + 1]).mask.tolist())
        walked.begun = time.monotonic()
        walked.follow(ids[:start], drafts)
        assert [mask.tolist() for mask in walked.later] == masks and allowed(walked) == allowed(after(ids[:start]))
        seen += len(masks)
    assert seen > 2 * len(ids) and not walked.error


def test_drafts_are_cut_where_they_cannot_be_taken(constraint, tokenizer, monkeypatch):
    monkeypatch.setattr("text.grammar.PATIENCE", 60.0)

    def masks(*drafts, **params):
        c = constraint({"regex": r"\d{2,4}"}, **params)
        c.begun = time.monotonic()
        c.follow([digits[1]], drafts)
        return len(c.later)

    digits, (letter, *_) = [tokenizer.encode(str(n), False)[0] for n in range(10)], tokenizer.encode("x", False)
    assert masks(digits[2], digits[3]) == 2
    assert masks(digits[2], letter, digits[3]) == 1  # the grammar refuses it
    assert masks(digits[2], EOS, digits[3]) == 1  # it ends the answer
    assert masks(digits[2], digits[3], digits[4], digits[5]) == 3  # nothing but the end can follow
    assert masks(digits[2], digits[3], bad_word_ids=((digits[2], digits[3]),)) == 1
    # After the second there would be no token at all: whoever samples it gets the error, and then only.
    assert masks(digits[2], digits[3], allowed_token_ids=digits[:4], bad_word_ids=tuple((d,) for d in digits[:2])) == 2
    stuck = {"allowed_token_ids": digits[1:4], "bad_word_ids": tuple((digits[2], d) for d in digits[1:4])}
    assert masks(digits[1], digits[2], digits[3], **stuck) == 1
    monkeypatch.setattr("text.grammar.PATIENCE", 0.0)
    assert masks(digits[2], digits[3]) == 0  # a step would wait too long


def test_drafts_whose_masks_take_long_hold_up_nobody(grammars, constraint, tokenizer, monkeypatch):
    """Not the step, not its sequence, nor the token that comes instead."""
    c, go_on, advance = constraint({"regex": "[a-z]*"}), threading.Event(), Constraint.advance
    a, slow = (tokenizer.encode(letter, False)[0] for letter in "ab")
    monkeypatch.setattr(Constraint, "advance", lambda c, ids: go_on.wait() if slow in ids else advance(c, ids))
    monkeypatch.setattr("text.grammar.PATIENCE", 0.5)
    monkeypatch.setattr("text.grammar.MASK_TIMEOUT", 0.0)
    seq = Stub(constraint=c, num_computed=1, tokens=[5, a], proposed=[slow, a])
    seq.group = Stub(num_prompt=1, params=c.params, beam=None)
    assert grammars.look([seq]) == (set(), {})
    assert not seq.proposed and c.num_read == 1 and not c.work.done()
    monkeypatch.setattr("text.grammar.MASK_TIMEOUT", 60.0)
    seq.tokens, seq.num_computed, seq.proposed, before = [5, a, a], 2, [a], c.work
    if THREADS > 1 and os.cpu_count() > 1:  # else it waits behind the other work
        assert grammars.look([seq]) == (set(), {})
        assert c.num_read == 2 and seq.proposed == [a]
    go_on.set()
    wait([before, *filter(None, [c.work])])
    assert len(c.later) < 2
