"""Slots for adapters: who has one, who waits for one, and that nobody waits for ever."""

from __future__ import annotations

import itertools

import pytest

from fake_worker import Engine, adapted_seed, expected, prompt
from integrity import check_integrity
from sequence import Status


def loads(engine: Engine) -> list[tuple[int, int]]:
    """The adapters that plans have loaded, and where."""
    return [pair for plan in engine.plans for pair in plan.adapters]


def waiting(engine: Engine) -> list[str]:
    """The names of the sequences that wait, in order."""
    return [seq.name for seq in sorted(engine.scheduler.waiting, key=lambda seq: seq.key)]


def check(engine: Engine, adapters: dict[str, int | None], length: int, max_tokens: int) -> None:
    """Each request has got the tokens of its own adapter."""
    for name, adapter in adapters.items():
        seed = adapted_seed(0, adapter)
        assert engine.outputs[name] == expected(prompt(length), max_tokens, 64, ignore_eos=True, seed=seed)


def test_requests_of_as_many_adapters_as_there_are_slots_run_together():
    engine = Engine(max_loras=3)
    adapters = {"none": None, "a": 0, "b": 1, "c": 2, "a again": 0}
    for name, adapter in adapters.items():
        engine.add(name, prompt(3), adapter=adapter, max_tokens=6, ignore_eos=True)
    engine.step()
    assert len(engine.scheduler.running) == 5 and len(loads(engine)) == 3
    engine.run()
    check(engine, adapters, 3, 6)


def test_an_adapter_stays_until_its_slot_is_needed_and_the_least_recently_used_goes():
    engine = Engine(max_loras=2)
    for number, adapter in enumerate((0, 1, 0, 2, 0, 1)):
        engine.serve(str(number), prompt(3), adapter=adapter, max_tokens=2, ignore_eos=True)
    assert [row for row, _ in loads(engine)] == [0, 1, 2, 1]
    assert loads(engine)[2][1] == loads(engine)[1][1] == loads(engine)[3][1]  # 0 was used in between


def test_who_has_no_slot_is_passed_by_others():
    engine = Engine(max_loras=1)
    for name, adapter in {"a": 0, "b": 1, "c": None, "d": 0}.items():
        engine.add(name, prompt(3), adapter=adapter, max_tokens=20, ignore_eos=True)
    engine.step()
    assert [seq.name for seq in engine.scheduler.running] == ["a", "c"]
    assert waiting(engine) == ["b", "d"]  # 0 is to leave
    counted = engine.scheduler.reports.metrics()["num_requests_waiting_by_reason"]
    assert counted == {"capacity": 0, "deferred": 2}
    engine.now = 1.0
    engine.step()
    engine.now = 4.0
    engine.run()
    assert engine.finished == ["a", "c", "b", "d"]
    stays = engine.scheduler.reports.explain("b")["answers"][0]["stays"]
    assert stays[0]["state"] == "waiting" and stays[0]["waited_for"]["adapters"] > 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_stream_of_newcomers_keeps_an_adapter_out(slots):
    """They want the adapters that are there, and some of them always run."""
    engine = Engine(max_loras=slots, max_num_seqs=3 * slots)
    numbers = itertools.count()

    def newcomers() -> None:
        for adapter in range(slots):
            engine.add(f"new {next(numbers)}", prompt(2), adapter=adapter, max_tokens=5, ignore_eos=True)

    for _ in range(3):
        newcomers()
        engine.step()
    waiting = [engine.add(f"w{i}", prompt(3), adapter=3 + i % 2, max_tokens=5, ignore_eos=True) for i in range(4)]
    begun = engine.scheduler.step
    while any(seq.status is not Status.FINISHED for seq in waiting):
        newcomers()
        engine.step()
        assert engine.scheduler.step < begun + 120
    engine.run()
    check(engine, {f"w{i}": 3 + i % 2 for i in range(4)}, 3, 5)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_best_class_does_not_wait_for_one_that_never_comes_back(mode):
    """The only slot is that of a request which was preempted, and better ones than that one keep it out."""
    engine = Engine(
        10, 40, 24, max_loras=1, max_num_seqs=3, preemption_mode=mode, scheduling_policy="priority",
        enable_prefix_caching=False,
    )  # fmt: skip
    worst = engine.add("worst", prompt(8), adapter=0, priority=5, max_tokens=30, ignore_eos=True)
    engine.step(4)
    for number in range(60):
        engine.add(f"better {number}", prompt(8), priority=3, max_tokens=12, ignore_eos=True)
        engine.step()
        if number == 20:
            assert worst.status is (Status.SWAPPED if mode == "swap" else Status.WAITING)
            engine.add("best", prompt(8), adapter=1, priority=0, max_tokens=6, ignore_eos=True)
    assert "best" in engine.finished and "worst" not in engine.finished
    engine.run()
    check(engine, {"best": 1}, 8, 6)
    check(engine, {"worst": 0}, 8, 30)


def test_a_slot_that_a_preemption_has_freed_goes_to_the_first_in_line():
    """One is preempted whose adapter nobody else has, while a step is planned."""
    options = {"max_num_batched_tokens": 64, "scheduling_policy": "priority", "enable_prefix_caching": False}
    engine = Engine(12, 40, max_loras=1, **options)
    engine.add("a", prompt(8), adapter=0, priority=5, max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("b", prompt(3), adapter=1, priority=5, max_tokens=2, ignore_eos=True)
    engine.step()
    assert waiting(engine) == ["b"]
    engine.add("large", prompt(38), priority=0, max_tokens=1, ignore_eos=True)
    engine.serve("c", prompt(3), adapter=2, priority=3, max_tokens=2, ignore_eos=True)
    assert [row for row, _ in loads(engine)] == [0, 2, 0, 1]
    assert engine.finished == ["large", "c", "a", "b"]


def test_the_best_class_that_is_passed_bars_worse_ones_though_another_was_passed_before():
    """A stream of the middle class never ends, and all of it wants the only adapter that has a slot."""
    engine = Engine(200, max_num_seqs=4, max_num_batched_tokens=64, scheduling_policy="priority", max_loras=1)

    def step() -> None:
        if engine.scheduler.step % 4 == 0:
            engine.add(f"s{engine.scheduler.step}", prompt(5), priority=0, adapter=0, max_tokens=10, ignore_eos=True)
        engine.step()

    for _ in range(5):
        step()
    engine.add("last", prompt(5), priority=9, adapter=1, max_tokens=4, ignore_eos=True)
    step()
    urgent = engine.add("same class", prompt(5), priority=0, adapter=2, max_tokens=4, ignore_eos=True)
    for _ in range(30):
        step()
    assert urgent.status is Status.FINISHED


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_worst_class_makes_way_for_an_adapter(mode):
    """Even if that of the class between comes first; and what was swapped for an adapter's slot may preempt others."""
    engine = Engine(
        200, 64, 200, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy="priority", max_loras=2,
        preemption_mode=mode,
    )  # fmt: skip
    for name, rank, adapter in (("mid", 1, 0), ("low", 2, 1)):
        engine.add(name, prompt(6), priority=rank, adapter=adapter, max_tokens=50, ignore_eos=True)
    engine.step(3)
    for number, ran in enumerate((["mid"], [])):
        engine.add(f"top {number}", prompt(6), priority=0, adapter=2 + number, max_tokens=20, ignore_eos=True)
        engine.step()
        running = [seq.name for seq in engine.scheduler.running]
        assert running == [f"top {i}" for i in range(number + 1)] + ran
    engine.scheduler.abort("top 0")
    engine.step()
    assert "mid" in [seq.name for seq in engine.scheduler.running]
    engine.run()
    check(engine, {"mid": 0, "low": 1}, 6, 50)


def test_a_swapped_sequence_whose_adapter_lost_its_slot_may_preempt_a_worse_one():
    engine = Engine(
        200, 64, 200, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy="priority", max_loras=1,
        preemption_mode="swap",
    )  # fmt: skip
    for name, rank, adapter in (("mid", 1, 0), ("top", 0, 1)):
        engine.add(name, prompt(6), priority=rank, adapter=adapter, max_tokens=8, ignore_eos=True)
        engine.step()
    assert [seq.name for seq in engine.scheduler.swapped] == ["mid"]
    engine.scheduler.abort("top")
    engine.serve("low", prompt(6), priority=2, adapter=1, max_tokens=50, ignore_eos=True)
    assert engine.finished == ["mid", "low"]


@pytest.mark.parametrize("adapters", [1, 5])
def test_a_client_with_many_adapters_gets_no_more_than_another(adapters):
    engine = Engine(64, max_num_seqs=1, scheduling_policy="fair", max_loras=5, enable_prefix_caching=False)
    engine.add("first", prompt(4), client="c", max_tokens=4, ignore_eos=True)
    engine.step()
    for i in range(10):
        engine.add(f"a{i}", prompt(4), client="a", adapter=i % adapters, max_tokens=8, ignore_eos=True)
    for i in range(10):
        engine.add(f"b{i}", prompt(4), client="b", adapter=0, max_tokens=8, ignore_eos=True)
    engine.run()
    assert engine.finished[1:] == [f"{client}{i}" for i in range(10) for client in "ab"]


@pytest.mark.parametrize("slots", [1, 2])
def test_who_waits_for_many_adapters_is_before_another_client_once(slots):
    """Of the many it has had its share with those that had slots; each of the other's waits for one of them at most."""
    engine = Engine(400, max_loras=slots, scheduling_policy="fair", enable_prefix_caching=False)
    for i in range(60):
        engine.add(f"many {i}", prompt(4), client="many", adapter=i // 5 % 4, max_tokens=30, ignore_eos=True)
    engine.step(10)
    for i in range(3):
        begun = engine.scheduler.step
        engine.add(f"one {i}", prompt(4), client="one", adapter=4, max_tokens=4, ignore_eos=True)
        while f"one {i}" not in engine.finished:
            engine.step()
            assert engine.scheduler.step < begun + 32
    engine.run()


def test_sequences_of_one_adapter_make_way_wherever_they_stand():
    """Only sequences of a worse class do, and those of one adapter, wherever they stand in line."""
    engine = Engine(200, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy="priority", max_loras=3)
    adapters = {"two": 0, "one": 1, "two more": 0, "better": 2, "none": None}
    for name, adapter in adapters.items():
        rank = 1 if name == "better" else 5
        engine.add(name, prompt(3), priority=rank, adapter=adapter, max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("urgent", prompt(3), priority=1, adapter=3, max_tokens=30, ignore_eos=True)
    engine.step()
    assert engine.scheduler.admission.preempted == [("one", "recompute", "urgent")]
    assert {seq.name for seq in engine.scheduler.running} == {"two", "two more", "better", "none", "urgent"}
    engine.add("fair", prompt(3), priority=5, adapter=4, max_tokens=4, ignore_eos=True)
    engine.step()
    assert engine.scheduler.admission.preempted == [] and waiting(engine) == ["one", "fair"]
    engine.run()
    check(engine, {"urgent": 3} | adapters, 3, 30)


@pytest.mark.parametrize("who", ["running", "first aside", "second aside"])
def test_an_abort_lets_others_have_what_it_waited_for(who):
    engine = Engine(max_loras=1)
    for name, adapter in {"running": 0, "first aside": 1, "second aside": 0, "third": 2}.items():
        engine.add(name, prompt(3), adapter=adapter, max_tokens=9, ignore_eos=True)
    engine.step()
    engine.scheduler.abort(who)
    check_integrity(engine.scheduler)
    engine.step()
    running = {seq.name for seq in engine.scheduler.running}
    assert running == {"running": {"first aside"}, "first aside": {"running", "second aside"}}.get(who, {"running"})
    engine.run()
    assert len(engine.finished) == 3 and engine.scheduler.admission.adapters.users == {}


@pytest.mark.parametrize("lost", [True, False], ids=["workers lost", "a result lost"])
def test_adapters_are_loaded_anew_after_what_went_wrong(lost):
    """Swapped sequences among those that run and wait: none of them holds a slot then."""
    engine = Engine(
        16, 48, 64, max_loras=2, preemption_mode="swap", max_num_seqs=6, scheduling_policy="priority",
        enable_prefix_caching=False,
    )  # fmt: skip
    adapters = {str(i): i % 4 for i in range(8)}
    for name, adapter in adapters.items():
        engine.add(name, prompt(6), adapter=adapter, priority=7 - int(name), max_tokens=20, ignore_eos=True)
        engine.step()
    times, swapped = 0, 0
    while engine.scheduler.has_work():
        engine.step()
        if engine.scheduler.step % 5 == 0 and engine.scheduler.has_work():
            swapped += len(engine.scheduler.swapped)
            times += 1
            engine.lose(lost)
    assert times > 5 and swapped
    check(engine, adapters, 6, 20)
