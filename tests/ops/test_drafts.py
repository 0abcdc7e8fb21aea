"""Drafts that are found in the known tokens, in all three backends, against a search letter by letter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import strategies as st

from examples import tried
from oracles import ints

pytest.importorskip("triton")

import kernels

WIDTH = 130  # of token_ids


def continuation(text: str, others: list[str], shortest: int, longest: int, most: int, factor: float) -> str:
    """What is drafted after a text of letters that are tokens. Longer matches are tried first, then the text's own, and
    later ones."""
    for length in range(longest, shortest - 1, -1):
        count = min(most, int(factor * length))
        if length < len(text) and (begin := text.rfind(text[-length:], 0, len(text) - 1)) >= 0:
            return (text[begin + length :] * most)[:count]
        for other in others[::-1] if length <= len(text) else []:
            if (begin := other.rfind(text[-length:], 0, len(other) - 1)) >= 0:
                return other[begin + length :][:count]
    return ""


@tried(
    st.lists(st.text("ab", min_size=1, max_size=WIDTH) | st.text("abcdefgh", min_size=1, max_size=70), min_size=1),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 9),
    st.sampled_from([16, 64]),
    st.sampled_from([(), (1e9, 5), (1.5, 5, 6), (1.0, 7, 8, 7, 8)]),
    on=[
        (["the cat and the cat", "x", "abcdef", "aaaa", "abab", "ab", "ab1" + "x" * 13 + "ab2yab"], 1, 2, 5, 16, ()),
        (
            ["abcabxabyab", "abyxbyzab", "z" * (WIDTH - 2), "qr" * (WIDTH // 2), "x" + "ab" * 9 + "c" * 20],
            2,
            1,
            4,
            64,
            (),
        ),
        (["one two three four one two", "abcXabc", "abcaXbca", "bca" + "X" * 31 + "bca"], 3, 3, 9, 16, ()),
        (["to be or not", "not to be", "a" * 20 + "to be, said he", "abc", "xabcab"], 1, 3, 9, 16, (2.0, 5)),
        (["abcd", "bcde", "x" * 40 + "abcdz" + "y" * 30 + "bcdw", "d"], 1, 3, 9, 16, (1.0, 5, 5, 6)),
    ],
    drawn=30,
)
def test_look_up(
    ops: ModuleType, place: str, texts: list[str], shortest: int, more: int, most: int, block: int, shared: tuple
) -> None:
    """Beside the drafts nothing changes, and nothing after the known tokens is read. `shared` has a factor, and the
    clients whose slots are searched, in turn; without it, each slot is searched alone."""
    longest, slots = shortest + more, [*torch.randperm(len(texts)).tolist(), -1]
    before = torch.full((len(texts) + 1, WIDTH), ord("a"), dtype=torch.int32)
    for slot, text in enumerate(texts):
        before[slot, : len(text)] = ints(*map(ord, text))
    ids, lengths, counts = (x.to(place) for x in (before, ints(*map(len, texts), 9), ints(*[7] * len(texts), 7)))
    factor, *of = shared or (1e9, *range(len(texts)))
    clients = [of[slot % len(of)] for slot in range(len(texts))]
    options = (ints(*clients, 99).to(place), factor) if shared else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels.look_up.__globals__, "TOKENS", block)
        got = ops.look_up(ids, lengths, counts, ints(*slots).to(place), shortest, longest, most, *options).cpu()
    assert got.dtype == torch.int32 and got.shape == (len(slots), most)
    assert (got[-1] == -1).all() and int(counts[-1]) == 7
    for row, slot in zip(got.tolist(), slots[:-1], strict=False):
        text = texts[slot]
        others = [texts[u] for u in range(len(texts)) if u != slot and clients[u] == clients[slot]]
        drafted = continuation(text, others, shortest, longest, min(most, WIDTH - len(text)), factor)
        want = [*map(ord, drafted)]
        assert row == want + [-1] * (most - len(want)) and int(counts[slot]) == len(want)
        before[slot, len(text) : len(text) + len(want)] = ints(*want)
    assert torch.equal(ids.cpu(), before) and lengths.tolist() == [*map(len, texts), 9]


@tried(
    st.lists(st.tuples(st.integers(0, WIDTH), st.lists(st.integers(-1, 9), max_size=9)), min_size=1, max_size=20),
    st.integers(1, 9),
    on=[
        ([(5, [7, 8, 9]), (1, []), (WIDTH - 2, [4, 3, 2]), (WIDTH, [1]), (0, [6, -1, 5])], 3),
        ([(40, [0]), (WIDTH - 1, [3]), (7, [-1])], 1),
        ([(9, [*range(8)]), (9, [*range(7)])], 8),
    ],
    drawn=30,
)
def test_put_drafts(ops: ModuleType, place: str, rows: list[tuple[int, list[int]]], most: int) -> None:
    """Drafts end at the first -1, or with the row of tokens; beside them nothing changes."""
    slots = [*torch.randperm(len(rows)).tolist(), -1]
    before, drafted = torch.full((len(rows) + 1, WIDTH), 77, dtype=torch.int32), torch.full((len(slots), most), -1)
    lengths, wanted, after = [9] * len(slots), [7] * len(slots), before.clone()
    for row, (slot, (count, drafts)) in enumerate(zip(slots, rows, strict=False)):
        drafted[row, : len(drafts)] = ints(*drafts[:most])
        taken = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        taken = taken[: min(most, WIDTH - count)]
        lengths[slot], wanted[slot] = count, len(taken)
        after[slot, count : count + len(taken)] = ints(*taken)
    drafted[-1] = 5  # padding
    ids, counts = before.to(place), ints(*[7] * len(slots)).to(place)
    ops.put_drafts(ids, ints(*lengths).to(place), counts, ints(*slots).to(place), drafted.int().to(place))
    assert torch.equal(ids.cpu(), after) and counts.tolist() == wanted
