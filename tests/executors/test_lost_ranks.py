"""One of four ranks is killed or stopped while it starts, is idle, is in a step's exchange or in a call.

The rank sends itself the signal where it is meant to be lost, so nothing here depends on who is faster.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from config import EngineConfig
from core import EngineCore
from device import channel, serve
from device.serve import start_alone
from engine import SamplingParams
from executor import MpExecutor
from forked import forked_workers, start_forking
from parallel import Group, RankGone
from plan import EngineCoreRequest, StepPlan
from served import alive, eventually
from worker_functions import count_ranks, lose_self
from worker_steps import SHAPE

HANG = 60.0  # seconds after which something hangs; no test waits so long unless it fails
OPTIONS = {
    "dtype": "float32", "device": "cpu", "load_format": "dummy", "max_model_len": 64, "max_num_seqs": 4, "threads": 1,
    "step_timeout": 2.0, "startup_timeout": 8.0,
}  # fmt: skip
LAYOUTS = {"ranks": {"tensor_parallel_size": 4}, "stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
PHASES = ("start", "idle", "step", "call")
QUICK = ("ranks", 2, "step", signal.SIGKILL)
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=[] if case == QUICK else [pytest.mark.full])
    for case in (
        *(("ranks", 2, phase, number) for phase in PHASES for number in (signal.SIGKILL, signal.SIGSTOP)),
        ("stages", 0, "step", signal.SIGKILL),
        ("stages", 3, "call", signal.SIGSTOP),
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(SHAPE))
    return str(made)


def answer_of(core: EngineCore, name: str) -> list[int]:
    """The tokens that an engine gives for a prompt."""
    core.add(EngineCoreRequest(name, [5, 6, 7], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    answer: list[int] = []
    while core.has_work():
        for output in core.step():
            assert not output.error, output.error
            answer += output.token_ids
    return answer


# --- workers of the engine --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def new_core(folder: str) -> Iterator[Callable[[str], EngineCore]]:
    """Makes an engine of a layout, or returns the one that there is."""
    cores: dict[str, EngineCore] = {}

    def new(layout: str) -> EngineCore:
        if layout not in cores:
            options = OPTIONS | LAYOUTS[layout] | {"distributed_executor_backend": "mp", "runs_functions": True}
            cores[layout] = EngineCore(EngineConfig(folder, **options))
        return cores[layout]

    with forked_workers():
        yield new
        for core in cores.values():
            core.close()


@pytest.mark.parametrize(("layout", "lost", "phase", "number"), CASES)
def test_a_lost_worker_is_named_and_all_are_replaced(
    new_core: Callable[[str], EngineCore],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    lost: int,
    phase: str,
    number: int,
) -> None:
    core, troubles = new_core(layout), list[str | None]()
    executor, want = core.executor, answer_of(core, "before")
    assert isinstance(executor, MpExecutor)
    core.workers.on_trouble = troubles.append
    pids = [process.pid for process in executor.processes]
    how = "has died (SIGKILL)" if number == signal.SIGKILL else "is stopped"
    if phase == "start":  # the third one goes well

        def start_and_lose(process: Any) -> None:
            start_alone(process)
            pids.append(process.pid)
            if process.name.endswith(str(lost)) and len(pids) <= 12:
                os.kill(process.pid, number)

        monkeypatch.setattr("executor.start_alone", start_and_lose)
        os.kill(pids[lost], signal.SIGKILL)
        how += " while it starts"
    elif phase == "idle":
        os.kill(pids[lost], number)
    else:
        core.workers.collective_rpc(lose_self, args=(lost, int(number)))
    if phase == "call":
        with pytest.raises(ValueError, match=f"rank {lost} .*; the workers were started anew, as they were before"):
            core.workers.collective_rpc(count_ranks, HANG)
    elif phase != "step":
        eventually(lambda: core.workers.check() or troubles[-1:] == [None], HANG)
    assert answer_of(core, "after") == want
    texts = [text for text in troubles if text]
    assert f"rank {lost} {how}" in texts[-1] and troubles[-1] is None
    assert not any(map(alive, pids if phase != "start" else pids[:12]))


# --- who is named -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "beating", "missing"),
    [
        ([1, 3], [], [2]),  # the only one without a word
        ([3], [1], [2]),
        ([3], [1, 2], [1, 2]),  # a rank hangs, and its heart beats on
        ([], [], [1, 2, 3]),
    ],
)
def test_who_leaves_word_or_beats_is_not_lost(monkeypatch, gone: list[int], beating: list[int], missing: list[int]):
    store, now = dist.HashStore(), 0.0
    roll_calls = [channel.RollCall(0, 1, 1.0) for _ in range(4)]
    for rank, roll_call in enumerate(roll_calls):
        roll_call.rank, roll_call.others, roll_call.store = rank, range(1, 4), store
        roll_call.beat()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        for rank in beating:
            roll_calls[rank].beat()

    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    for rank in gone:
        with pytest.raises(RankGone, match=r"^it is gone$"), roll_calls[rank].watch():
            raise RankGone("it is gone")
    names = ", ".join(map(str, missing))
    with pytest.raises(RankGone, match=f"^it is gone; no answer from rank {names}$"), roll_calls[0].watch():
        raise RankGone("it is gone")
    assert now <= channel.ROLL_CALL + 1


def test_a_rank_that_misses_the_end_of_rank_0_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, codes = 0.0, list[int]()

    def fail(key: str, amount: int) -> int:
        raise RuntimeError("rank 0 has ended")

    roll_call = channel.RollCall(1, 1, 1.0)
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(channel.os, "_exit", codes.append)
    roll_call.beat()
    roll_call.store = SimpleNamespace(add=fail)
    now = channel.MISSED - 1
    roll_call.beat()
    assert not codes
    now = channel.MISSED + 1
    roll_call.beat()
    assert codes == [1]


def test_a_rank_that_leaves_word_late_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = dist.HashStore(), 0.0
    roll_calls = [channel.RollCall(0, 1, 1.0) for _ in range(2)]
    for rank, roll_call in enumerate(roll_calls):
        roll_call.rank, roll_call.others, roll_call.store = rank, range(1, 2), store

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > channel.ROLL_CALL / 2:
            roll_calls[1].beat(channel.GOODBYE)

    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(RankGone, match=r"^it is late$"), roll_calls[0].watch():
        raise RankGone("it is late")


def test_a_step_that_a_device_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's in a CUDA graph, when another rank is gone."""
    now, looks = 0.0, 0

    def ready() -> bool:
        nonlocal now, looks
        now, looks = now + 1, looks + 1
        return False

    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: None))
    launched = SimpleNamespace(ready=ready)
    worker = SimpleNamespace(launch=lambda plan: launched, facts=lambda: {"step_timeout": 3.0}, group=Group(1, 2))
    with pytest.raises(RankGone, match=r"^rank 1 has lost the other ranks: a step takes more than 3 s$"):
        serve.run_step(worker, StepPlan(1))
    assert looks == 4


# --- ranks of a launcher ----------------------------------------------------------------------------------------------


def be_rank(
    rank: int, port: int, folder: str, case: tuple[str, int, str, int], armed: Event, words: Connection
) -> None:
    """Be a rank that a launcher has started. Rank 0 says that it is ready, goes on when it is told to, and says why it
    has ended."""
    layout, lost, phase, number = case
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    from parallel import Group
    from worker import Worker

    owner, name = (Worker, "block_bytes") if phase == "call" else (Group, "all_reduce")
    method, calls = getattr(owner, name), 0

    def lose(*args: Any) -> Any:
        nonlocal calls
        calls += armed.is_set()
        if calls == (1 if phase == "call" else 4):
            os.kill(os.getpid(), number)
        return method(*args)

    if rank == lost:
        setattr(owner, name, lose)
    config = EngineConfig(folder, **OPTIONS, **LAYOUTS[layout], distributed_executor_backend="external_launcher")
    try:
        core = EngineCore(config)  # where the others stay
        words.send("ready")
        words.recv()
        while True:
            answer_of(core, "any") if phase == "step" else core.workers.check()
    except ConnectionError as error:
        words.send(str(error))


@pytest.mark.parametrize(("layout", "lost", "phase", "number"), CASES)
def test_a_lost_rank_of_a_launcher_is_named_and_all_end(folder: str, layout: str, lost: int, phase: str, number: int):
    """If rank 0 is stopped, so is the program: those in an exchange end, and the others wait for it."""
    start_forking()
    context = multiprocessing.get_context("forkserver")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (words, theirs), armed = context.Pipe(), context.Event()
    args = port, folder, (layout, lost, phase, number), armed, theirs
    ranks = [context.Process(target=be_rank, args=(rank, *args), daemon=True) for rank in range(4)]
    others = [rank for i, rank in enumerate(ranks) if i != lost]
    if phase == "start":
        armed.set()
    for rank in ranks:
        rank.start()
    try:
        if phase != "start":
            assert words.poll(HANG) and words.recv() == "ready"
            armed.set()
            if phase == "idle":
                os.kill(ranks[lost].pid, number)
            words.send("go on")
        if lost:
            assert words.poll(HANG), "it hangs"
            assert (why := words.recv()).endswith(f"; no answer from rank {lost}"), why
        elif number == signal.SIGSTOP:  # a launcher ends all when one has ended
            assert phase == "call" or wait([rank.sentinel for rank in others], HANG), "it hangs"
            ranks[0].kill()
        for rank in others:
            rank.join(HANG)
        assert [rank.exitcode for rank in others] == [int(i > 0) for i in range(4) if i != lost]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(HANG)
