"""Tokens that may not be drawn for a while: `min_tokens` and `bad_words`, from the parameters to the text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batch_state import StepShape
from engine import SamplingParams
from plan import StepPlan, bit_words
from test_worker import FakeGraph, make, row  # noqa: F401

BATCHES = {
    "chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 32, "enable_prefix_caching": False},
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
    "tokens one by one": {"batch_invariant": True},
}
FEW = {"num_gpu_blocks_override": 64, "block_size": 4, "max_model_len": 220, "schedule_conservativeness": 0.0}


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


@pytest.mark.parametrize("fields", BATCHES.values(), ids=BATCHES)
def test_min_tokens_does_not_depend_on_how_tokens_are_computed(llm, make_llm, requests, fields):
    few = FEW if "preemption_mode" in fields else {}
    made, prompts, params = make_llm(**fields | few), *requests
    if "batch_invariant" in fields:
        prompts, params = prompts[:3], params[:3]
    assert drawn(made.generate(prompts, params, use_tqdm=False)) == drawn(llm.generate(prompts, params, use_tqdm=False))
    assert not few or made.core.metrics()["num_preemptions_total"] > 3


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("allowed", [None, (5, 9, 31, 32, 96)])
def test_a_worker_counts_down_and_then_bars_nothing(make, backend, allowed):  # noqa: F811
    """In the same batch another row goes on as ever. An allowed list of its own comes back afterwards."""
    free, worker = make(backend=backend), make(backend=backend)
    new = [row(0, [1, 2]), row(1, [3])]
    for each in new:
        each.allowed = bit_words(allowed) if allowed else None
    plain = free.step(StepPlan(0, rows=[(1, 1), (0, 2)], new=new)).token_ids[1:]
    new[0].stops, new[0].min_tokens = bit_words(plain), 2
    result = [worker.step(StepPlan(0, rows=[(1, 1), (0, 2)], new=new))]
    result += [worker.step(StepPlan(i, rows=[(1, 1), (0, 1)])) for i in range(1, 6)]
    ids = [step.token_ids[1] for step in result]
    assert plain[0] not in ids[:2] and not result[0].stopped and not result[1].stopped
    state = worker.state
    assert state.kinds[:2].tolist() == [4 * bool(allowed)] * 2 == state.adjusted[:2].tolist() and not state.held.any()
    assert not state.held_rows and (not allowed or {*ids} <= {*allowed})
    if allowed:
        assert state.bitmask[0].tolist() == state.bitmask[1].tolist() != [0] * 4
    again = row(2, [1, 2, *ids[:2]])  # as after a preemption: nothing is left to wait for, and the same token comes
    again.allowed = new[0].allowed
    assert worker.step(StepPlan(9, rows=[(2, 4)], new=[again])).token_ids == [ids[2]]


def test_graphs_of_adjusted_steps_serve_while_a_row_is_held(make):  # noqa: F811
    """Each step finds the bitmask that its own row is due, and the step in which it is lifted is a plain one."""
    told = []
    for graphs in (False, True):
        worker = make()
        new = row(0, [1, 2])
        new.stops, new.min_tokens = bit_words(range(60)), 3
        first = worker.step(StepPlan(0, rows=[(0, 2)], new=[new])).token_ids
        if graphs:
            for adjusted in (False, True):
                shape = StepShape(1, 1, 1, 1, 1, adjusted)
                kept = worker.state.words.clone(), worker.state.token_counts.clone()
                graph = FakeGraph(worker, shape)
                worker.graphs[shape] = graph, graph.ids
                worker.state.words.copy_(kept[0]), worker.state.token_counts.copy_(kept[1])
        ids = [worker.step(StepPlan(i, rows=[(0, 1)])).token_ids[0] for i in range(1, 7)]
        told.append(first + ids)
    assert told[0] == told[1] and min(told[0][:3]) >= 60
    assert [graph.replays for graph, _ in worker.graphs.values()] == [4, 2]


def test_a_slot_that_is_left_early_bars_nothing_for_the_next(make):  # noqa: F811
    worker = make()
    want = worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])])).token_ids
    held = row(0, [1, 2])
    held.stops, held.min_tokens = bit_words(want), 5
    assert worker.step(StepPlan(1, rows=[(0, 2)], new=[held], released=[0])).token_ids != want
    worker.step(StepPlan(2, released=[0]))
    assert not worker.state.held.any() and not worker.state.held_rows
    assert worker.step(StepPlan(3, rows=[(0, 2)], new=[row(0, [1, 2])])).token_ids == want
    assert not worker.state.held.any() and not worker.state.held_rows and not worker.state.adjusted.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 17}, r"^min_tokens is 17; it must be at most max_tokens, 16$"),
        ({"min_tokens": -1}, r"^min_tokens is -1; it must be a whole number from 0 to"),
        ({"min_tokens": 1, "use_beam_search": True}, r"^min_tokens is 1; with use_beam_search it must be 0$"),
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
