"""Tokens that may not be drawn for a while: `min_tokens` and `bad_words`, from the parameters to the text."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import reference
from batch_state import BatchState, StepShape
from engine import SamplingParams
from plan import BIAS, MASK, PENALTIES, StepPlan, bit_words
from worker_steps import ONE_LAYER, FakeGraph, row, worker_in

BATCHES = {
    "chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 32, "enable_prefix_caching": False},
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
    "tokens one by one": {"batch_invariant": True, "max_num_seqs": 4, "block_size": 4},  # a short warm-up
}
FEW = {"num_gpu_blocks_override": 64, "block_size": 4, "max_model_len": 220, "schedule_conservativeness": 0.0}


@pytest.fixture
def make(tmp_path: Path):
    return partial(worker_in, tmp_path)


@pytest.fixture(scope="module")
def requests(llm, conversations) -> tuple[list[list[int]], list[SamplingParams]]:
    """Questions with short answers, which must be 12 tokens or longer; every other one is greedy, some have samples."""
    prompts = [llm.tokenizer.encode(llm.tokenizer.render(c), add_special_tokens=False) for c in conversations]
    prompts = sorted(prompts, key=len)[:12]
    params = SamplingParams(max_tokens=24, min_tokens=12, top_p=0.95)
    return prompts, [replace(params, temperature=i % 2, seed=i, n=1 + i % 3 // 2) for i in range(12)]


def drawn(outputs) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_no_answer_ends_before_min_tokens(llm, requests):
    eos = set(llm.core.model_config.eos_token_ids)
    free = drawn(llm.generate(requests[0], [replace(p, min_tokens=0) for p in requests[1]], use_tqdm=False))
    held = drawn(llm.generate(*requests, use_tqdm=False))
    assert sum(len(ids) < 12 for ids in free) > 6 and min(map(len, held)) > 12
    assert any(len(ids) < 24 for ids in held)  # afterwards an answer may end
    for before, after in zip(free, held, strict=True):
        assert not eos & {*after[:12]} and not eos & {*after[:-1]}
        same = [token for token in before if token not in eos]  # nothing else is barred
        assert after[: len(same)] == same


@pytest.fixture(scope="module")
def barred(llm, requests) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """The same with all that bars tokens at once, and the answers: bad words are of what would be written else."""
    prompts, params = requests
    free, changed = llm.generate(prompts, params, use_tqdm=False), []
    for i, (output, param) in enumerate(zip(free, params, strict=True)):
        ids = output.outputs[0].token_ids
        words = [tuple(ids[:2]), tuple(ids[3:6]), tuple(ids[5:9]), (ids[0],)][: 3 + (i % 3 == 2)]
        allowed = None if i % 4 < 2 else tuple({*range(0, 1024, 2), *ids, *llm.core.model_config.eos_token_ids})
        changed.append(replace(param, bad_word_ids=words, allowed_token_ids=allowed))
    return prompts, changed, drawn(llm.generate(prompts, changed, use_tqdm=False))


def ends_of(words, ids: list[int]) -> set[int]:
    """The tokens that would complete one of `words` after the output `ids`."""
    return {word[-1] for word in words if len(word) == 1 or tuple(ids[1 - len(word) :]) == tuple(word[:-1])}


def completions(words, ids: list[int]) -> list[int]:
    """The places in an output at which one of `words` has been written."""
    return [i for i, token in enumerate(ids) if token in ends_of(words, ids[:i])]


def test_all_that_bars_tokens_does_so_at_once(llm, requests, barred):
    prompts, params, answers = barred
    owners = [param for param in params for _ in range(param.n)]
    for ids, param in zip(answers, owners, strict=True):
        assert len(ids) > 12 and not completions(param.bad_word_ids, ids)
        assert not param.allowed_token_ids or {*ids} <= {*param.allowed_token_ids}
    free = drawn(llm.generate(prompts, requests[1], use_tqdm=False))
    assert sum(bool(completions(param.bad_word_ids, ids)) for ids, param in zip(free, owners, strict=True)) > 11


@pytest.mark.parametrize(
    "fields",
    [pytest.param(BATCHES[way], id=way, marks=[pytest.mark.full] * (way in ("chunks", "swap"))) for way in BATCHES],
)
def test_it_does_not_depend_on_how_tokens_are_computed(llm, make_llm, barred, fields):
    few = FEW if "preemption_mode" in fields else {}
    made, (prompts, params, answers) = make_llm(**fields | few), barred
    if "batch_invariant" in fields:  # slow here
        prompts, params = [prompt[-12:] for prompt in prompts[:3]], [replace(p, max_tokens=14) for p in params[:3]]
        answers = drawn(llm.generate(prompts, params, use_tqdm=False))
    assert drawn(made.generate(prompts, params, use_tqdm=False)) == answers
    assert not few or made.core.metrics()["num_preemptions_total"] > 3


SCENE = "Enter the 3th SERVANT, with a torch.\n\n"
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def scene(llm):
    """What the demo makes of it where it may write all that it likes."""
    return llm.generate([SCENE], GREEDY, use_tqdm=False)[0]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda said: said[:1], marks=pytest.mark.full),
        pytest.param(lambda said: ["  " + said[3]], marks=pytest.mark.full),
        lambda said: [said[1], " ".join(said[1:3]), " ".join(said[4:6])],
        lambda said: list(dict.fromkeys(said))[:6],
    ],
    ids=["the first", "one with spaces", "one that begins another", "many"],
)
def test_a_greedy_answer_takes_the_likeliest_that_ends_no_bad_word(llm, scene, bad):
    """It is the likeliest by the model's own log-probabilities, from which nothing is taken."""
    (free,) = scene.outputs
    words = bad(re.findall(r"\w+", free.text))
    params = replace(GREEDY, bad_words=words, logprobs=20)
    (held,) = llm.generate([SCENE], params, use_tqdm=False)[0].outputs
    made, steps = llm.tokenizer.bad_word_ids(words), []
    assert completions(made, free.token_ids) and not completions(made, held.token_ids)
    for i, scores in enumerate(held.logprobs):
        ranked = sorted(scores, key=lambda token: scores[token].rank)
        bars = ends_of(made, held.token_ids[:i])
        assert held.token_ids[i] == next(token for token in ranked if token not in bars)
        steps.append(ranked[0] in bars)
    assert any(steps)


def test_many_draws_write_no_bad_word(llm):
    """Until a word has begun its draws are those of an answer without bad words. Its n answers all keep to it."""
    params = SamplingParams(n=32, max_tokens=16, ignore_eos=True, seed=5)
    free = drawn(llm.generate([SCENE], params, use_tqdm=False))
    words = sorted({word for ids in free for word in re.findall(r"\w{5,}", llm.tokenizer.decode(ids))})[::4]
    made = llm.tokenizer.bad_word_ids(words)
    held = drawn(llm.generate([SCENE], replace(params, bad_words=words), use_tqdm=False))
    longer = [word for word in made if len(word) > 1]
    assert sum(bool(completions(longer, ids)) for ids in free) > 3
    assert len(held) == 32 and not any(completions(made, ids) for ids in held)
    params = replace(params, n=4, bad_word_ids=tuple(longer))
    for before, after in zip(free, drawn(llm.generate([SCENE], params, use_tqdm=False)), strict=False):
        begun = next((i for i in range(16) if ends_of(longer, before[:i])), 16)
        assert after[:begun] == before[:begun]


def test_no_stop_string_ends_an_answer_before_min_tokens(llm, scene):
    """The text goes on to the stop string that the text of the first tokens does not hold, or not all of."""
    (free,), least = scene.outputs, 12
    border, beyond = (llm.tokenizer.decode(free.token_ids[:count]) for count in (least, least + 1))
    again = next(char for char in border if char in free.text[len(beyond) :])
    over = free.text[len(border) - 1 : len(beyond)]  # it begins in the text of the first tokens, and ends after it
    stops = [(again, 0), (again, least), (over, least), (over, least + 1), (border[-1], least - 1), ("\0", least)]
    held = {count: len(llm.tokenizer.decode(free.token_ids[:count])) for _, count in stops}
    ends = [free.text.find(stop, max(0, held[count] - len(stop) + 1) if count else 0) for stop, count in stops]
    cases = {case: free.text[:end] if end >= 0 else free.text for case, end in zip(stops, ends, strict=True)}
    assert cases[over, least] == border[:-1] and cases[again, 0] in border and cases[again, least] not in border
    params = [replace(GREEDY, stop=(stop,), min_tokens=least) for stop, least in cases]
    for output, text in zip(llm.generate([SCENE] * len(cases), params, use_tqdm=False), cases.values(), strict=True):
        (answer,) = output.outputs
        assert answer.text == text and (answer.finish_reason == "stop") == (text != free.text)
        assert answer.token_ids == free.token_ids[: len(answer.token_ids)]


def test_bad_words_begin_in_the_output(llm):
    """A prompt that ends in the beginning of a bad word does not bar the rest of it."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ids = llm.tokenizer.encode(SCENE)
    (first,) = drawn(llm.generate([ids], params, use_tqdm=False))
    (same,) = drawn(llm.generate([ids], replace(params, bad_word_ids=((ids[-1], first[0]),)), use_tqdm=False))
    (other,) = drawn(llm.generate([ids], replace(params, bad_word_ids=(tuple(first[:2]),)), use_tqdm=False))
    assert same == first and other[0] == first[0] and other[1] != first[1]


@pytest.mark.parametrize(
    ("backend", "graphs"),
    [
        ("cpu", False),
        ("reference", True),
        pytest.param("triton", True, marks=[pytest.mark.interpreted, pytest.mark.full]),
    ],
)
def test_a_worker_draws_what_is_left(make, few_programs, monkeypatch, backend, graphs):
    """Rows with words, stop tokens held back and lists of allowed tokens, in one batch with rows that have none."""
    worker = make(ONE_LAYER, backend=backend, max_num_seqs=5, max_num_batched_tokens=64, swap_space=0.0)
    rng, seen = random.Random(4), []
    logits = worker.model.logits
    monkeypatch.setattr(worker.model, "logits", lambda hidden: seen.append(logits(hidden)) or seen[-1])
    free = worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])])).token_ids[0]
    if graphs:
        with torch.inference_mode():
            worker.graph_sizes, shape = [5], StepShape(5, 5, 5, 5, 1, True)
            worker.state.enter_rows(np.zeros((0, 3), dtype=np.int32), np.zeros(0, dtype=np.int32), shape)
            worker.state.apply(worker.ops)
            graph = FakeGraph(worker, shape)
    new = [row(i, [1, 2, *([free] if i == 4 else [])]) for i in range(5)]
    few, everything = (free, 5, 9, 31, 32, 96), range(97)
    for new_row in new[1:]:
        new_row.num_prompt = 2  # row 4 comes back after a preemption, with one token of output
        new_row.bad_words = [[free, token] for token in few[:4]] + [[free, free, 5], [7], [31, 96]]
    new[2].allowed, new[3].allowed = bit_words(few), bit_words(few)
    new[3].stops, new[3].min_tokens = bit_words([5, 96]), 3
    new[4].bad_words = [[rng.randrange(97), rng.randrange(97)] for _ in range(97)] + [[free, i] for i in range(30)]
    outputs, differing = [[], [], [], [], [free]], 0
    for step in range(8):
        rows = [(i, 1 if step else len(new[i].token_ids)) for i in range(5)]
        plan = StepPlan(step + 1, rows=rows, new=[] if step else new, released=[] if step else [0])
        ids = worker.step(plan).token_ids
        for i, x in enumerate(seen[-1][:5]):
            allowed = {*(few if i in (2, 3) else everything)} - ends_of(new[i].bad_words, outputs[i])
            allowed -= {5, 96} if i == 3 and step < 3 else set()
            assert ids[i] == max(allowed, key=lambda token: float(x[token])), (step, i)
            differing += ids[i] != int(x.argmax())
            outputs[i].append(ids[i])
    assert differing > 8 and (not graphs or graph.replays == 7)


@pytest.mark.parametrize(
    "backend", ["cpu", "reference", pytest.param("triton", marks=[pytest.mark.interpreted, pytest.mark.full])]
)
def test_a_worker_takes_masks_with_its_steps(make, few_programs, monkeypatch, backend):
    """Each step has other masks for the same rows; log-probabilities are among the tokens that are left, if asked."""
    rng, worker, seen = random.Random(5), make(ONE_LAYER, backend=backend, max_num_seqs=3, swap_space=0.0), []
    logits = worker.model.logits
    monkeypatch.setattr(worker.model, "logits", lambda hidden: seen.append(logits(hidden).clone()) or logits(hidden))
    new = [row(i, [1, 2]) for i in range(3)]
    for new_row in new[1:]:
        new_row.constrained, new_row.num_logprobs = True, 2
    new[2].masked_logprobs = True
    for step in range(5):
        sets = [rng.sample(range(97), rng.choice([1, 2, 40])) for _ in range(2)]
        masks = [np.zeros(4, dtype=np.uint32), np.zeros(4, dtype=np.uint32)]
        for mask, tokens in zip(masks, sets, strict=True):
            words = bit_words(tokens)
            mask[list(words)] = list(words.values())
        rows = [(i, 1 if step else 2) for i in range(3)]
        plan = StepPlan(step, rows=rows, new=[] if step else new)
        plan.masks = [(slot, mask.tobytes()) for slot, mask in enumerate(masks, 1)]
        result = worker.step(plan)
        for i, tokens in enumerate([range(97), *sets]):
            x = seen[-1][i].float()
            assert result.token_ids[i] == max(tokens, key=lambda token: float(x[token])), (step, i)
            if i:
                among = x if i == 1 else x[list(tokens)]
                wanted = float(x[result.token_ids[i]] - among.logsumexp(0))
                assert result.logprobs[i].sampled == pytest.approx(wanted, abs=1e-4)


def test_masked_logprobs_are_not_for_the_next_sequence_of_the_slot(make):
    worker, new = make(ONE_LAYER), [row(0, [1, 2], num_logprobs=2) for _ in range(3)]
    new[1].constrained = new[1].masked_logprobs = True
    records = []
    for step, new_row in enumerate(new):
        plan = StepPlan(step, rows=[(0, 2)], new=[new_row], released=[0] * (step > 0))
        plan.masks = [(0, np.array([1 << 5, 0, 0, 0], dtype=np.uint32).tobytes())] * new_row.constrained
        records.append(worker.step(plan).logprobs[0])
    assert records[0] == records[2] != records[1] and (records[1].ids[0], records[1].sampled) == (5, 0.0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("allowed", [None, (5, 9, 31, 32, 96)])
def test_a_worker_counts_down_and_then_bars_nothing(make, backend, allowed):
    """In the same batch another row goes on as ever. An allowed list of its own comes back afterwards."""
    free, worker = make(backend=backend), make(backend=backend)
    new = [row(0, [1, 2]), row(1, [3])]
    for new_row in new:
        new_row.allowed = bit_words(allowed) if allowed else None
    plain = free.step(StepPlan(0, rows=[(1, 1), (0, 2)], new=new)).token_ids[1:]
    new[0].stops, new[0].min_tokens = bit_words(plain), 2
    result = [worker.step(StepPlan(0, rows=[(1, 1), (0, 2)], new=new))]
    result += [worker.step(StepPlan(i, rows=[(1, 1), (0, 1)])) for i in range(1, 6)]
    ids = [step.token_ids[1] for step in result]
    assert plain[0] not in ids[:2] and not result[0].stopped and not result[1].stopped
    state = worker.state
    assert state.adjustments[:2].tolist() == [4 * bool(allowed)] * 2 == state.adjusted[:2].tolist()
    assert not state.stops_barred.any() and not state.barred_rows and (not allowed or {*ids} <= {*allowed})
    if allowed:
        assert state.bitmask[0].tolist() == state.bitmask[1].tolist() != [[0] * 4]
    again = row(2, [1, 2, *ids[:2]])  # as after a preemption: nothing is left to wait for, and the same token comes
    again.allowed = new[0].allowed
    assert worker.step(StepPlan(9, rows=[(2, 4)], new=[again])).token_ids == [ids[2]]


def test_tokens_are_barred_after_drafts_too():
    """All masks of a slot begin alike, a draft may begin a bad word, and a step may bring a mask for each draft."""
    state, new = BatchState(3, 32, 2, 16, 40, "cpu", drafts=2), [row(slot, [1, 2]) for slot in range(3)]
    new[0].stops, new[0].min_tokens = bit_words((5,)), 1
    new[1].allowed, new[1].bad_words, new[1].masked_logprobs = bit_words((3, 33)), [[3, 33]], True
    new[2].constrained = True
    brought = np.array([[1, 2], [3, 4]], dtype=np.uint32)
    state.enter(StepPlan(0, new=new, masks=[(2, brought.tobytes())]))
    state.apply(reference)
    assert state.bitmask.tolist() == [[[~32, -1]] * 3, [[8, 2]] * 3, [[1, 2], [3, 4], [0, 0]]]
    state.token_ids[1, 2:4] = torch.tensor([3, 3])
    slots, drafts = torch.tensor([1, 1, -1, 1]).int(), torch.tensor([[-1, -1], [3, -1], [3, 3], [3, 3]]).int()
    logits = torch.zeros(4, 40)
    logits[:, 33] = 1.0
    ids = state.sample(reference, logits, slots, state.adjust(reference), drafts)
    assert ids.tolist() == [33, 3, 0, 3] and state.bitmask[1].tolist() == [[8, 2], [8, 0], [8, 0]]
    state.bar(logits, torch.tensor([0, 3]), np.array([1, 1]), np.array([0, 2]))
    assert [x.isfinite().nonzero()[:, 0].tolist() for x in (logits[0], logits[3])] == [[3, 33], [3]]


def test_what_changes_logits_beside_min_tokens_outlasts_them(make):
    worker, new = make(ONE_LAYER), row(0, [1, 2])
    new.penalties, new.num_prompt, new.logit_bias = (1.0, 0.0, 0.5), 2, {9: 100.0}
    new.stops, new.min_tokens = bit_words((5,)), 1
    ids = worker.step(StepPlan(0, rows=[(0, 2)], new=[new])).token_ids
    assert worker.state.adjustments[0] == worker.state.adjusted[0] == PENALTIES | BIAS | MASK
    ids += [worker.step(StepPlan(step, rows=[(0, 1)])).token_ids[0] for step in (1, 2)]
    assert ids == [9] * 3 and worker.state.adjustments[0] == worker.state.adjusted[0] == PENALTIES | BIAS


def test_graphs_of_adjusted_steps_serve_while_a_row_is_held(make):
    """Each step finds the bitmask that its own row is due, and the step in which it is lifted is a plain one."""
    errors = []
    for graphs in (False, True):
        worker = make()
        new = row(0, [1, 2])
        new.stops, new.min_tokens = bit_words(range(60)), 3
        first = worker.step(StepPlan(0, rows=[(0, 2)], new=[new])).token_ids
        if graphs:
            for adjusted in (False, True):
                shape = StepShape(1, 1, 1, 1, 1, adjusted)
                kept = worker.state.words.clone(), worker.state.token_counts.clone()
                FakeGraph(worker, shape)
                worker.state.words.copy_(kept[0]), worker.state.token_counts.copy_(kept[1])
        ids = [worker.step(StepPlan(i, rows=[(0, 1)])).token_ids[0] for i in range(1, 7)]
        errors.append(first + ids)
    assert errors[0] == errors[1] and min(errors[0][:3]) >= 60
    assert [graph.replays for graph, *_ in worker.graphs.values()] == [4, 2]


def test_a_slot_that_is_left_early_bars_nothing_for_the_next(make):
    worker = make()
    want = worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])])).token_ids
    held = row(0, [1, 2])
    held.stops, held.min_tokens = bit_words(want), 5
    assert worker.step(StepPlan(1, rows=[(0, 2)], new=[held], released=[0])).token_ids != want
    worker.step(StepPlan(2, released=[0]))
    assert not worker.state.stops_barred.any() and not worker.state.barred_rows
    assert worker.step(StepPlan(3, rows=[(0, 2)], new=[row(0, [1, 2])])).token_ids == want
    assert not worker.state.stops_barred.any() and not worker.state.barred_rows and not worker.state.adjusted.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 17}, r"^min_tokens is 17; it must be at most max_tokens, 16$"),
        ({"min_tokens": -1}, r"^min_tokens is -1; it must be a whole number from 0 to"),
        ({"min_tokens": 1, "use_beam_search": True}, r"^min_tokens is 1; with use_beam_search it must be 0$"),
        ({"bad_words": ["a"], "use_beam_search": True}, r"^bad_words is .'a',.; with use_beam_search it must be empty"),
        ({"bad_word_ids": [[1]], "use_beam_search": True}, r"^bad_word_ids is .*; with use_beam_search it must be e"),
        ({"bad_words": "word"}, r"^bad_words is 'word'; it must be a list$"),
        ({"stop": 5}, r"^stop is 5; it must be a list$"),
        ({"stop_token_ids": 5}, r"^stop_token_ids is 5; it must be a list$"),
        ({"bad_words": ["a"] * 65}, r"^bad_words has 65 entries; at most 64 are allowed$"),
        ({"bad_words": ["a", " \n"]}, r"^bad_words has ' .n'; each must be a string that is not only spaces$"),
        ({"bad_words": [5]}, r"^bad_words has 5; each must be a string"),
        ({"bad_word_ids": [[5]] * 129}, r"^bad_word_ids has 129 entries; at most 128 are allowed$"),
        ({"bad_word_ids": [[5] * 17]}, r"^bad_words has one of 17 tokens; each must have from 1 to 16 tokens$"),
        ({"bad_word_ids": [[]]}, r"^bad_words has one of 0 tokens"),
        ({"bad_word_ids": [[-1]]}, r"^bad_word_ids has -1; each must be a whole number from 0 to 2\^31 - 1$"),
    ],
)
def test_parameters_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)
    assert SamplingParams(min_tokens=16).min_tokens == 16 and SamplingParams(min_tokens=99, max_tokens=None)


def test_a_token_is_always_left(llm):
    eos = llm.core.model_config.eos_token_ids[0]
    params = SamplingParams(allowed_token_ids=(eos, 7), stop_token_ids=(7,), min_tokens=1, max_tokens=3)
    with pytest.raises(
        ValueError, match=rf"^allowed_token_ids is \({eos}, 7\); at least one .* min_tokens, 1, and bad_words, \(\), "
    ):
        llm.generate([5, 6], params, use_tqdm=False)
    for other in ({"min_tokens": 0}, {"ignore_eos": True}, {"allowed_token_ids": (eos, 7, 8)}):
        assert drawn(llm.generate([5, 6], replace(params, **other), use_tqdm=False))[0]
    with pytest.raises(ValueError, match=r"^allowed_token_ids is None; at least one"):
        llm.generate([5, 6], SamplingParams(stop_token_ids=tuple(range(1024)), min_tokens=1), use_tqdm=False)
    params = SamplingParams(allowed_token_ids=(5, 7), bad_word_ids=((5,), (9, 7)))  # after 9 none would be left
    with pytest.raises(ValueError, match=r"^allowed_token_ids is \(5, 7\); at least one"):
        llm.generate([5, 6], params, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^bad_word_ids has token ids \[1024\]; allowed: 0 to 1023$"):
        llm.generate([5, 6], SamplingParams(bad_word_ids=((5, 1024),)), use_tqdm=False)
