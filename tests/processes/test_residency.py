"""Which models are loaded: drawn scenarios, without processes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processes.child import ABSENT, DRAINING, READY, STARTING
from processes.residency import Residency, Terms, Usage

MIN_SECONDS, START, RUN = 5.0, 2.0, 3.0  # seconds: the least that a model serves, and the most that the others take
MODELS = "abcde"


class World:
    """Models and their requests, as the parent and the API processes would have them."""

    def __init__(self, memory: int, **terms: Terms):
        self.residency, self.now = Residency(memory, MIN_SECONDS), 100.0
        for name, theirs in terms.items():
            self.residency.add(name, theirs, self.now)
        self.waiting: defaultdict[str, list[float]] = defaultdict(list)  # when requests came
        self.running: defaultdict[str, list[float]] = defaultdict(list)  # when they will end
        self.used: dict[str, float] = {}
        self.starts: dict[str, float] = {}  # when each start ends
        self.waited = 0.0  # the longest that a request has waited
        self.fails: set[str] = set()
        self.unloaded: set[str] = set()

    @property
    def usage(self) -> dict[str, Usage]:
        names = self.residency.states
        return {
            name: Usage(min(self.waiting[name], default=None), bool(self.running[name]), self.used.get(name, -1e9))
            for name in names
        }

    def state(self, name: str) -> int:
        return self.residency.states[name]

    def ask(self, name: str) -> None:
        self.waiting[name].append(self.now)
        self.let_in()

    def unload(self, name: str) -> None:
        self.residency.unload(name)
        self.unloaded.add(name)

    def let_in(self) -> None:
        for name, state in self.residency.states.items():
            if state == READY:
                self.waited = max([self.waited, *(self.now - asked for asked in self.waiting[name])])
                self.running[name] += [self.now + RUN] * len(self.waiting[name])
                self.waiting[name].clear()

    def tick(self, seconds: float = 0.5) -> dict[str, int]:
        """Let time pass, and then decide; a check of what was decided."""
        self.now += seconds
        for name, ends in self.running.items():
            if ends and not (left := [end for end in ends if end > self.now]):
                self.used[name] = self.now
            self.running[name] = left if ends else ends
        for name, end in [*self.starts.items()]:
            if end <= self.now:
                del self.starts[name]
                if name in self.fails:
                    self.residency.enter(name, ABSENT, self.now)
                    self.residency.not_before[name] = self.now + 1.0
                elif self.state(name) == STARTING:
                    self.residency.enter(name, READY, self.now)
        self.let_in()
        for name in self.residency.states:
            if self.state(name) == DRAINING and not self.running[name] and name not in self.starts:
                self.residency.enter(name, ABSENT, self.now)
        before, since = dict(self.residency.states), dict(self.residency.since)
        decided = self.residency.decide(self.now, usage := self.usage)
        for name, state in decided.items():
            terms, leaving = self.residency.terms[name], name in self.residency.leaving
            assert (before[name], state) in {
                (ABSENT, STARTING), (READY, DRAINING), (STARTING, DRAINING), (DRAINING, READY),
            }  # fmt: skip
            if state == STARTING:
                self.starts[name] = self.now + START
            elif before[name] == STARTING:
                self.starts.pop(name)
            if state == DRAINING and not leaving:
                assert not terms.pin and [other for other in self.residency.queue if other != name]
                assert before[name] == STARTING or self.now >= since[name] + MIN_SECONDS
            elif state == DRAINING and name not in self.unloaded:  # its time without use is over
                assert not (terms.pin or usage[name].busy or usage[name].asked is not None)
                assert self.now >= since[name] + terms.ttl
        held = [name for name, state in self.residency.states.items() if state != ABSENT]
        assert sum(self.residency.terms[name].need for name in held) <= self.residency.memory
        self.let_in()
        return decided


needs = st.integers(1, 6)


@given(st.data())
def test_no_scenario_breaks_the_rules_and_nobody_waits_for_ever(data: st.DataObject) -> None:
    """Never over memory, never a model ended that is in use; all who wait are served."""
    terms = {
        name: Terms(data.draw(needs), name == "a" and data.draw(st.booleans()), data.draw(st.sampled_from([3.0, 1e9])))
        for name in MODELS[: data.draw(st.integers(1, 5))]
    }
    pinned = sum(each.need for each in terms.values() if each.pin)
    largest = max(each.need for each in terms.values() if not each.pin) if len(terms) > 1 or not pinned else 0
    world = World(pinned + largest + data.draw(st.integers(0, 5)), **terms)
    assert not any(world.residency.refusal(each.need) for each in terms.values() if not each.pin)
    names = st.sampled_from([*terms])
    for what in data.draw(st.lists(st.sampled_from(["ask", "ask", "ask", "leave", "unload", "crash", "fail", "mend"]))):
        name = data.draw(names)
        if what == "ask":
            world.ask(name)
        elif what == "leave":
            world.waiting[name].clear()
        elif what == "unload" and not terms[name].pin:
            world.unload(name)
        elif what == "crash" and world.state(name) in (READY, DRAINING):
            world.running[name].clear()
            world.residency.enter(name, ABSENT, world.now)
        elif what == "fail":
            world.fails.add(name)
        elif what == "mend":
            world.fails.discard(name)
        world.tick(data.draw(st.sampled_from([0.0, 0.1, 1.0, 4.0])))
    world.fails.clear()
    deadline = world.now + 2 * len(terms) * (MIN_SECONDS + START + RUN + 2)
    while any(world.waiting.values()):
        world.tick()
        assert world.now < deadline


@settings(max_examples=40)
@given(st.lists(needs, min_size=2, max_size=5), st.integers(0, 4))
def test_under_a_load_that_never_ends_every_model_has_its_turn(sizes: list[int], spare: int) -> None:
    """Each model is asked all the time. Whatever is loaded serves for its least time, and then makes room."""
    terms = {name: Terms(need) for name, need in zip(MODELS, sizes, strict=False)}
    world = World(max(sizes) + spare, **terms)
    for _ in range(240):
        for name in terms:
            world.ask(name)
        world.tick()
    assert world.waited <= len(terms) * (MIN_SECONDS + START + RUN + 2)


def world_of_two(**terms: Any) -> World:
    """Two models that do not fit together, and the first is READY."""
    world = World(10, a=Terms(6, **terms), b=Terms(6))
    world.ask("a")
    assert world.tick() == {"a": STARTING}
    world.tick(START)
    assert world.state("a") == READY
    return world


def test_a_model_that_nobody_uses_makes_room_after_its_least_time() -> None:
    world = world_of_two()
    world.tick(RUN)
    world.ask("b")
    assert not world.tick(0.1) and world.residency.queue == ["b"]
    assert world.tick(MIN_SECONDS) == {"a": DRAINING}
    assert world.tick(0.1) == {"b": STARTING}


def test_a_model_in_use_drains_and_its_new_requests_queue_behind() -> None:
    world = world_of_two()
    world.tick(MIN_SECONDS - 1)
    world.ask("b")
    world.ask("a")
    assert world.tick(1) == {"a": DRAINING}  # while a request runs
    world.ask("a")
    assert not world.tick(0.1) and world.residency.queue == ["b", "a"]
    assert world.tick(RUN) == {"b": STARTING}


def test_a_model_goes_on_when_those_it_drains_for_have_left() -> None:
    world = world_of_two()
    world.tick(MIN_SECONDS)
    world.ask("a")
    world.ask("b")
    assert world.tick(0.1) == {"a": DRAINING}
    world.waiting["b"].clear()
    assert world.tick(0.1) == {"a": READY}


def test_the_model_used_longest_ago_goes_first_and_no_more_than_needed() -> None:
    world = World(10, a=Terms(2), b=Terms(3), c=Terms(5), d=Terms(3))
    for name in "abc":
        world.ask(name)
        world.tick()
        world.tick(START)
        world.tick(RUN)
    world.tick(MIN_SECONDS)
    world.ask("d")
    assert world.tick() == {"b": DRAINING}  # a alone would not do, and with b it is not needed


def test_what_is_kept_for_the_first_that_waits_is_not_given_to_others() -> None:
    world = World(10, a=Terms(6), b=Terms(8), c=Terms(4), d=Terms(2))
    world.ask("a")
    world.tick()
    world.tick(START)
    world.ask("b")
    world.tick(0.1)
    world.ask("d")
    world.tick(0.1)
    world.ask("c")
    assert not world.tick(0.1)  # b needs what is free, and the others come after it
    assert world.residency.queue == ["b", "d", "c"]
    assert world.tick(MIN_SECONDS) == {"a": DRAINING, "d": STARTING}  # d fits beside b
    assert world.tick(0.1) == {"b": STARTING} and world.residency.queue == ["c"]


def test_a_pinned_model_is_loaded_before_anybody_asks_and_stays() -> None:
    world = World(10, a=Terms(6, pin=True), b=Terms(4), c=Terms(3))
    assert world.tick() == {"a": STARTING}
    world.tick(START)
    world.tick(1000)
    world.ask("b")
    assert world.tick() == {"b": STARTING}
    assert "needs 0.00 GiB" in world.residency.refusal(5) and not world.residency.refusal(4)


def test_a_start_that_nobody_waits_for_any_more_makes_room() -> None:
    world = World(10, a=Terms(6), b=Terms(6))
    world.ask("a")
    assert world.tick() == {"a": STARTING}
    world.ask("b")
    assert not world.tick(0.1)
    world.waiting["a"].clear()
    assert world.tick(0.1) == {"a": DRAINING}
    assert world.tick(0.1) == {"b": STARTING}


def test_a_model_ends_after_its_time_without_use() -> None:
    world = world_of_two(ttl=20.0)
    world.tick(RUN)
    assert not world.tick(19)
    assert world.tick(1) == {"a": DRAINING}
    world.tick()
    assert world.state("a") == ABSENT


def test_a_model_that_cannot_start_is_tried_again_after_a_pause() -> None:
    world = World(10, a=Terms(6), b=Terms(6))
    world.fails.add("a")
    world.ask("a")
    world.tick()
    assert not world.tick(START)
    world.ask("b")
    assert world.tick(0.1) == {"b": STARTING}  # in the pause others come first
    assert world.residency.not_before["a"] > world.now


@pytest.mark.parametrize("busy", [False, True])
def test_unloading_drains_whoever_uses_the_model(busy: bool) -> None:
    world = world_of_two()
    world.tick(1 if busy else RUN)
    world.unload("a")
    assert world.tick(0.1) == {"a": DRAINING}
    world.ask("a")
    assert world.tick(0.1) == ({} if busy else {"a": STARTING})  # it does not go on, though nobody else waits
    world.tick(RUN)
    assert world.state("a") in (STARTING, READY)
