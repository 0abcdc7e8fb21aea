"""Which models are loaded: drawn scenarios, without processes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processes.residency import ABSENT, ASLEEP, DRAINING, READY, STARTING, Residency, Terms, Usage

MIN_SECONDS, START, RUN = 5.0, 2.0, 3.0  # seconds: the least that a model serves, and the most that the others take
WAKE, FALL = 0.7, 0.6  # seconds of waking up, and of falling asleep
MODELS = "abcde"


class World:
    """Models and their requests, as the parent and the API processes would have them."""

    def __init__(self, memory: int, host: int = 0, **terms: Terms):
        self.residency, self.now = Residency(memory, MIN_SECONDS, host), 100.0
        for name, theirs in terms.items():
            self.residency.add(name, theirs, self.now)
        self.waiting: defaultdict[str, list[float]] = defaultdict(list)  # when requests came
        self.running: defaultdict[str, list[float]] = defaultdict(list)  # when they will end
        self.used: dict[str, float] = {}
        self.starts: dict[str, float] = {}  # when each start ends
        self.falls: dict[str, float] = {}  # when each has fallen asleep
        self.on_device: set[str] = set()  # whose memory is taken there, as the engines would have it,
        self.on_host: set[str] = set()  # and in the host
        self.woken: list[str] = []
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

    def end(self, name: str) -> None:
        """The process of a model ends."""
        self.residency.enter(name, ABSENT, self.now)
        self.on_device.discard(name)
        self.on_host.discard(name)
        self.starts.pop(name, None)
        self.falls.pop(name, None)

    def rest(self) -> None:
        """Each that has drained sleeps or ends, unless it has to wait for room in the host's memory."""
        for name in self.residency.states:
            if self.state(name) != DRAINING or self.running[name]:
                continue
            state = self.residency.rest(name)
            if state == ABSENT:
                self.end(name)
            elif state == ASLEEP:
                self.residency.enter(name, ASLEEP, self.now)
                self.falls[name] = max(self.now, self.starts.pop(name, 0.0)) + FALL
                self.on_host.add(name)
            else:
                assert any(self.state(other) in (STARTING, DRAINING) or other in self.residency.leaving
                           for other in self.on_host - {name})  # fmt: skip

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
                    self.end(name)
                    self.residency.not_before[name] = self.now + 1.0
                elif self.state(name) == STARTING:
                    self.residency.enter(name, READY, self.now)
                    self.on_host.discard(name)
        for name, end in [*self.falls.items()]:
            if end <= self.now:
                del self.falls[name]
                if self.state(name) == ASLEEP:
                    self.residency.falling.discard(name)
                    self.on_device.discard(name)
        self.let_in()
        self.rest()
        before, since = dict(self.residency.states), dict(self.residency.since)
        decided = self.residency.decide(self.now, usage := self.usage)
        for name, state in decided.items():
            terms, leaving = self.residency.terms[name], name in self.residency.leaving
            assert (before[name], state) in {
                (ABSENT, STARTING), (READY, DRAINING), (STARTING, DRAINING), (DRAINING, READY), (ASLEEP, STARTING),
                (ASLEEP, DRAINING),
            }  # fmt: skip
            if state == STARTING:
                self.starts[name] = max(self.now, self.falls.get(name, 0.0)) + (WAKE if name in self.on_host else START)
                self.on_device.add(name)
                self.woken += [name] * (name in self.on_host)
            elif before[name] == STARTING and name not in self.on_host:  # what wakes up falls asleep again
                self.end(name)
            if before[name] == ASLEEP and state == DRAINING:
                assert leaving
            elif state == DRAINING and not leaving:
                assert not terms.pin and [other for other in self.residency.queue if other != name]
                assert before[name] == STARTING or self.now >= since[name] + MIN_SECONDS
            elif state == DRAINING and name not in self.unloaded:  # its time without use is over
                assert not (terms.pin or usage[name].busy or usage[name].asked is not None)
                assert self.now >= since[name] + terms.ttl
        assert sum(self.residency.terms[name].need for name in self.on_device) <= self.residency.memory
        assert sum(self.residency.terms[name].host for name in self.on_host) <= self.residency.host
        self.let_in()
        return decided


needs = st.integers(1, 6)
hosts = st.integers(0, 4)  # 0: it never sleeps


@given(st.data())
def test_no_scenario_breaks_the_rules_and_nobody_waits_for_ever(data: st.DataObject) -> None:
    """Never over memory, never a model ended that is in use; all who wait are served."""
    terms = {
        name: Terms(
            data.draw(needs),
            name == "a" and data.draw(st.booleans()),
            data.draw(st.sampled_from([3.0, 1e9])),
            data.draw(hosts),
        )
        for name in MODELS[: data.draw(st.integers(1, 5))]
    }
    pinned = sum(each.need for each in terms.values() if each.pin)
    largest = max(each.need for each in terms.values() if not each.pin) if len(terms) > 1 or not pinned else 0
    world = World(pinned + largest + data.draw(st.integers(0, 5)), data.draw(st.integers(0, 12)), **terms)
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
        elif what == "crash" and world.state(name) in (READY, DRAINING, ASLEEP):
            world.running[name].clear()
            world.end(name)
        elif what == "fail":
            world.fails.add(name)
        elif what == "mend":
            world.fails.discard(name)
        world.tick(data.draw(st.sampled_from([0.0, 0.1, 1.0, 4.0])))
    world.fails.clear()
    deadline = world.now + 2 * len(terms) * (MIN_SECONDS + START + RUN + 3)
    while any(world.waiting.values()):
        world.tick()
        assert world.now < deadline


@settings(max_examples=40)
@given(st.lists(needs, min_size=2, max_size=5), st.integers(0, 4), st.sampled_from([0, 6, 30]))
def test_under_a_load_that_never_ends_every_model_has_its_turn(sizes: list[int], spare: int, host: int) -> None:
    """Each model is asked all the time. Whatever is loaded serves for its least time, and then makes room."""
    terms = {name: Terms(need, host=need) for name, need in zip(MODELS, sizes, strict=False)}
    world = World(max(sizes) + spare, host, **terms)
    for _ in range(240):
        for name in terms:
            world.ask(name)
        world.tick()
    assert world.waited <= len(terms) * (MIN_SECONDS + START + RUN + 3)


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


# --- sleep ------------------------------------------------------------------------------------------------------------


def world_of_sleepers(host: int, names: str = "ab", **terms: Any) -> World:
    """Models of which one is awake at a time, and takes 4 bytes of the host while it sleeps. All were used in turn."""
    world = World(10, host, **{name: Terms(6, host=4, **terms) for name in sorted(names)})
    for name in names:
        world.ask(name)
        for _ in range(12):
            world.tick()
        assert world.state(name) == READY
        world.tick(MIN_SECONDS)
    return world


def test_a_model_that_makes_room_sleeps_and_wakes_up_when_it_is_asked_for() -> None:
    world = world_of_sleepers(8)
    assert world.state("a") == ASLEEP and world.on_host == {"a"} and world.on_device == {"b"}
    world.ask("a")
    assert world.tick(0.1) == {"b": DRAINING} and not world.tick(0.1)
    assert world.state("b") == ASLEEP and world.on_device == {"b"}  # it has not fallen asleep yet
    assert world.tick(FALL) == {"a": STARTING} and world.woken == ["a"]
    assert world.residency.hosted == {"a", "b"}
    world.tick(WAKE)
    assert world.state("a") == READY and world.residency.hosted == {"b"}


def test_it_ends_where_its_weights_do_not_fit_into_the_hosts_memory() -> None:
    assert world_of_sleepers(3).state("a") == ABSENT
    assert world_of_sleepers(0).state("a") == ABSENT
    world = World(10, 8, a=Terms(6), b=Terms(6))  # it never sleeps
    for name in "ab":
        world.ask(name)
        for _ in range(30):
            world.tick()
    assert world.state("a") == ABSENT and world.state("b") == READY


def test_the_sleeper_used_longest_ago_ends_first() -> None:
    world = world_of_sleepers(8, "dacb")
    assert [world.state(name) for name in "dacb"] == [ABSENT, ASLEEP, ASLEEP, READY]


def test_a_sleeper_that_is_waited_for_does_not_end_for_another() -> None:
    world = world_of_sleepers(4)
    assert world.state("a") == ASLEEP
    world.ask("a")
    assert world.tick(0.1) == {"b": DRAINING}
    assert world.tick(0.1) == {"a": STARTING} and world.state("b") == ABSENT and world.woken == ["a"]


def test_a_sleeper_ends_after_its_time_without_use() -> None:
    world = world_of_sleepers(8, ttl=40.0)
    used = world.used["a"]
    assert world.state("a") == ASLEEP
    world.tick(used + 39.5 - world.now)
    assert world.state("a") == ASLEEP
    assert world.tick(0.6)["a"] == DRAINING
    world.tick()
    assert world.state("a") == ABSENT and not world.on_host


def test_unloading_ends_a_sleeper() -> None:
    world = world_of_sleepers(8)
    world.unload("a")
    assert world.tick(0.1) == {"a": DRAINING}
    world.ask("a")
    world.tick(0.1)
    assert world.state("a") == ABSENT and not world.residency.hosted and world.residency.queue == ["a"]


def test_a_model_that_is_unloaded_ends_although_it_could_sleep() -> None:
    world = world_of_sleepers(8)
    world.unload("b")
    assert world.tick(0.1) == {"b": DRAINING}
    world.tick(0.1)
    assert world.state("b") == ABSENT


def test_a_sleeper_whose_process_dies_is_loaded_anew() -> None:
    world = world_of_sleepers(8)
    world.end("a")
    world.ask("a")
    for _ in range(10):
        world.tick()
    assert world.state("a") == READY and not world.woken and world.on_host == {"b"}


def test_a_wake_that_nobody_waits_for_any_more_makes_room() -> None:
    world = world_of_sleepers(12)
    world.ask("a")
    while world.state("a") != STARTING:
        world.tick(0.1)
    world.ask("b")
    world.waiting["a"].clear()
    assert world.tick(0.1) == {"a": DRAINING}
    while world.state("b") != READY:
        world.tick(0.1)
    assert world.state("a") == ASLEEP and world.on_host == {"a"}
