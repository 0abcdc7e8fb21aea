"""Recurrent states: whose they are, which of them the prefix cache keeps, and their way to host memory and back."""

from __future__ import annotations

import pytest

from config import EngineConfig
from fake_worker import Engine, expected_beams, prompt
from integrity import check_integrity, check_pool
from plan import StateRoom, StepPlan
from sampling_params import SamplingParams
from scheduling.reports import Timeline, WaitClock
from scheduling.states import StateManager
from sequence import Sequence, SequenceGroup, Status, chain


def chunks(engine: Engine) -> list[int]:
    """The tokens of each row that has run, if none was more than a chunk of one prompt."""
    return [count for plan in engine.plans for _, count in plan.rows]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("max_tokens", "border"), [(11, 16), (12, 20), (14, 20), (16, 24)])
def test_the_next_turn_of_a_conversation_finds_the_latest_border_of_the_answer(max_tokens, border, depth):
    """A state is copied when the step after it is planned: the last token of an answer is never computed."""
    engine = Engine(states=(4, 0), depth=depth)
    engine.serve("first", prompt(10), max_tokens=max_tokens, ignore_eos=True)
    turn = prompt(10) + engine.outputs["first"] + prompt(5, 30)
    second = engine.serve("second", turn, max_tokens=5, ignore_eos=True)
    assert second.group.num_cached == border


@pytest.mark.parametrize(("length", "border"), [(3, 0), (4, 0), (5, 4), (16, 12), (17, 16), (18, 16)])
def test_the_same_prompt_finds_its_last_border(length, border):
    engine = Engine(states=(4, 0), max_num_batched_tokens=64)
    engine.serve("first", prompt(length), max_tokens=1)
    assert chunks(engine) == ([border] if border else []) + [length - border]
    again = engine.serve("again", prompt(length), max_tokens=1)
    assert again.group.num_cached == border
    other = engine.add("other", [9, *prompt(length)], max_tokens=1)
    assert other.group.num_cached == 0


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, [16, 12, 2]),
        ({"max_num_batched_tokens": 15}, [12, 12, 4, 2]),
        ({"max_num_batched_tokens": 3}, [3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 2]),
        ({"states": (0, 0)}, [16, 14]),
        ({"enable_prefix_caching": False}, [16, 14]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, [30]),
        ({"states": None}, [16, 14]),
    ],
    ids=str,
)
def test_chunks_end_where_states_are_kept(fields, rows):
    engine = Engine(**{"states": (4, 0), "max_num_seqs": 2} | fields)
    engine.serve("a", prompt(30), max_tokens=1)
    assert chunks(engine) == rows


def test_a_beginning_whose_state_is_gone_is_no_hit():
    """Its keys and values are all found, yet only the shorter beginning has a state."""
    engine = Engine(states=(4, 0))
    engine.serve("first", prompt(30), max_tokens=1)
    pool = engine.scheduler.space.states.snapshots
    assert len(pool.block_of) == 2  # after 16 tokens and after 28
    pool.forget(next(digest for digest, row in pool.block_of.items() if row == 1))
    again = engine.serve("again", prompt(30), max_tokens=1)
    assert again.group.num_cached == 16


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_compute_their_prompt_once_but_for_its_tail(depth):
    engine = Engine(states=(4, 0), depth=depth, max_num_batched_tokens=64)
    engine.serve("a", prompt(14), n=4, max_tokens=6, ignore_eos=True)
    assert [row.num_computed for plan in engine.plans for row in plan.new] == [0, 12, 12, 12]
    assert [len(plan.new) for plan in engine.plans if plan.new] == [1, 3]  # the others come in together
    assert sorted(count for count in chunks(engine) if count > 1) == [2, 2, 2, 2, 12]


@pytest.mark.parametrize("fields", [{"states": (0, 0)}, {"enable_prefix_caching": False}], ids=str)
def test_samples_that_cannot_find_their_prompt_come_in_together(fields):
    engine = Engine(**{"states": (4, 0), "max_num_batched_tokens": 64} | fields)
    engine.serve("a", prompt(14), n=4, max_tokens=6, ignore_eos=True)
    assert [len(plan.new) for plan in engine.plans if plan.new] == [1, 3]


@pytest.mark.parametrize(
    ("logprobs", "ahead"), [(None, 0), (None, 3), (1, 0)],
    ids=["in the batch of decodes", "with room behind their tokens", "looked at in each step"],
)  # fmt: skip
def test_a_long_answer_keeps_one_state(logprobs, ahead):
    engine = Engine(states=(3, 0), num_lookahead_slots=ahead)
    engine.serve("other", prompt(6, 20), max_tokens=1)
    engine.add("long", prompt(6), max_tokens=50, ignore_eos=True, logprobs=logprobs)
    engine.run()
    assert len(engine.scheduler.space.states.snapshots.block_of) == 3  # one of each prompt, and the answer's latest
    assert engine.add("again", prompt(6, 20), max_tokens=1)
    tokens = prompt(6) + engine.outputs["long"]
    longer = engine.serve("more", tokens, max_tokens=1)
    assert longer.group.num_cached == 52
    assert engine.scheduler.requests == {} and engine.scheduler.counters["prefix_cache_hits_total"] == 4 + 52


def test_states_come_back_where_their_sequence_was_preempted():
    """By recompute it finds the latest state that it kept, instead of computing all its tokens again."""
    engine = Engine(num_blocks=12, max_model_len=40, states=(4, 0), scheduling_policy="priority")
    low = engine.add("low", prompt(15), priority=1, max_tokens=20, ignore_eos=True)
    while low.num_computed < 26:
        engine.step()
    engine.serve("urgent", prompt(20, 9), max_tokens=2, ignore_eos=True)
    assert low.num_preemptions == 1
    assert [row.num_computed for plan in engine.plans for row in plan.new] == [0, 0, 24]


def swapped(depth: int = 1, host: int = 1) -> tuple[Engine, Sequence]:
    """A request that was preempted in the midst of its prompt or its output, by swap if there is room for its state."""
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=32, preemption_mode="swap",
                    scheduling_policy="priority", states=(2, host), depth=depth)  # fmt: skip
    low = engine.add("low", prompt(22), priority=1, max_tokens=8, ignore_eos=True)
    engine.step(2 if depth == 2 else 5)
    engine.add("urgent", prompt(20, 9), max_tokens=2, ignore_eos=True)
    engine.step()
    assert low.num_preemptions == 1
    return engine, low


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_goes_to_host_memory_and_comes_back(depth):
    engine, low = swapped(depth)
    computed = low.num_computed
    assert low.status is Status.SWAPPED and computed > 16
    assert sum(len(plan.state_out) for plan in engine.plans) == 1
    engine.run()
    (plan,) = (plan for plan in engine.plans if plan.state_in)
    assert plan.state_in == [(0, plan.new[0].slot)] and plan.new[0].num_computed == computed
    assert engine.scheduler.space.states.host.num_free == 1


@pytest.mark.parametrize("end", ["abort", "lost", "start over"])
def test_host_rows_are_free_again_however_a_swapped_request_goes_on(end):
    engine, low = swapped()
    pool = engine.scheduler.space.states.host
    assert pool.num_free == 0
    if end == "abort":
        engine.scheduler.abort("low")
    elif end == "lost":
        engine.lose(lost=True)
    else:
        engine.scheduler.admission.drop_swapped(0.0)
    assert pool.num_free == 1 and low.host_state == -1
    check_integrity(engine.scheduler)
    engine.run()


def test_copies_of_the_cache_that_were_lost_cost_a_swapped_sequence_nothing():
    """A step that ends in an error loses what it moved, and most of that is what the prefix cache copies."""
    engine, low = swapped()
    admission, host_block = engine.scheduler.admission, low.host_tables[0][0]
    other = next(block for block in range(32) if block not in low.host_tables[0])
    admission.forget_moves([StepPlan(9, swap_out=[(0, other)])], 0.0)
    assert low.status is Status.SWAPPED
    admission.forget_moves([StepPlan(9, swap_out=[(0, other), (1, host_block)])], 0.0)
    assert low.status is Status.WAITING
    check_integrity(engine.scheduler)


def test_without_room_for_its_state_a_sequence_computes_its_tokens_again():
    engine, low = swapped(host=0)
    assert low.status is Status.WAITING and not any(plan.state_out for plan in engine.plans)
    engine.run()


def test_a_state_that_is_a_token_ahead_is_not_swapped():
    """A step in flight computes the last known token, and what it samples is dropped: the state cannot go back."""
    hows = set()
    for depth in (1, 2):
        engine = Engine(num_blocks=12, max_model_len=40, num_host_blocks=32, preemption_mode="swap", states=(0, 4),
                        max_num_batched_tokens=64, depth=depth, enable_prefix_caching=False)  # fmt: skip
        for i in range(2):
            engine.add(str(i), prompt(12, i), max_tokens=20, ignore_eos=True)
        engine.run()
        assert engine.scheduler.counters["num_preemptions_total"] == 1
        hows.add((depth, any(plan.state_out and plan.swap_out for plan in engine.plans)))
    assert hows == {(1, True), (2, False)}


def test_the_cost_of_a_swap_counts_the_state():
    """Moving 5 blocks costs less than computing 20 tokens, but not so with a state of the size of 1.5 blocks."""
    preempted = set()
    for states in (None, (0, 1)):
        engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=32, swap_cost=3.5, states=states,
                        scheduling_policy="priority", enable_prefix_caching=False)  # fmt: skip
        low = engine.add("low", prompt(20), priority=1, max_tokens=8, ignore_eos=True)
        engine.step(2)
        engine.add("urgent", prompt(20, 9), max_tokens=2, ignore_eos=True)
        engine.step()
        preempted.add((states is None, low.status))
        engine.run()
    assert preempted == {(True, Status.SWAPPED), (False, Status.WAITING)}


@pytest.mark.parametrize("states", [(0, 0), (3, 8)])
def test_a_beam_goes_on_from_a_snapshot_of_its_own_tokens(states):
    wanted = expected_beams(prompt(9), 14, 40, 5, 5)
    engine = Engine(22, 40, 40, states=states)
    engine.add("first", prompt(6, 3), max_tokens=24, ignore_eos=True)
    engine.serve("a", prompt(9), n=5, use_beam_search=True, max_tokens=14)
    assert list(engine.answers["a"].values()) == wanted


@pytest.mark.parametrize("lost", [None, True, False], ids=["reset", "workers lost", "a result lost"])
def test_states_are_forgotten(lost):
    """Where a step has failed, too: what it was to compute may be missing in a state that the next plan has kept."""
    engine = Engine(states=(4, 0))
    engine.serve("first", prompt(30), max_tokens=1)
    pool = engine.scheduler.space.states.snapshots
    assert pool.block_of
    if lost is None:
        engine.scheduler.space.reset_prefix_cache()
    else:
        engine.lose(lost)
    assert not pool.block_of
    again = engine.serve("again", prompt(30), max_tokens=1)
    assert again.group.num_cached == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_state_is_kept_only_if_it_is_known_what_it_has_seen(depth):
    """With more than two steps in flight that is not known when the next one is planned."""
    engine = Engine(num_blocks=64, states=(8, 0), depth=depth)
    for i in range(3):
        engine.add(str(i), prompt(7, i), max_tokens=20, ignore_eos=True)
    engine.run()
    for i in range(3):
        turn = prompt(7, i) + engine.outputs[str(i)]
        again = engine.serve(f"again {i}", turn, max_tokens=2, ignore_eos=True)
        assert again.group.num_cached == (24 if depth <= 2 else 4)


# --- the books by themselves ------------------------------------------------------------------------------------------


def sequence(tokens: list[int], computed: int, slot: int) -> Sequence:
    request = SequenceGroup("a", tokens, SamplingParams(), salt="tenant")
    seq = Sequence(request, 0, Timeline(WaitClock()))
    seq.num_computed, seq.slot = computed, slot
    return seq


def manager(snapshots: int, host: int = 0) -> StateManager:
    return StateManager(EngineConfig(block_size=4, max_num_seqs=8), StateRoom(snapshots, host, 1.0))


def test_a_snapshot_is_found_once_its_plan_is_made():
    states, plan = manager(2), StepPlan(0)
    seq, hashes = sequence(prompt(9), 8, slot=3), []
    chain(hashes, prompt(9), 4, "tenant")
    states.keep(seq, plan)
    assert plan.state_copies == [(3, 8)] and states.longest(hashes, 2) == 0
    states.planned()
    assert states.longest(hashes, 2) == 2
    again = StepPlan(1)
    states.keep(seq, again)  # there is one of these tokens
    for computed in (0, 3, 9):  # no border
        states.keep(sequence(prompt(9), computed, slot=3), again)
    assert not again.state_copies
    check_pool(states.snapshots, [])


def test_a_snapshot_that_a_plan_reads_is_not_overwritten_by_it():
    states, plan = manager(1), StepPlan(0)
    states.keep(sequence(prompt(9), 8, slot=0), plan)
    states.planned()
    seq = sequence(prompt(9), 8, slot=1)
    seq.hashes = [*states.snapshots.block_of, *states.snapshots.block_of]
    plan = StepPlan(1)
    states.resume(seq, plan)
    states.keep(sequence(prompt(9, 2), 4, slot=2), plan)
    assert plan.state_copies == [(8, 1)]
    states.planned()
    states.keep(sequence(prompt(9, 2), 4, slot=2), plan)
    assert plan.state_copies == [(8, 1), (2, 8)]


def test_a_host_row_that_a_plan_reads_is_not_overwritten_by_it():
    states, plan = manager(0, 1), StepPlan(0)
    seq = sequence(prompt(9), 5, slot=0)
    states.swap_out(seq, plan)
    states.planned()
    seq.slot = 4
    states.resume(seq, plan)
    assert plan.state_out == [(0, 0)] and plan.state_in == [(0, 4)] and not plan.state_copies
    assert states.host.num_free == 0
    states.planned()
    assert states.host.num_free == 1
