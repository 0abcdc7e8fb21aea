"""The worker by itself: what a plan's rows bring, what it makes room for, and what it tells the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracles
import reference
import worker as worker_module
from batch_state import Writes
from config import EngineConfig
from device import memory, pools, startup, warmup
from device.pools import pinned
from device.start import Start
from device.upkeep import KeptWorker
from device.warmup import graph_sizes
from plan import StepPlan, bit_words
from worker import Worker
from worker_steps import HYBRID, ONE_LAYER, STATE, WINDOWS, FakeGraph, row, worker_in

BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4  # layers, K and V, KV heads, tokens, head size, float32


@pytest.fixture
def make(tmp_path: Path):
    return partial(worker_in, tmp_path)


def test_rows_that_ask_get_logprobs(make, monkeypatch):
    worker, seen = make(), []
    model_logits = worker.model.logits
    monkeypatch.setattr(worker.model, "logits", lambda hidden: seen.append(model_logits(hidden)) or seen[-1])
    new = [
        row(5, [3, 4, 5], 2, num_logprobs=0),
        row(1, [6], num_logprobs=-1),
        row(2, [8], num_logprobs=1000),  # more than the vocabulary has
        row(0, [1, 2, 3, 4], num_logprobs=3),  # does not sample yet
        row(4, [9, 8, 7], num_logprobs=4, temperature=3.0),
    ]
    result = worker.step(StepPlan(0, rows=[(5, 1), (1, 1), (2, 1), (0, 2), (4, 3)], new=new))
    assert [len(result.logprobs[i].ids) for i in sorted(result.logprobs)] == [0, 97, 4]
    assert sorted(result.logprobs) == [0, 2, 4] and result.token_ids[3] == -1
    want = dict(zip((0, 1, 2, 4), oracles.logprobs(seen[-1]), strict=True))  # not divided by the temperature
    for i, entry in result.logprobs.items():
        assert entry.sampled == pytest.approx(float(want[i][result.token_ids[i]]), abs=1e-5)
        assert entry.ids == want[i].sort(descending=True, stable=True).indices[: len(entry.ids)].tolist()
        assert entry.values == pytest.approx(want[i][entry.ids].tolist(), abs=1e-5)
        if result.token_ids[i] in entry.ids:
            assert entry.values[entry.ids.index(result.token_ids[i])] == entry.sampled

    result = worker.step(StepPlan(1, rows=[(0, 1), (1, 1)], released=[5, 2, 4]))
    assert not result.logprobs
    result = worker.step(StepPlan(2, rows=[(0, 1)]))
    assert len(result.logprobs[0].ids) == 3


def test_steps_in_which_no_row_asks_pay_nothing(make, monkeypatch):
    worker = make()
    worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2], num_logprobs=2)]))
    monkeypatch.setattr(worker.gatherer, "ops", SimpleNamespace(**vars(worker.ops) | {"logprobs": None}))
    with pytest.raises(TypeError, match="not callable"):
        worker.step(StepPlan(1, rows=[(0, 1)]))
    result = worker.step(StepPlan(1, rows=[(0, 2)], released=[0], new=[row(0, [1, 2])]))
    assert result.token_ids[0] >= 0 and result.logprobs == {}


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        ({"preemption_mode": "auto", "enable_prefix_caching": False}, 20),
        ({"preemption_mode": "swap", "enable_prefix_caching": False}, 20),
        ({"preemption_mode": "recompute", "enable_prefix_caching": True}, 20),
        ({"preemption_mode": "recompute", "enable_prefix_caching": False}, 0),
        ({"preemption_mode": "auto", "swap_space": 0.0}, 0),
        ({"preemption_mode": "auto", "swap_space": 1.0}, 250),  # a quarter of the memory that is free
        ({"preemption_mode": "auto", "swap_space": None}, 0),  # on a CPU it would be the same memory
        ({"preemption_mode": "swap", "swap_space": None}, 250),
    ],
)  # fmt: skip
def test_host_pool_is_there_where_it_is_of_use(make, monkeypatch, fields, blocks):
    reads = []
    monkeypatch.setattr(startup.machine, "available_bytes", lambda: reads.append(1000 * BLOCK_BYTES) or reads[-1])
    worker = make(max_num_seqs=100, **{"swap_space": 20.5 * BLOCK_BYTES / 2**30} | fields)
    assert worker.facts()["num_host_blocks"] == len(worker.host_pool) == blocks
    assert worker.host_pool.shape[1:] == worker.pool.shape[1:] and len(worker.pool) == 250
    assert len(reads) == 2  # once for the weights; later the KV pool itself has some of it
    cost = worker.facts()["swap_cost"]
    assert cost == float(f"{cost:.4g}") and (cost > 0) == (worker.config.preemption_mode == "auto" and blocks > 0)


def test_preemption_by_swap_needs_room(make):
    with pytest.raises(ValueError, match=rf"swap_space is 0.0 GiB; one KV block takes {BLOCK_BYTES} bytes"):
        make(preemption_mode="swap", swap_space=0.0)


# --- recurrent states -------------------------------------------------------------------------------------------------


def test_states_move_in_the_plans_order(make):
    """Out to the host, in from it, and then copies, of which each takes what was there before the step's tokens."""
    worker = make(HYBRID, max_num_seqs=3, num_state_snapshots=2, preemption_mode="swap", swap_space=0.001)
    assert worker.states.shape == (5, STATE // 4) and len(worker.host_states) == 3
    worker.states[:] = torch.arange(5.0)[:, None]
    worker.host_states[:] = torch.arange(10.0, 13.0)[:, None]
    plan = StepPlan(0, state_out=[(0, 1), (2, 0)], state_in=[(1, 2), (2, 0)], state_copies=[(2, 3), (4, 1)])
    worker.step(plan)
    assert worker.states[:, 0].tolist() == [12, 4, 0, 0, 4] and worker.host_states[:, 0].tolist() == [2, 0, 12]
    assert (worker.states == worker.states[:, :1]).all()


def test_a_state_goes_on_wherever_it_was_moved(make):
    """Between two parts of a prompt it goes to the host and comes back elsewhere, or becomes a beginning for others."""
    worker = make(HYBRID, max_num_seqs=3, num_state_snapshots=2, preemption_mode="swap", swap_space=0.001)
    tokens = [3 + 7 * i % 90 for i in range(30)]
    (want,) = worker.step(StepPlan(0, rows=[(0, 30)], new=[row(0, tokens, blocks=[0, 1])])).token_ids
    worker.states.fill_(torch.nan)  # who begins anew reads nothing
    worker.step(StepPlan(1, rows=[(0, 16)], released=[0], new=[row(0, tokens, blocks=[2, 3])]))
    worker.step(StepPlan(2, released=[0], state_out=[(0, 1)]))
    worker.states.fill_(torch.nan)
    new = [row(2, tokens, 16, blocks=[2, 4])]
    result = worker.step(StepPlan(3, rows=[(2, 14)], new=new, state_in=[(1, 2)], state_copies=[]))
    assert result.token_ids == [want]
    worker.step(StepPlan(4, released=[2], new=[row(1, tokens, blocks=[5, 6])], rows=[(1, 16)]))
    worker.step(StepPlan(5, state_copies=[(1, 4)], rows=[(1, 14)]))
    new = [row(0, tokens, 16, blocks=[5, 7])]
    assert worker.step(StepPlan(6, new=new, rows=[(0, 14)], state_copies=[(4, 0)])).token_ids == [want]


def test_rows_that_only_fill_up_a_step_leave_states_alone(make):
    worker = make(HYBRID, max_num_seqs=4)
    worker.graph_sizes = [4]
    worker.states.fill_(1.0)
    worker.step(StepPlan(0, rows=[(1, 1)], new=[row(1, [5])]))
    assert worker.rows.shape.rows == 4
    assert (worker.states != 1).any(1).tolist() == [False, True, *[False] * 6]


def test_rows_that_only_fill_up_a_step_meet_no_expert(make, monkeypatch):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    worker, seen = make(ONE_LAYER | experts | {"architectures": ["Qwen3MoeForCausalLM"]}), []
    plan_experts = worker.ops.plan_experts
    monkeypatch.setattr(worker.ops, "plan_experts", lambda w, ids, *a: seen.append(ids) or plan_experts(w, ids, *a))
    worker.graph_sizes = [4]
    worker.step(StepPlan(0, rows=[(1, 1)], new=[row(1, [5])]))
    worker.step(StepPlan(1, rows=[(0, 3)], new=[row(0, [5, 6, 7])]))
    assert [ids.shape for ids in seen] == [(4, 2), (3, 2)]
    assert (seen[0][0] >= 0).all() and (seen[0][1:] == -1).all() and (seen[1] >= 0).all()


@pytest.mark.parametrize(
    ("fields", "snapshots", "host"),
    [
        ({}, 8, 0),
        ({"num_state_snapshots": 3}, 3, 0),
        ({"num_state_snapshots": 0}, 0, 0),
        ({"enable_prefix_caching": False}, 0, 0),
        ({"swap_space": 20.5 * STATE / 2**30}, 8, 8),  # one for each sequence, in half of it
        ({"swap_space": 7.5 * STATE / 2**30}, 8, 3),
        ({"swap_space": 1.0, "preemption_mode": "recompute"}, 8, 0),
        ({"swap_space": 1.0, "num_host_states": 5}, 8, 5),
    ],
)  # fmt: skip
def test_the_engine_is_told_how_many_states_there_are(make, fields, snapshots, host):
    worker = make(HYBRID, **{"swap_space": 0.0} | fields)
    assert len(worker.states) == 8 + snapshots and len(worker.host_states) == host
    block = 16 * 2 * 2 * 8 * 4
    assert worker.facts()["states"] == {"snapshots": snapshots, "host": host, "blocks": STATE / block}
    assert worker.facts()["memory"]["states"] == (8 + snapshots) * STATE


def test_on_a_cpu_states_take_half_of_the_memory(make, monkeypatch):
    def start(free: int, **fields) -> Worker:
        monkeypatch.setattr(startup.machine, "available_bytes", lambda: free)
        return make(HYBRID, max_num_seqs=400, max_model_len=16, num_gpu_blocks_override=9, **fields)

    for states, snapshots in ((2000, 400), (1300, 250), (800, 0)):
        assert start(states * STATE).facts()["states"]["snapshots"] == snapshots
    for states, fields, count in ((790, {}, 400), (1000, {"num_state_snapshots": 101}, 501)):
        free = states * STATE // 2
        what = rf"prefix cache take {count * STATE} bytes, and {free} are free for them: lower max_num_seqs or"
        with pytest.raises(ValueError, match=what):
            start(states * STATE, **fields)


def test_a_model_without_states_keeps_none(make):
    worker = make()
    assert worker.facts()["states"] is None and worker.states.shape == (8, 0) and not len(worker.host_states)
    with pytest.raises(ValueError, match="num_state_snapshots is 2; MistralForCausalLM has no recurrent states"):
        make(num_state_snapshots=2)
    with pytest.raises(ValueError, match="num_state_snapshots is 2; without prefix caching it must be 0"):
        make(HYBRID, num_state_snapshots=2, enable_prefix_caching=False)
    with pytest.raises(ValueError, match=rf"swap_space is 0.0 GiB; twice a recurrent state takes {2 * STATE} bytes"):
        make(HYBRID, preemption_mode="swap", swap_space=0.0)


def test_swap_cost_is_in_tokens(make, monkeypatch):
    monkeypatch.setattr(warmup, "run_prompts", lambda start, worker: 0.003)
    monkeypatch.setattr(warmup, "time_swap", lambda worker: 0.001)
    assert make().facts()["swap_cost"] == 0.3333


def test_a_round_trip_goes_out_and_in_and_changes_nothing(make, monkeypatch):
    worker, moves = make(), []
    worker.pool.normal_()
    before, swap = worker.pool.clone(), worker.ops.swap_blocks

    def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        moves.append((source is worker.pool, target is worker.pool, len(pairs)))
        swap(source, target, pairs)

    monkeypatch.setattr(worker, "ops", SimpleNamespace(**vars(worker.ops) | {"swap_blocks": swap_blocks}))
    assert 0 < warmup.time_swap(worker) < 1
    assert moves == [(True, False, 4), (False, True, 4)] * 3
    assert torch.equal(worker.pool, before) and torch.equal(worker.host_pool[:4], before[:4])


def test_a_gpus_prompts_are_timed_once_their_kernels_are_loaded(make, monkeypatch):
    """A made-up GPU takes a second for kernels that it has not loaded yet, and 3 ms for the step."""
    ready, loaded, now = make().start, set(), [0.0]

    def execute(plan: StepPlan) -> SimpleNamespace:
        kinds = {row.sampling for row in plan.new} - loaded
        loaded.update(kinds)
        now[0] += len(kinds) + 0.003
        return SimpleNamespace(result=lambda: None)

    monkeypatch.setattr(warmup.time, "perf_counter", lambda: now[0])
    ready.device, worker = "cuda", SimpleNamespace(execute=execute, host_states=(), adapters=None)
    count, length = warmup.warm_up_prompts(ready)
    assert warmup.run_prompts(ready, worker) == pytest.approx(0.003 / (count * length)) and len(loaded) == 2


@pytest.fixture
def cudart(monkeypatch):
    """Stands in for CUDA's runtime. It registers `most` bytes at a time, and keeps a list of what it is asked for."""
    calls: list[tuple[str, ...]] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("register", address, size))
        return 0 if size <= runtime.most else 2

    runtime = SimpleNamespace(asked=calls, most=10**9, cudaHostRegister=register)
    runtime.cudaHostUnregister = lambda address: calls.append(("unregister", address))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("synchronize",)))
    return runtime


@pytest.mark.parametrize(("most", "blocks"), [(10**9, 10), (5 * BLOCK_BYTES, 5), (3 * BLOCK_BYTES, 2), (0, 0)])
def test_pinned_memory_is_as_large_as_asked_for_or_as_the_system_allows(monkeypatch, caplog, cudart, most, blocks):
    """CUDA registers just the pool's pages, not a power of two of them. After a refusal its error is cleared."""
    zeros, taken, cudart.most = torch.zeros, [], most
    monkeypatch.setattr(torch, "zeros", lambda *shape, **more: taken.append(more) or zeros(*shape))
    pool = pinned(10, (2, 2, 2, 16, 8), torch.float32)
    registered = [(address, size) for _, address, size in cudart.asked]
    assert pool.shape == (blocks, 2, 2, 2, 16, 8) and pool.dtype == torch.float32 and not pool.any()
    assert [size for _, size in registered] == [count * BLOCK_BYTES for count in (10, 5, 2, 1)[: len(registered)]]
    assert taken == [{"device": "cuda"}] * (len(registered) - bool(blocks))
    assert not blocks or registered[-1] == (pool.data_ptr(), pool.nbytes)
    assert pool.data_ptr() % mmap.PAGESIZE == 0
    assert (f"the host pool has {blocks} blocks: no more than these of 10" in caplog.text) == (blocks < 10)


def test_pinned_memory_is_given_back_once_no_step_uses_it(cudart):
    """Pages that stayed registered after they were freed would be lost, and what comes next could not lie there."""
    pool = pinned(10, (64,), torch.float32)
    ((_, address, _),), part = cudart.asked, pool[:3]
    del pool
    assert len(cudart.asked) == 1 and not part.any()
    del part
    assert cudart.asked[1:] == [("synchronize",), ("unregister", address)]


@pytest.mark.parametrize("most", [10**9, 0])
def test_the_copies_of_sleeping_weights_are_pinned_where_the_system_allows_it(monkeypatch, cudart, most):
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)  # which clears CUDA's error
    cudart.most, weight = most, torch.arange(300.0)
    part = SimpleNamespace(pieces=[SimpleNamespace(target=weight)])
    start = SimpleNamespace(parameters={"weight": part}, draft_parameters={})
    worker = SimpleNamespace(emptied=[], start=start, model=SimpleNamespace(owners=list))
    KeptWorker.empty(worker, keep=True)
    ((storage, size, copy),) = worker.emptied
    assert storage.nbytes() == 0 and size == 1200 and torch.equal(copy.view(torch.float32), torch.arange(300.0))
    assert [call[2] for call in cudart.asked] == [1200]


@pytest.mark.parametrize(
    ("shape", "windows"), [({"sliding_window": 24}, [24]), (WINDOWS | {"sliding_window": 24}, [0, 24]), ({}, [0])]
)
def test_the_windows_of_the_kinds_of_layers_are_told(make, shape, windows):
    worker = make(shape)
    assert worker.facts()["windows"] == windows and worker.model.layout.layers[0] * len(windows) == 2
    assert worker.state.block_tables.shape[:2] == (len(windows), 8)


def test_lookahead_slots_have_room_in_the_tables(make):
    plain, ahead = make(max_model_len=64), make(max_model_len=64, num_lookahead_slots=17)
    assert plain.state.block_tables.shape == (1, 8, 4) and ahead.state.block_tables.shape == (1, 8, 6)
    assert (len(plain.pool), len(ahead.pool)) == (32, 48)
    assert make(max_model_len=64, num_lookahead_slots=17, num_gpu_blocks_override=6).facts()["max_model_len"] == 64
    with pytest.raises(ValueError, match="the KV pool of 5 blocks of 16 holds 63 tokens and num_lookahead_slots, 17"):
        make(max_model_len=64, num_lookahead_slots=17, num_gpu_blocks_override=5)
    shrunk = make(num_lookahead_slots=17, num_gpu_blocks_override=5)
    assert shrunk.facts()["max_model_len"] == 63 and shrunk.state.block_tables.shape == (1, 8, 5)


@pytest.mark.parametrize("count", [1, 40], ids=["decode", "prefill"])
def test_blocks_that_the_window_has_passed_may_be_gone(make, count):
    """A table with -1 for these blocks, and NaN in all blocks but the row's own, change nothing."""
    worker, tokens = make({"sliding_window": 24}), [i * 7 % 97 for i in range(110)]
    blocks = [40, 3, 17, 22, 9, 31, 12, 5]
    worker.step(StepPlan(0, rows=[(0, 110 - count)], new=[row(0, tokens, blocks=blocks)]))
    whole = worker.step(StepPlan(1, rows=[(0, count)])).token_ids
    whole += [worker.step(StepPlan(2, rows=[(0, 1)])).token_ids[0] for _ in range(9)]

    gone = (110 - count + 1 - 24) // 16
    kept = [-1] * gone + blocks[gone:]
    worker.pool[[i for i in range(len(worker.pool)) if i not in kept]] = torch.nan
    new = [row(0, tokens, 110 - count, blocks=kept)]
    part = worker.step(StepPlan(3, rows=[(0, count)], released=[0], new=new)).token_ids
    part += [worker.step(StepPlan(4, rows=[(0, 1)])).token_ids[0] for _ in range(9)]
    assert gone == (5 if count == 1 else 2) and part == whole and len(set(whole)) > 3


def test_batch_invariant_products_are_the_kernels_own(make, monkeypatch):
    """They multiply all matrices of all layers, and the head."""
    pytest.importorskip("triton")
    seen = []
    linear = lambda x, weight, bias: seen.append(weight.shape) or reference.linear(x, weight, bias)  # noqa: E731
    ops = SimpleNamespace(**vars(reference) | {"BACKEND": "triton", "linear": linear})
    monkeypatch.setattr(startup, "pick_ops", lambda *_: ops)
    monkeypatch.setattr(memory, "count_step", lambda *_: (0, 0, 0))  # it runs kernels, and these are not
    make().step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])]))
    assert not seen
    worker = make(batch_invariant=True)
    seen.clear()
    worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])]))
    assert seen == [(64, 32), (32, 32), (96, 32), (32, 48)] * 2 + [(97, 32)]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "shape",
    [pytest.param(ONE_LAYER, marks=pytest.mark.long), pytest.param(HYBRID, marks=pytest.mark.long)],
    ids=["keys", "states"],
)
def test_kernels_give_a_token_the_same_logits_however_its_sequence_was_cut(make, few_programs, monkeypatch, shape):
    """With batch_invariant logits are bit-equal in one go, in chunks, beside another row, and as a decode."""
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(startup, "pick_ops", lambda *_: kernels)
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "swap_space": 0.0}
    worker, rows_logits = make(shape, dtype="bfloat16", batch_invariant=True, **sizes), []
    logits = worker.model.logits
    monkeypatch.setattr(worker.model, "logits", lambda hidden: rows_logits.append(logits(hidden)) or rows_logits[-1])
    prompt, other = [(7 * i) % 97 for i in range(18)], [(5 * i) % 97 for i in range(24)]
    for step, cuts in enumerate(([18], [9, 1, 1, 7], [16, 2], [17, 1])):
        worker.step(StepPlan(step, new=[row(1, prompt)], released=[1] * (step > 0)))
        for count in cuts[:-1]:
            worker.step(StepPlan(step, rows=[(1, count)]))
        assert len(rows_logits) == step
        beside = [(0, 24)] if step == 2 else []
        worker.step(StepPlan(step, rows=[(1, cuts[-1]), *beside], new=[row(0, other)] if beside else []))
    assert all(torch.equal(rows[0], rows_logits[0][0]) for rows in rows_logits) and rows_logits[2].shape[0] == 2
    second = [worker.step(StepPlan(9, rows=[(1, 1)])), rows_logits.pop()][1]
    again = row(2, [*prompt, int(rows_logits[0][0].argmax())], blocks=list(range(24, 32)))
    worker.step(StepPlan(10, rows=[(2, 19)], new=[again]))
    assert torch.equal(rows_logits[-1], second)


def test_rows_that_run_one_by_one_are_told_by_their_numbers_in_the_plan(make):
    """With batch_invariant on a CPU: which row has stopped, and whose log-probabilities they are."""
    worker = make(ONE_LAYER)
    worker.one_by_one = True
    worker.arrange()
    (token,) = worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])])).token_ids
    new = [row(0, [1, 2]), row(1, [1, 2], num_logprobs=1)]
    new[1].stops = bit_words((token,))
    result = worker.step(StepPlan(1, rows=[(0, 2), (1, 2)], new=new, released=[0]))
    assert result.token_ids == [token, token] and result.stopped == [1] == [*result.logprobs]


def test_rows_keep_count_of_their_tokens(make):
    """At first the plan gives the counts, with a preempted row's output, then the device adds. A slot's are dropped."""
    worker, state = make(), None
    state = worker.state
    row_ids = [3, 4, 3, 5, 5, 6]
    changed = row(2, row_ids)
    changed.penalties, changed.num_prompt = (1.2, 0.5, 0.25), 3
    changed.logit_bias, changed.allowed = {9: -3.0, 4: 2.0}, bit_words((0, 31, 32, 96, 31))
    tokens = worker.step(StepPlan(0, rows=[(2, 6), (3, 2)], new=[changed, row(3, [7, 7])])).token_ids
    tokens[1:] = worker.step(StepPlan(1, rows=[(2, 1), (3, 1)])).token_ids[:1]
    want = torch.zeros(97, dtype=torch.int32)
    want[[3, 4]] = 1
    for token in (*row_ids[3:], *tokens):
        want[token] += 2
    assert torch.equal(state.token_counts[2], want) and not state.token_counts[3].any()
    assert state.adjustments.tolist() == [0, 0, 7, 0, 0, 0, 0, 0]
    assert state.bias_ids[2, :3].tolist() == [4, 9, 2**31 - 1]
    assert state.biases[2, :2].tolist() == [2.0, -3.0] and state.bitmask[2].tolist() == [[1 - 2**31, 1, 0, 1]]
    worker.step(StepPlan(2, rows=[(2, 2)], released=[2, 3], new=[row(2, [1, 2])]))
    assert not state.adjustments.any() and not state.adjusted.any()


def test_a_step_that_fails_early_leaves_no_slot_half_told(make, monkeypatch):
    """If the device has not got what the host noted of a slot, it gets it with the slot's next row."""
    worker = make()

    def fail(*args):
        raise torch.OutOfMemoryError("no room for the pairs")

    changed = row(2, [3, 4])
    changed.logit_bias, changed.stops = {9: 3.0}, bit_words((5, 31, 32))
    worker.state.writes = Writes()  # as beside a GPU; on a CPU notes are written at once
    with monkeypatch.context() as patch:
        patch.setattr(worker, "ops", SimpleNamespace(**vars(worker.ops) | {"copy_blocks": fail}))
        assert worker.step(StepPlan(0, rows=[(2, 2)], new=[changed], copies=[(0, 1)])).error
    assert not worker.state.adjustments.any()
    worker.step(StepPlan(1, rows=[(2, 2)], new=[changed]))
    assert worker.state.adjustments.tolist() == [0, 0, 2, 0, 0, 0, 0, 0] == worker.state.adjusted.tolist()
    assert worker.state.stop_bits[2, :2].tolist() == [(1 << 5) - (1 << 31), 1] and not worker.state.writes.ranges


def test_a_slot_changes_hands_between_two_steps_of_the_same_rows(make):
    """The next sequence has one token to compute, as the last one had, and asks for what that did not."""
    worker = make(ONE_LAYER)
    worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])]))
    assert not worker.step(StepPlan(1, rows=[(0, 1)])).logprobs
    changed = row(0, [1, 2], 1, num_logprobs=1)
    changed.logit_bias = {9: 100.0}
    result = worker.step(StepPlan(2, rows=[(0, 1)], new=[changed], released=[0]))
    assert result.token_ids == [9] and [*result.logprobs] == [0]


def test_a_sequence_is_stopped_by_its_own_tokens_alone(make):
    """Rows follow one another in a slot, with other stop tokens or none. All have the same first token."""
    worker = make()
    token = worker.step(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])])).token_ids[0]
    for step, (stop_ids, stopped) in enumerate((((token, 3), [1]), ((token + 1,), []), ((), []), ((token,), [1]))):
        new = row(0, [1, 2])
        new.stops = bit_words(stop_ids)
        plan = StepPlan(step + 1, rows=[(1, 1), (0, 2)], new=[new, row(1, [7, 8])], released=[0, 1][: 1 + (step > 0)])
        result = worker.step(plan)
        assert result.token_ids == [-1, token] and result.stopped == stopped


@pytest.mark.parametrize(
    "backend", ["cpu", "reference", pytest.param("triton", marks=[pytest.mark.interpreted, pytest.mark.long])]
)
def test_padded_and_replayed_decode_steps_change_nothing(make, few_programs, backend):
    """Rows come and go, some with penalties or log-probabilities. Steps with a prompt are not replayed."""
    results, states = [], []
    for sizes in ([], [1, 2, 4, 8]):
        worker = make(ONE_LAYER, backend=backend, max_num_batched_tokens=64, swap_space=0.0)
        with torch.inference_mode():
            worker.graph_sizes, result = sizes, []
            for size in sizes[1:]:
                shape = worker.shape_of(np.ones(size, dtype=np.int32), np.ones(size, dtype=bool))
                worker.state.enter_rows(np.zeros((0, 3), dtype=np.int32), np.zeros(0, dtype=np.int32), shape)
                worker.state.apply(worker.ops)
                FakeGraph(worker, shape)
        new = [row(i, [3 + i, 4, 5 * i], num_logprobs=2 if i == 4 else -1, temperature=i / 4) for i in range(6)]
        result.append(worker.step(StepPlan(0, rows=[(i, 3) for i in range(6)], new=new)))
        for step, slots in enumerate(((0, 1, 2, 3, 4, 5), (4, 2, 0), (5,), (1, 0, 3, 2, 5))):
            result.append(worker.step(StepPlan(step + 1, rows=[(slot, 1) for slot in slots])))
        changed = row(7, [9, 8, 7, 9], temperature=0.7)
        changed.penalties, changed.num_prompt = (1.3, 0.4, 0.2), 4
        result.append(worker.step(StepPlan(6, rows=[(3, 1), (7, 3)], new=[changed], released=[4])))
        for step in (7, 8, 9):
            result.append(worker.step(StepPlan(step, rows=[(7, 1), (3, 1), (0, 1)])))
        results.append(result), states.append(worker.state)
    assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]
    assert [sorted(r.logprobs) for r in results[1]] == [[4], [4], [0], *[[]] * 6]
    for plain, padded in zip(*results, strict=True):
        assert [(i, p.ids) for i, p in plain.logprobs.items()] == [(i, p.ids) for i, p in padded.logprobs.items()]
    assert [graph.replays for graph, *_ in worker.graphs.values()] == [0, 1, 2]  # adjusted steps are other shapes
    for part in ("token_ids", "num_known", "num_computed", "token_counts", "block_tables"):
        assert torch.equal(getattr(states[0], part), getattr(states[1], part)), part


@pytest.mark.parametrize(
    ("drafts", "backend"),
    [(0, "cpu"), (2, "reference"), pytest.param(0, "triton", marks=[pytest.mark.interpreted, pytest.mark.full])],
)
def test_log_probabilities_after_a_replay_are_those_of_an_eager_step(make, few_programs, backend, drafts):
    """Rows ask for none, few or all of them, some with penalties or under a mask, and after drafts, too."""
    told, options = [], {"method": "ngram", "num_speculative_tokens": 2} if drafts else None
    for graphs in (False, True):
        worker = make(ONE_LAYER, backend=backend, swap_space=0.0, speculative_config=options)
        worker.graph_sizes, worker.watch = [4, 8], contextlib.nullcontext  # a CPU's warm-up has fewer drafts
        new = [row(i, [3 + i, 4, 5 * i], num_logprobs=k, temperature=i / 4) for i, k in enumerate((0, -1, 1000, 2, 3))]
        new[2].penalties, new[2].num_prompt = (1.3, 0.4, 0.2), 3
        new[3].allowed, new[3].masked_logprobs = bit_words(range(40)), True
        for size in (4, 8) if graphs else ():
            with torch.inference_mode():
                ones = np.ones(size, dtype=np.int32)
                shape = worker.shape_of(ones * (1 + drafts), ones * (1 + drafts), ones * drafts)
                worker.state.enter_rows(np.zeros((0, 3), dtype=np.int32), ones[:0], shape)
                worker.state.apply(worker.ops)
                FakeGraph(worker, shape._replace(adjusted=True))
        results = [worker.step(StepPlan(0, rows=[(i, 3) for i in range(5)], new=new))]
        for step, slots in enumerate(((0, 1, 2, 3, 4), (3, 2, 1), (2, 4, 0, 3), (0, 1, 2, 3, 4))):
            for slot in slots if drafts else ():
                known = int(worker.state.num_known[slot])
                worker.state.token_ids[slot, known : known + 2] = torch.tensor([results[0].token_ids[slot], 7])
                worker.state.num_drafts[slot] = 2
            plan = StepPlan(step + 1, rows=[(slot, 1 + drafts) for slot in slots], drafts=dict.fromkeys(slots, drafts))
            results.append(worker.step(plan if drafts else dataclasses.replace(plan, drafts={})))
        told.append(results)
    assert not [result.error for result in told[0] if result.error]
    assert told[0] == told[1]
    if drafts:
        asked = [{row: len(of.logprobs) for row, of in result.verified.items()} for result in told[0][1:]]
        assert asked[0].keys() == set(range(5)) and asked[0][1] == 0 < min(asked[0][row] for row in (0, 2, 3, 4))
    else:
        assert [sorted(result.logprobs) for result in told[1][1:]] == [[0, 2, 3, 4], [0, 1], [0, 1, 2, 3], [0, 2, 3, 4]]
        assert max(told[1][1].logprobs[3].ids) < 40
    assert [graph.replays for graph, *_ in worker.graphs.values()] == [2, 2]
    assert len({logits.data_ptr() for *_, logits in worker.graphs.values()}) == 1


def test_a_graph_makes_drafts_only_where_the_plan_wants_some(make, monkeypatch):
    worker = make(ONE_LAYER, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    seen, ones = [], np.ones(1, dtype=np.int32)
    propose = worker.proposer.propose
    monkeypatch.setattr(worker.proposer, "propose", lambda *args: seen.append(args[-1]) or propose(*args))
    worker.step(StepPlan(0, rows=[(0, 3)], new=[row(0, [3, 4, 5])]))
    with torch.inference_mode():
        for proposes in (False, True):
            shape = worker.shape_of(ones, ones)._replace(proposes=proposes)
            worker.state.enter_rows(np.zeros((0, 3), dtype=np.int32), ones[:0], shape)
            FakeGraph(worker, shape)
    worker.rows = None
    assert seen == [0, 2]  # of the prompt, and of the graph that proposes
    for step, count in enumerate((0, 2, 0, 0, 1)):
        worker.step(StepPlan(step + 1, rows=[(0, 1)], propose=count))
    assert [graph.replays for graph, *_ in worker.graphs.values()] == [3, 2] and seen[2:] == [2, 2]


def test_graphs_are_for_1_2_4_the_eights_and_the_most():
    assert graph_sizes(1) == [1] and graph_sizes(2) == [1, 2] and graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(8) == [1, 2, 4, 8] and graph_sizes(9) == [1, 2, 4, 8, 9]
    assert graph_sizes(256)[-3:] == [240, 248, 256] and len(graph_sizes(256)) == 35


def test_the_host_pool_beside_a_gpu_leaves_the_host_memory(make, monkeypatch):
    """It takes half of what is free, divided among the workers of the machine. An explicit number is met or refused."""
    worker = make()
    monkeypatch.setattr(startup.machine, "available_bytes", lambda: 101 * BLOCK_BYTES)
    monkeypatch.setattr(pools, "pinned", lambda count, shape, *_: torch.zeros(min(count, 60), *shape))
    made, states = Start.__new__(Start), worker.host_states
    made.group, made.device, made.model, made.num_blocks = worker.group, "cuda", worker.model, 1000
    made.memory = SimpleNamespace(block=BLOCK_BYTES, blocks=lambda room: room // BLOCK_BYTES)
    for fields, sharers, blocks in (({}, 1, 50), ({}, 2, 25), ({"num_host_blocks": 60}, 1, 60)):
        made.config = dataclasses.replace(worker.config, swap_space=1.0, preemption_mode="auto", **fields)
        made.sharers = sharers
        assert len(pools.new_host_pool(made, states)) == blocks
    made.config = dataclasses.replace(made.config, num_host_blocks=61)
    with pytest.raises(ValueError, match="num_host_blocks is 61; the system lets 60 of them be pinned"):
        pools.new_host_pool(made, states)


def test_the_specification_runs_without_graphs():
    assert memory.captures_graphs(EngineConfig()) and memory.captures_graphs(EngineConfig(backend="triton"))
    for fields in ({"backend": "reference"}, {"enforce_eager": True}, {"sanitize_kv": True}):
        assert not memory.captures_graphs(EngineConfig(**fields))


def test_the_last_phase_of_a_trace_has_happened_once_a_step_is_done(make, monkeypatch):
    worker, recorded = make(trace="steps.json"), []

    class Event:
        def __init__(self, enable_timing: bool = False):
            pass

        def record(self) -> None:
            recorded.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    worker.device, worker.clock = "cuda", object()
    launched = worker.launch(StepPlan(0, rows=[(0, 2)], new=[row(0, [1, 2])]))
    marks = launched.phases.marks
    assert recorded == [event for _, _, event in marks] + [launched.done] and marks[-1][0] == ""


def test_what_is_copied_beside_a_step_lies_between_the_steps_around_it(make, monkeypatch):
    """The copies wait for all that was launched, and the next step for the copies. A swap is a part of its step."""
    worker, log = make(), []
    beside, main = (
        SimpleNamespace(wait_stream=lambda _, name=name: log.append(f"{name} waits")) for name in ("beside", "main")
    )

    @contextlib.contextmanager
    def entered(stream_of_its_own):
        log.append("begin")
        yield
        log.append("end")

    for name, fake in {"Stream": lambda: beside, "current_stream": lambda: main, "stream": entered}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    swap = lambda source, target, pairs: log.append(pairs.tolist())  # noqa: E731
    monkeypatch.setattr(worker, "ops", SimpleNamespace(**vars(worker.ops) | {"swap_blocks": swap}))
    monkeypatch.setattr(worker_module, "to_device", lambda array, device: torch.from_numpy(array))
    worker.device = "cuda"
    for plan in (StepPlan(0, swap_out=[(1, 2), (3, 4)], num_beside=1), StepPlan(1, swap_in=[(4, 5)]), StepPlan(2)):
        worker.execute(plan)
    assert log == [[[1, 2]], "beside waits", "begin", [[3, 4]], "end", "main waits", [[4, 5]]]


def test_a_step_is_not_done_before_the_device_is(make):
    """The results of a launched step are read once its event has happened, and not before."""
    worker, order = make(), []
    launched = worker.launch(StepPlan(3, rows=[(0, 2)], new=[row(0, [1, 2])]))
    assert launched.ready() and launched.step == 3
    launched.done = SimpleNamespace(query=lambda: bool(order), synchronize=lambda: order.append("waited"))
    brought = launched.brought
    launched.brought = SimpleNamespace(tolist=lambda: order.append("read") or brought.tolist())
    assert not launched.ready()
    assert launched.result().token_ids == brought[0].tolist() and order == ["waited", "read"] and launched.ready()
