"""The KV sanitizer: it names every planted fault, and says nothing where there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from config import EngineConfig
from cpu import ops as cpu_ops
from engine import EngineCore, SamplingParams
from fake_worker import prompt
from integrity import check_integrity
from kv_cache import BlockManager, BlockSpaceManager
from observe.sanitizer import SanitizerError
from plan import EngineCoreRequest, StepPlan
from scheduler import Scheduler
from worker import Worker
from worker_steps import HYBRID, SHAPE, STATE

LONG = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture
def make_core(tmp_path: Path):
    """Makes an engine with a sanitizer on a tiny model of random weights; `shape` changes its config.json."""

    def make(shape: dict | None = None, **fields) -> EngineCore:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | (shape or {})))
        options = {"model": str(tmp_path), "load_format": "dummy", "dtype": "float32", "device": "cpu"}
        options |= {"block_size": 4, "max_num_seqs": 8, "max_model_len": 64, "num_gpu_blocks_override": 32}
        return EngineCore(EngineConfig(**options | {"threads": 1, "swap_space": 0.001, "sanitize_kv": True} | fields))

    return make


def run(core: EngineCore) -> None:
    while core.has_work():
        core.step()


def violated(core: EngineCore) -> str:
    """What the sanitizer says when the engine runs on."""
    with pytest.raises(SanitizerError) as violation:
        run(core)
    return str(violation.value)


def wrong(block: Any, offset: Any, position: Any) -> str:
    return f"block {block}, offset {offset} does not hold this sequence's token of position {position}"


# --- planted faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False], ids=["and cached", "and free"])
def test_a_block_freed_too_early(make_core, monkeypatch, caching):
    """What is cached stays right until another sequence has the block."""
    fields = {"num_gpu_blocks_override": 16, "schedule_conservativeness": 0.0, "swap_space": 0.0}
    core, update = make_core(enable_prefix_caching=caching, **fields), Scheduler.update

    def free_too_early(self, plan, result):
        if plan.step == 5:
            self.blocks.free(self.running[0].tables[0][:1])
        return update(self, plan, result)

    monkeypatch.setattr(Scheduler, "update", free_too_early)
    core.add(EngineCoreRequest("a", prompt(10), LONG))
    for _ in range(7):
        core.step()
    core.add(EngineCoreRequest("b", prompt(40, 2), LONG))
    assert re.fullmatch(rf"KV sanitizer: step \d+, request 'a': {wrong(0, 0, 0)}", violated(core))


@pytest.mark.parametrize("noticed", [True, False], ids=["and freed", "and not even freed"])
def test_a_block_handed_to_somebody_else_too_early(make_core, monkeypatch, noticed):
    core, admit = make_core(enable_prefix_caching=False), BlockSpaceManager.admit

    def admit_into_the_first_block(self, *args):
        for seq in core.scheduler.running:
            block = seq.tables[0][0]
            if noticed:
                self.device.free([block])
            self.device.idle[block] = None
            self.device.idle.move_to_end(block, last=False)
        return admit(self, *args)

    monkeypatch.setattr(BlockSpaceManager, "admit", admit_into_the_first_block)
    core.add(EngineCoreRequest("a", prompt(10), LONG))
    for _ in range(3):
        core.step()
    core.add(EngineCoreRequest("b", prompt(6, 2), LONG))
    assert violated(core) == f"KV sanitizer: step 3, request 'a': {wrong(0, 0, 0)}"


def test_a_stale_prefix_hash(make_core, monkeypatch):
    core, allocate = make_core(num_gpu_blocks_override=16, swap_space=0.0), BlockManager.allocate

    def allocate_and_forget_to_forget(self, count: int) -> list[int]:
        cached = [(block, self.hashes[block]) for block in islice(self.idle, count)]
        taken = allocate(self, count)
        for block, digest in cached:
            if digest is not None:
                self.hashes[block], self.block_of[digest] = digest, block
        return taken

    monkeypatch.setattr(BlockManager, "allocate", allocate_and_forget_to_forget)
    for name, ids in (("a", prompt(10)), ("b", prompt(24, 2))):
        core.add(EngineCoreRequest(name, ids, LONG))
        run(core)
    core.add(EngineCoreRequest("c", prompt(10), LONG))
    assert violated(core) == f"KV sanitizer: step 80, request 'c': {wrong(0, 0, 0)}"


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_a_slot_mapping_off_by_one(make_core, monkeypatch, decode, shift):
    core, prepare_inputs = make_core(), cpu_ops.prepare_inputs

    def off_by_one(*args):
        input_ids, positions, slot_mapping, seq_lens = prepare_inputs(*args)
        return input_ids, positions, slot_mapping + shift * (decode == (len(input_ids) < 5)), seq_lens

    monkeypatch.setattr(cpu_ops, "prepare_inputs", off_by_one)
    for name in ("a", "b"):
        core.add(EngineCoreRequest(name, prompt(9 + (name == "b"), 3), LONG))
    said = rf"KV sanitizer: step {int(decode)}, request 'a': {wrong(*3 * [chr(92) + 'd'])}"
    assert re.fullmatch(said, violated(core))


@pytest.mark.parametrize("shared", [True, False], ids=["into the shared block", "into an empty one"])
def test_a_sample_that_missed_its_copy_on_write(make_core, monkeypatch, shared):
    core, admit = make_core(), BlockSpaceManager.admit

    def admit_without_copy(self, seq, *args):
        admitted, plan = admit(self, seq, *args), args[-1]
        if plan.copies:
            source, target = plan.copies.pop()
            if shared:
                self.device.free([target])
                self.device.share([source])
                seq.tables[0][seq.tables[0].index(target)] = source
        return admitted

    monkeypatch.setattr(BlockSpaceManager, "admit", admit_without_copy)
    core.add(EngineCoreRequest("a", prompt(10), SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=20)))
    assert violated(core) == (
        f"KV sanitizer: step 2, request 'a': {wrong(2, 2, 10)}"
        if shared
        else f"KV sanitizer: step 1, request 'a#1': {wrong(3, 0, 8)}"
    )


def test_a_copy_that_was_planned_and_not_made(make_core, monkeypatch):
    """The plans are right, and so is the shadow. Only the poison in the pool shows the fault."""
    core = make_core()
    monkeypatch.setattr(cpu_ops, "copy_blocks", lambda pool, pairs: None)
    core.add(EngineCoreRequest("a", prompt(10), SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=20)))
    assert violated(core) == (
        "KV sanitizer: step 1, request 'a#1': its hidden state is NaN, though its block table is right: attention has "
        "read a freed block or an unwritten slot, or the model itself makes NaN"
    )


# --- recurrent states -----------------------------------------------------------------------------------------------


def violation_of(make_core, monkeypatch, change, **fields) -> str:
    """What is said where a plan's moves of states are others than the scheduler has decided: `change(plan)` says which.

    Request b begins as a did, which has ended, and c as nobody did. Where blocks run out they are preempted.
    """
    execute, core = Worker.execute, make_core(HYBRID, **fields)
    changed = lambda worker, plan: execute(worker, change(plan) if worker.sanitizer else plan)  # noqa: E731
    monkeypatch.setattr(Worker, "execute", changed)
    for names in ("a", "bc"):
        for name in names:
            core.add(EngineCoreRequest(name, prompt(10, 2 if name == "c" else 1), LONG))
        if names == "a":
            run(core)
    return violated(core)


@pytest.mark.parametrize("brought", [False, True], ids=["not brought", "of other tokens"])
def test_a_state_that_is_not_the_one_that_was_planned(make_core, monkeypatch, brought):
    """No snapshot comes for b, or the one of a's latest output."""

    def change(plan: StepPlan) -> StepPlan:
        copies = [(9 if row >= 8 else row, to) for row, to in plan.state_copies if brought or row < 8]
        return replace(plan, state_copies=copies)

    assert violation_of(make_core, monkeypatch, change) == (
        "KV sanitizer: step 41, request 'b': the recurrent state in row 0 has not seen this sequence's first 8 tokens"
    )


def test_a_state_that_saw_too_much(make_core, monkeypatch):
    """A snapshot is taken one step too late."""
    withheld = []

    def change(plan: StepPlan) -> StepPlan:
        withheld.append([(row, to) for row, to in plan.state_copies if to >= 8])
        now = [(row, to) for row, to in plan.state_copies if to < 8]
        return replace(plan, state_copies=now + (withheld[-2] if len(withheld) > 1 else []))

    why = violation_of(make_core, monkeypatch, change)
    assert "'b': the recurrent state in row 0 has not seen this sequence's first 8 tokens" in why


def test_a_state_that_comes_back_as_another_ones(make_core, monkeypatch):
    """The states of two preempted requests change places."""

    def change(plan: StepPlan) -> StepPlan:
        return replace(plan, state_out=[(row, 1 - to) for row, to in plan.state_out])

    fields = {"preemption_mode": "swap", "num_gpu_blocks_override": 20, "enable_prefix_caching": False}
    why = violation_of(make_core, monkeypatch, change, **fields, schedule_conservativeness=0.0)
    assert re.search(r"request 'c': the recurrent state in row \d has not seen this sequence's", why), why


def test_a_state_that_was_planned_and_not_moved(make_core, monkeypatch):
    """Only the poison in the pool shows it."""
    copy_blocks = cpu_ops.copy_blocks

    def forgetful(pool: torch.Tensor, pairs: torch.Tensor) -> None:
        if pool.shape[1] != STATE // 4:
            copy_blocks(pool, pairs)

    monkeypatch.setattr(cpu_ops, "copy_blocks", forgetful)
    core = make_core(HYBRID)
    core.add(EngineCoreRequest("a", prompt(10), replace(LONG, max_tokens=2)))
    core.add(EngineCoreRequest("c", prompt(10, 2), LONG))
    for _ in range(6):  # a has left its slot
        core.step()
    core.add(EngineCoreRequest("b", prompt(10), LONG))
    with pytest.raises(SanitizerError, match="request 'b': its hidden state is NaN"):
        run(core)


# --- no false alarms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        pytest.param("recompute", {}, id="whole context", marks=pytest.mark.full),
        pytest.param("recompute", {"sliding_window": 5}, id="window"),
        pytest.param("swap", HYBRID, id="recurrent states"),
    ],
)
def test_no_false_alarm_on_a_random_model(make_core, mode, shape):
    """Samples, chunks and prefixes come and go in a pool that is far too small."""
    answers = []
    for checked in (True, False):
        core = make_core(
            shape, sanitize_kv=checked, preemption_mode=mode, num_gpu_blocks_override=18,
            max_num_batched_tokens=16, schedule_conservativeness=0.0, seed=3,
        )  # fmt: skip
        got: dict[tuple[str, int], list[int]] = {}
        for i in range(12):
            params = SamplingParams(max_tokens=18, ignore_eos=True, n=(1, 3)[i % 2])
            core.add(EngineCoreRequest(str(i), prompt(3 + i, i % 4), params))
        while core.has_work():
            for output in core.step():
                got.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        check_integrity(core.scheduler)
        metrics = core.metrics()
        assert metrics["num_preemptions_total"] > 4 and (metrics["num_swapped_blocks_total"] > 0) == (mode == "swap")
        answers.append(got)
    assert answers[0] == answers[1]


def test_nothing_is_told_when_it_is_off(make_core):
    core, plans = make_core(sanitize_kv=False, num_gpu_blocks_override=16), []
    step = core.executor.worker.step
    core.executor.worker.step = lambda plan: plans.append(plan) or step(plan)
    for i in range(3):
        core.add(EngineCoreRequest(str(i), prompt(9, i), LONG))
    run(core)
    assert core.executor.worker.sanitizer is None and type(core.scheduler.blocks) is BlockManager
    assert not any(plan.freed or any(row.name for row in plan.new) for plan in plans)
