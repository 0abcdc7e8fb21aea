"""Expert parallelism: ranks that hold whole experts, within an engine and over several, against one engine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from config import EngineConfig
from device.loader import fill_dummy, load_weights
from device.memory import MemoryPlan, plan_stage
from engine import LLM
from forked import run_ranks
from model import Transformer
from model_config import ModelConfig
from models.expert_ranks import ExpertGroup
from parallel import Group, Pipeline
from plan import EngineCoreRequest, NewRow, Rendezvous, StepPlan
from processes.client import MPClient
from processes.fleet import launch
from processes.lockstep import Lockstep, Meetings, Waves
from processes.messages import Meet, Wave, WaveReport
from random_checkpoints import FAMILIES as FAMILY_CASES
from random_checkpoints import KEPT, Checkpoints, tiers
from sampling_params import SamplingParams
from served import command, eventually
from test_parallel import answers, make_worker
from worker import Worker

UNEVEN = "qwen3-moe-of-7"  # experts, which cannot be divided evenly
NAMES = ("deepseek-v3", "gpt-oss", "llama4", "qwen3-moe")
ALL = (*NAMES, UNEVEN)
ONE: dict[str, Any] = {"threads": 1}  # more would wait for each other
EP = ONE | {"enable_expert_parallel": True}


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


def config_alone(folder: Path, name: str) -> Path:
    """A folder with the config.json of a case of Qwen3, and without weights."""
    architecture, model_type = {"qwen3": ("Qwen3ForCausalLM", "qwen3")}.get(name, ("Qwen3MoeForCausalLM", "qwen3_moe"))
    raw = FAMILY_CASES[name]["shape"] | {"architectures": [architecture], "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def build(folder: Path, group: Group) -> Transformer:
    config = ModelConfig.from_folder(str(folder))
    return Transformer(config, reference, "cpu", torch.float32, 8, group)


def test_every_expert_has_a_rank():
    for count in (7, 8, 9, 128):
        held = [ExpertGroup(rank, 2, engine, 3).share(count) for engine in range(3) for rank in range(2)]
        assert [expert for first, n in held for expert in range(first, first + n)] == list(range(count))
        assert {n for _, n in held} <= {count // 6, count // 6 + 1}


def test_padding_meets_no_expert() -> None:
    group, x = ExpertGroup(0, 1, 1, 2), torch.randn(3, 4)
    weights, ids = torch.rand(3, 2), torch.arange(6, dtype=torch.int32).view(3, 2)
    sent = group.dispatch(x, weights, ids)
    assert [len(part) for part in sent] == [6, 6, 6] and (sent[2][:3] == -1).all()
    assert all(torch.equal(part[3:], of) for part, of in zip(sent, (x, weights, ids), strict=True))
    assert torch.equal(group.combine(sent[0], 3), x)


@pytest.mark.parametrize(
    ("name", "dummy"),
    [
        pytest.param(*case.values, dummy, marks=() if dummy else case.marks, id=f"{case.values[0]}-{kind}")
        for case in tiers("families", ALL)
        for dummy, kind in ((False, "checkpoint"), (True, "dummy"))
    ],
)
def test_ranks_hold_whole_experts_that_make_up_all(checkpoints: Checkpoints, tmp_path: Path, name: str, dummy: bool):
    folder = config_alone(tmp_path, name) if dummy and name not in KEPT["families"] else checkpoints / name

    def load(group: Group) -> Transformer:
        model = build(folder, group)
        if dummy:
            fill_dummy(model, 3)
        else:
            load_weights(model, str(folder))
        return model

    one = load(Group())
    ranks = [load(Group(rank, 2, experts=ExpertGroup(rank, 2))) for rank in range(2)]
    ranks += [load(Group(experts=ExpertGroup(0, 1, engine, 2))) for engine in range(2)]
    for i, layer in enumerate(one.layers):
        for part in ("gate_up", "gate_up_bias", "down", "down_bias"):
            if not hasattr(layer.mlp, "router") or (whole := getattr(layer.mlp, part)) is None:
                continue
            for pair in (ranks[:2], ranks[2:]):
                assert torch.equal(torch.cat([getattr(rank.layers[i].mlp, part) for rank in pair]), whole)
    assert {rank.num_parameters() for rank in ranks} == {one.num_parameters()}


@pytest.mark.parametrize(
    ("name", "engines", "message"),
    [
        ("qwen3-moe", 16, "there are 16 engines; .* no more ranks in all than the model has experts, 8"),
        ("qwen3", 2, "enable_expert_parallel is True; Qwen3ForCausalLM has no experts, so it must be False"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, name: str, engines: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(config_alone(tmp_path, name), Group(experts=ExpertGroup(0, 1, 0, engines)))


def test_memory_is_planned_for_an_engines_experts_and_the_tokens_of_all_engines(tmp_path: Path) -> None:
    kernels, folder = pytest.importorskip("kernels"), config_alone(tmp_path, "qwen3-moe")

    def plan(**fields: Any) -> MemoryPlan:
        config = EngineConfig(str(folder), **EP, **fields)
        model_config = ModelConfig.from_folder(config.folder)
        return plan_stage(config, model_config, kernels, torch.float32, 256, Pipeline(), 2**33, True)[1]

    one, three = plan(), plan(data_parallel_size=3)
    assert one.weights > three.weights and one.context < three.context and one.activations < three.activations


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch_invariant": True}, "batch_invariant is True"),
        ({"distributed_executor_backend": "uni"}, "distributed_executor_backend is 'uni'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
    ],
)
def test_what_several_engines_cannot_do_is_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=f"{words}; with enable_expert_parallel and several engines"):
        EngineConfig(enable_expert_parallel=True, data_parallel_size=2, **fields)


def run_ranks_of_one(rank: int, folders: dict[str, Path], out: Path) -> None:
    """What each process of a single engine's two ranks runs. It saves its findings in a file."""
    results = {}
    for name, folder in folders.items():
        fields: dict[str, Any] = {"tensor_parallel_size": 2} | EP
        worker = make_worker(folder, rank, f"file://{out}/{name}", **fields)
        results[name] = answers(worker)
        worker.group.close()
    torch.save(results, out / f"2.{rank}.pt")


def run_engines(place: int, ranks: int, folders: dict[str, Path], out: Path) -> None:
    """What each process of two engines runs: unequal loads, then one engine alone, and steps without any work."""
    results, (engine, rank) = {}, divmod(place, ranks)
    for name, folder in folders.items():
        fields: dict[str, Any] = {"tensor_parallel_size": ranks, "data_parallel_size": 2, "data_parallel_rank": engine}
        fields |= EP | {"expert_rendezvous": f"file://{out}/{name}-all-{ranks}"}
        worker = make_worker(folder, rank, f"file://{out}/{name}-{engine}-of-{ranks}", **fields)
        idle = [StepPlan(i) for i in range(3)]
        results[name] = [tokens_of(worker, prompts, idle * engine) for prompts in LOADS[engine]]
        for plan in () if engine else 2 * idle:
            worker.step(plan)
        worker.group.close()
    torch.save(results, out / f"2x{ranks}.{place}.pt")


def run_place(place: int, processes: int, folders: dict[str, Path], out: Path) -> None:
    """All that so many processes can be: two are one engine's ranks first, and then two engines."""
    if processes == 2:
        run_ranks_of_one(place, folders, out)
    run_engines(place, processes // 2, folders, out)


Outcome = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def outcome(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The folder with what so many processes have found in a case. They are started once for several cases."""

    @functools.cache
    def run(kept: bool, processes: int) -> Path:
        folders = {name: checkpoints / name for name in ALL if (name in KEPT["families"]) == kept}
        out = tmp_path_factory.mktemp("places")
        run_ranks(processes, run_place, processes, folders, out)
        return out

    return lambda name, processes: run(name in KEPT["families"], processes)


@pytest.mark.parametrize("name", tiers("families", ALL))
def test_ranks_of_an_engine_give_what_one_gives(checkpoints: Checkpoints, outcome: Outcome, name: str) -> None:
    one = answers(make_worker(checkpoints / name, **ONE))
    for rank in range(2):
        result = torch.load(outcome(name, 2) / f"2.{rank}.pt")[name]
        assert (result["logits"] - one["logits"]).abs().max() <= 1e-4
        assert result["tokens"] == one["tokens"]
        assert result["facts"]["parameters"] == one["facts"]["parameters"]


# Prompts of two engines in two turns. In the second the other engine has none.
LOADS: tuple[list[list[int]], ...] = ([[1, 7, 41], [1, 5]], [[3], []])
STEPS = 12


def tokens_of(worker: Worker, lengths: list[int], before: list[StepPlan]) -> list[list[int]]:
    """The greedy tokens that follow prompts of these lengths, the last of which runs in two parts beside decodes.

    It always takes the same number of steps, be there work or not.
    """
    kinds, _, per_seq = worker.state.block_tables.shape
    tables = torch.arange(len(lengths) * kinds * per_seq).view(len(lengths), kinds, per_seq).tolist()
    new = [
        NewRow(slot=slot, token_ids=[(3 * i * i + slot + n) % 97 for i in range(n)], blocks=tables[slot])
        for slot, n in enumerate(lengths)
    ]
    for plan in before:
        worker.step(plan)
    parts = [(slot, n) for slot, n in enumerate(lengths)]
    last = parts.pop() if len(parts) > 1 and lengths[-1] > 20 else None
    results = [worker.step(StepPlan(0, rows=[*parts, (last[0], 20)] if last else parts, new=new)).token_ids]
    for step in range(1, STEPS):
        rows = [(slot, 1) for slot, _ in parts]
        if last:
            rows.append((last[0], last[1] - 20 if step == 1 else 1))
        results.append(worker.step(StepPlan(step, rows=rows)).token_ids)
    worker.step(StepPlan(STEPS, released=list(range(len(lengths)))))
    return results


@pytest.mark.parametrize("name", tiers("families", ALL))
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_engines_that_share_experts_give_what_one_gives(
    checkpoints: Checkpoints, outcome: Outcome, ranks: int, name: str
) -> None:
    worker = make_worker(checkpoints / name, **ONE)
    expected = [[tokens_of(worker, prompts, []) for prompts in load] for load in LOADS]
    for place in range(2 * ranks):
        assert torch.load(outcome(name, 2 * ranks) / f"2x{ranks}.{place}.pt")[name] == expected[place // ranks]


# --- engines of a server ----------------------------------------------------------------------------------------------


def test_engines_meet_as_soon_as_all_wait() -> None:
    meetings, (a, b, back) = Meetings(2), [socket.socket() for _ in range(3)]
    assert meetings.update(a, Meet(0, 1)) == {}
    assert meetings.update(a, Meet(0, 1)) == {}  # said twice
    first = meetings.update(b, Meet(1, 1))
    assert set(first) == {a, b} and first[a] == first[b] and Path(first[a].place.removeprefix("file://")).exists()
    assert meetings.update(b, Meet(1, 1)) == {}  # it has met already
    assert meetings.update(b, Meet(1, 2)) == {a: Rendezvous()}  # its workers are gone, so the other breaks off
    second = meetings.update(a, Meet(0, 2))
    assert set(second) == {a, b} and second[a].name != first[a].name
    assert meetings.update(b, None) == {a: Rendezvous()}  # the engine is gone
    assert meetings.update(a, Meet(0, 3)) == {}
    assert meetings.update(back, Meet(1, 0)) == {back: Rendezvous()}  # it is back, and does not know that it must wait
    assert set(meetings.update(back, Meet(1, 1))) == {a, back}
    for used in (a, b, back):
        used.close()


def test_steps_of_another_meeting_do_not_count() -> None:
    waves, engine = Waves(1, "new"), Lockstep(0, Rendezvous("", "new"))
    assert waves.update(WaveReport(0, 64, True, "old")) is None
    assert waves.update(engine.join()) == Wave(0, "new")
    engine.update(Wave(64, "old"))
    assert not engine.joined and not engine.running


class Engines:
    """The engine processes of a server that share experts, without the server."""

    def __init__(self, folder: Path, **fields: Any):
        options = {"dtype": "float32", "device": "cpu", "block_size": 16, "max_num_seqs": 8}
        options |= {"data_parallel_size": 2, "skip_tokenizer_init": True, "max_num_batched_tokens": 32}
        self.launched = contextlib.ExitStack()
        config = EngineConfig(str(folder), **options | EP | fields)
        self.fleet = fleet = self.launched.enter_context(launch(config))
        assert fleet.coordinator
        self.engines, self.coordinator = [*fleet.engines.values()], fleet.coordinator
        self.clients = [MPClient(engine.address) for engine in self.engines]
        self.numbers = itertools.count()
        self.ended = threading.Event()
        self.watch = threading.Thread(target=self.check, daemon=True)
        self.watch.start()

    def check(self) -> None:
        while not self.ended.wait(0.2):
            self.fleet.check()

    def add(self, rank: int, prompt: list[int], count: int) -> Any:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return self.clients[rank].add_request(EngineCoreRequest(f"{next(self.numbers)}", prompt, params))

    def close(self) -> None:
        self.ended.set()
        self.watch.join()
        for client in self.clients:
            client.shutdown()
        self.launched.close()


def read(stream: Any) -> list[int]:
    """All tokens of a request."""
    tokens: list[int] = []
    while True:
        output = stream.get(timeout=120)
        assert not output.error, output.error
        tokens += output.token_ids
        if output.finished:
            return tokens


def workers(of: int) -> list[int]:
    """The worker processes of an engine's process."""
    children = Path(f"/proc/{of}/task/{of}/children").read_text().split()
    return [int(pid) for pid in children if "manta: worker" in command(int(pid))]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "ranks", "deaths"),
    [
        pytest.param("qwen3-moe", 1, ["engine SIGKILL"], marks=pytest.mark.full),
        pytest.param("qwen3-moe", 1, ["worker SIGKILL", "worker SIGSTOP", "engine SIGSTOP"], marks=LONG),
        *[pytest.param(name, 2, ["worker SIGKILL", "engine SIGKILL"], marks=LONG) for name in NAMES],
    ],
)
def test_engines_go_on_whoever_is_killed(checkpoints: Checkpoints, name: str, ranks: int, deaths: list[str]) -> None:
    """Whether one engine is idle, a long prompt comes beside decodes, or an engine or a worker dies or stands still."""
    folder, prompts = checkpoints / name, [[(i * i + j) % 97 for i in range(n)] for j, n in enumerate((5, 90, 17))]
    llm = LLM(str(folder), dtype="float32", device="cpu", block_size=16, skip_tokenizer_init=True, **ONE)
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    engines = Engines(folder, step_timeout=3.0, tensor_parallel_size=ranks)
    try:
        assert read(engines.add(0, prompts[0], 60)) == expected[0]  # the other engine has nothing
        streams = [engines.add(i % 2, prompt, 60) for i, prompt in enumerate(prompts)]
        assert [read(stream) for stream in streams] == expected
        for death in deaths:
            victim, name = death.split()
            stream = engines.add(0, prompts[1], 60)
            begun = stream.get(timeout=60).token_ids
            pid = engines.engines[1].process.pid
            os.kill(workers(pid)[0] if victim == "worker" else pid, signal.Signals[name])
            assert begun + read(stream) == expected[1]
            again = [engines.add(i % 2, prompt, 60) for i, prompt in enumerate(prompts[:2])]
            assert [read(stream) for stream in again] == expected[:2]
        os.kill(engines.coordinator.process.pid, signal.SIGKILL)
        eventually(lambda: engines.coordinator.process.poll() is None and not engines.coordinator.starting, 30)
        assert read(engines.add(1, prompts[2], 60)) == expected[2]
    finally:
        engines.close()
