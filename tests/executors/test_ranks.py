"""What the executor and its ranks say to each other, with threads in place of the ranks' processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import executor as executor_module
import ring as ring_module
from config import EngineConfig, FatalHookError
from device.serve import NEVER
from executor import BlamelessError, MpExecutor, WorkerError
from plan import Call, Reply, StepPlan, StepResult
from ring import Codec
from served import eventually
from test_ring import CHUNK, TinyRing, copied

STEP = 1.5  # seconds that a step or a call may take; a machine that others use may hold a thread up for half of it
LARGE = 200_000  # bytes; far more than a TinyRing holds
Act = Callable[["Rank", Any], None]
pytest.importorskip("msgspec", reason="plans and results travel in its messages")


class Rank(threading.Thread):
    """A rank, with the methods of its process. It does with each message what `act` says."""

    def __init__(self, rank: int, act: Act, step_timeout: float):
        super().__init__(daemon=True)
        self.step_timeout = step_timeout
        self.rank, self.act, self.codec, self.exitcode = rank, act, Codec(), 0
        self.pid = self  # for `is_stopped`
        self.ended, self.stopped = threading.Event(), False
        self.plans: Any = None
        self.results: Any = None

    def run(self) -> None:
        with contextlib.suppress(SystemExit, OSError, RuntimeError):  # the other end is closed, or another rank's is
            self.say(Reply(0, {"step_timeout": self.step_timeout}))
            while True:
                self.live()
                if (data := self.plans.read(0.02)) is not None:
                    self.act(self, self.codec.decode(data))
        self.plans.close()
        self.results.close()

    def live(self) -> None:
        """Beat, unless this is stopped; end, if it shall."""
        while not self.ended.is_set():
            if not self.stopped:
                return self.results.beat()
            time.sleep(0.01)
        raise SystemExit

    def rest(self, until: threading.Event) -> None:
        """Be in a function that takes long."""
        while not until.wait(0.01):
            self.live()

    def say(self, message: Any) -> None:
        self.results.write(self.codec.encode(message), NEVER, self.live)

    def kill(self) -> None:
        self.ended.set()


class Ranks(MpExecutor):
    """An executor whose ranks are threads."""

    def __init__(self, act: Act, size: int = 1, step_timeout: float = 1.0):
        self.act, self.said = act, []
        config = EngineConfig(tensor_parallel_size=size, step_timeout=step_timeout)
        super().__init__(config, None)  # type: ignore[arg-type]
        self.on_trouble = self.said.append

    def _launch(self, config: EngineConfig, size: int, rendezvous: str) -> None:
        self.plans, self.results = TinyRing(size, CHUNK), [TinyRing(1, CHUNK) for _ in range(size)]
        for rank, ring in enumerate(self.results):
            thread = Rank(rank, self.act, config.step_timeout or 0.0)
            thread.plans, thread.results = copied(self.plans), copied(ring)
            thread.plans.be_reader(rank)
            thread.results.be_writer()
            ring.be_reader(0)
            self.processes.append(thread)
        self.plans.be_writer()
        self.rings += [self.plans, *self.results]
        for thread in self.processes:
            thread.start()


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Callable[..., Ranks]]:
    """Makes a `Ranks`, whose clocks are short."""
    monkeypatch.setattr(ring_module, "BROKEN_OFF", 0.5)
    monkeypatch.setattr(executor_module, "BEAT", 0.05)
    monkeypatch.setattr(executor_module, "is_stopped", lambda rank: rank.stopped)
    monkeypatch.setattr(executor_module, "STALL", STEP)  # nothing is said of a thread that was held up for a moment
    made: list[Ranks] = []

    def make(act: Act, *args: Any, **fields: Any) -> Ranks:
        made.append(Ranks(act, *args, **fields))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def plan(step: int, size: int = 0) -> StepPlan:
    """A plan of so many bytes, about."""
    made = StepPlan(step)
    made.released = [10**9] * (size // 5)
    return made


def result(step: int, size: int = 0) -> StepResult:
    """A result of so many bytes, about."""
    return StepResult(step, [10**9] * (size // 5))


# --- both have much to say --------------------------------------------------------------------------------------------


def meeting(size: int, large: set[int]) -> Act:
    """Ranks that meet at the end of each step, and then read the next plan; those in `large` bring large results."""
    barrier = threading.Barrier(size)

    def act(rank: Rank, message: Any) -> None:
        if isinstance(message, Call):
            return rank.say(Reply(message.call_id, [rank.rank] * (LARGE if rank.rank in large else 1)))
        rank.say(result(message.step, LARGE if rank.rank in large else 0))
        barrier.wait(5)

    return act


@pytest.mark.parametrize(
    "large", [pytest.param({0}, marks=pytest.mark.full), {1}, pytest.param({0, 1, 2}, marks=pytest.mark.full)], ids=str
)
def test_large_plans_and_large_results_do_not_wait_for_each_other(ranks, large):
    """Whatever rank the engine writes to, and whatever rank that one waits for."""
    executor = ranks(meeting(3, large), 3, step_timeout=3.0)
    for step in range(1, 4):
        executor.submit(plan(step, LARGE))
    assert [executor.result() for _ in range(3)] == [result(step, LARGE * (0 in large)) for step in range(1, 4)]
    executor.submit(plan(4))
    sent = executor.collective_rpc("anything", args=[[10**9] * LARGE])  # while results and replies come
    assert [reply[0] for reply in sent] == [0, 1, 2] and executor.result().step == 4


def test_more_small_plans_and_results_than_the_rings_hold(ranks):
    executor = ranks(meeting(2, set()), 2)
    for step in range(1, 41):
        executor.submit(plan(step))
    assert [executor.result().step for _ in range(40)] == [*range(1, 41)]


@pytest.mark.parametrize("large", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_rank_that_fails_while_a_plan_is_written_says_why(ranks, large):
    def act(rank: Rank, message: Any) -> None:
        if rank.rank == 1:
            time.sleep(0.05)
            rank.say(Reply(0, error="no room" + LARGE * large * "!"))
            raise SystemExit
        rank.say(result(message.step))

    executor = ranks(act, 2)
    with pytest.raises(WorkerError, match="rank 1 has failed in step 1: no room"):
        for step in range(1, 100):
            executor.submit(plan(step, LARGE))


def test_a_users_class_that_fails_on_a_rank_ends_the_engine(ranks):
    """New workers would fail in the same way."""
    executor = ranks(lambda rank, message: rank.say(Reply(0, error="toy:Toy failed", raised="HookError")), 2)
    executor.submit(plan(1))
    with pytest.raises(FatalHookError, match=r"^toy:Toy failed$"):
        executor.result()


@pytest.mark.parametrize("how", ["stuck", *(pytest.param(how, marks=pytest.mark.full) for how in ("stopped", "dead"))])
def test_a_rank_that_takes_no_plan_is_named(ranks, how):
    """Also one whose heart beats on."""

    def act(rank: Rank, message: Any) -> None:
        if rank.rank == 1 and how == "dead":
            raise SystemExit
        if rank.rank == 1:
            rank.stopped = how == "stopped"
            rank.rest(threading.Event())
        rank.say(result(message.step))

    executor = ranks(act, 2, step_timeout=0.5)
    says = {"stopped": "is stopped", "stuck": "has made no progress for 0.5 s", "dead": r"has died \(exit code 0\)"}
    with pytest.raises(WorkerError, match=f"rank 1 {says[how]} in step 1") as error:
        for step in range(1, 100):
            executor.submit(plan(step, LARGE))
    assert (type(error.value) is BlamelessError) == (how == "stopped")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dead", r"rank 1 has died \(exit code 0\) in step 1$"),
        ("stopped", "rank 1 is stopped in step 1$"),
        ("hung", "rank 1 has made no progress for 5 s in step 1$"),
        ("two hung", "rank [02] has failed in step 1: I have lost others$"),
    ],
)
def test_of_ranks_that_wait_for_a_lost_one_none_is_named(ranks, how, says):
    """They say that they have lost others, some of them while a step's result is still to be read."""

    def act(rank: Rank, message: Any) -> None:
        if rank.rank == 1 and how == "dead":
            raise SystemExit
        if rank.rank == 1 or (rank.rank == 3 and how == "two hung"):
            rank.stopped = how == "stopped"
            return rank.rest(threading.Event())
        if rank.rank == 2:
            rank.say(result(message.step))
        rank.say(Reply(0, error="I have lost others", raised="RankGone"))
        raise SystemExit

    executor = ranks(act, 4, step_timeout=5.0)
    executor.submit(plan(1))
    with pytest.raises(WorkerError, match=says) as error:
        executor.result()
    assert (type(error.value) is BlamelessError) == (how == "stopped")


def test_after_a_message_that_was_broken_off_nothing_is_sent(ranks):
    """Some ranks would take what comes next for the rest of it."""
    executor = ranks(meeting(1, {0}))
    look, executor._look = executor._look, lambda *args: os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
    with pytest.raises(KeyboardInterrupt):
        for step in range(1, 100):
            executor.submit(plan(step, LARGE))
    executor._look = look
    for send in (lambda: executor.submit(plan(100)), lambda: executor.collective_rpc("anything")):
        with pytest.raises(WorkerError, match="a message to them, was broken off"):
            send()
    executor.restart(executor.config)
    executor.submit(plan(1, LARGE))
    assert executor.result().step == 1


def test_after_a_start_that_was_broken_off_all_start_again(ranks, monkeypatch):
    executor = ranks(meeting(1, {0}))

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor, "_launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.restart(executor.config)
    for use in (lambda: executor.submit(plan(1)), lambda: executor.collective_rpc("anything")):
        with pytest.raises(BlamelessError, match="a start of the workers, or a message to them, was broken off"):
            use()
    executor.restart(executor.config)
    executor.submit(plan(1))
    assert executor.result().step == 1


def test_what_was_shared_with_ranks_that_have_ended_is_given_back(ranks):
    executor = ranks(meeting(2, set()), 2)
    first = [*executor.rings]
    executor.restart(executor.config)
    second = [*executor.rings]
    executor.close()
    assert len(first) == len(second) == 3 and all(ring.memory.closed for ring in first + second)


# --- calls that are given up ------------------------------------------------------------------------------------------


class Slow:
    """What a rank does: it answers steps and calls, but is in a call `slow` until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, rank: Rank, message: Any) -> None:
        if isinstance(message, StepPlan):
            return rank.say(result(message.step))
        if message.method.startswith("slow"):
            rank.rest(self.go)
        failed = message.method == "slow and fails"
        rank.say(Reply(message.call_id, message.method, *(("it fails", "CallError") if failed else ())))


def give_up(executor: Ranks, method: str) -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 has not replied within 0\.01 s"):
        executor.collective_rpc(method, 0.01)


def test_steps_and_calls_wait_for_a_call_that_was_given_up(ranks):
    slow = Slow()
    executor = ranks(slow, step_timeout=30.0)
    give_up(executor, "slow")
    executor.submit(plan(1))
    give_up(executor, "another")
    slow.go.set()
    assert executor.result() == result(1) and not executor.said
    assert executor.collective_rpc("next") == ["next"]  # late replies are dropped


def test_a_call_that_failed_on_one_rank_is_given_up_on_the_others(ranks):
    slow = Slow()

    def act(rank: Rank, message: Any) -> None:
        if rank.rank:
            slow(rank, message)
        else:
            rank.say(Reply(message.call_id, "", "it fails"))

    executor = ranks(act, 2, step_timeout=30.0)
    with pytest.raises(ValueError, match="it fails"):
        executor.collective_rpc("slow")
    assert executor.given_up == {1}
    slow.go.set()


def test_a_call_that_fails_after_it_was_given_up_is_the_fault_of_no_request(ranks):
    slow = Slow()
    executor = ranks(slow, step_timeout=30.0)
    give_up(executor, "slow and fails")
    slow.go.set()
    with pytest.raises(BlamelessError, match="rank 0 has failed while idle: it fails"):
        eventually(lambda: executor.check() and False)


@pytest.mark.parametrize("how", ["is stopped", r"has died \(exit code 0\)", "has made no progress for 1.5 s"])
def test_a_rank_that_is_lost_in_a_call_that_was_given_up_is_found(ranks, how):
    executor = ranks(Slow(), step_timeout=STEP)
    give_up(executor, "slow")
    (rank,) = executor.processes
    rank.stopped = how == "is stopped"
    if "died" in how:
        rank.kill()
    executor.unanswered.append(1)  # a step that waits
    with pytest.raises(BlamelessError, match=f"rank 0 {how} in a call that was given up"):
        executor.result()


# --- a rank that fails, and one that has lost it ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "kind"), [("", WorkerError), ("PeersGone", BlamelessError), ("HookError", FatalHookError)]
)
def test_the_rank_that_failed_is_named_and_not_the_one_that_lost_it(ranks, raised, kind):
    def act(rank: Rank, message: Any) -> None:
        if isinstance(message, Call):
            return rank.say(Reply(message.call_id))
        error = Reply(0, error="rank 0 has lost the other ranks", raised="RankGone")
        rank.say(error if not rank.rank else Reply(0, error="an illegal memory access", raised=raised))

    executor = ranks(act, 2)
    executor.submit(plan(1))
    with pytest.raises(kind, match="an illegal memory access") as caught:
        executor.result()
    assert raised == "HookError" or "rank 1 has failed" in str(caught.value)
