"""Who is let in and who gives way: priorities, both orders, preemption, samples of one prompt, room for growth."""

from __future__ import annotations

import dataclasses
import gc
import random

import pytest

from config import EngineConfig, step_tokens
from fake_worker import Engine, expected, prompt, sample_seed
from integrity import check_integrity
from sequence import Sequence, Status


@pytest.mark.parametrize(
    ("host", "fields"),
    [(0, {}), (64, {"preemption_mode": "swap", "enable_prefix_caching": False}),
     (3, {"preemption_mode": "swap", "enable_prefix_caching": False})],
    ids=["recompute", "swap", "too little host memory to swap all"],
)  # fmt: skip
def test_preempted_requests_give_the_same_tokens(host, fields):
    engine = Engine(16, 48, host, **fields)
    prompts = {str(i): prompt(6 + i, i) for i in range(8)}
    for name, ids in prompts.items():
        engine.add(name, ids, max_tokens=30, ignore_eos=True)
    engine.run()
    metrics, plans = engine.scheduler.reports.metrics(), engine.plans
    moved = sum(len(plan.swap_out) for plan in plans)
    assert moved == sum(len(plan.swap_in) for plan in plans) == metrics["num_swapped_blocks_total"]
    assert metrics["num_preemptions_total"] > 5 and (moved > 5 or host < 64) and (moved > 0) == (host > 0)
    assert (sum(bool(plan.swap_out) for plan in plans) < metrics["num_preemptions_total"]) == (host < 64)
    for plan in plans if host == 64 else ():  # nothing is computed twice: who comes back goes on where it was
        assert all(row.num_computed >= len(row.token_ids) - 16 for row in plan.new if plan.swap_in)
    assert engine.scheduler.space.host.num_free == host


def test_the_last_to_arrive_is_preempted_first_and_resumes_first():
    engine = Engine(num_blocks=8, max_model_len=32)
    requests = [engine.add(str(i), prompt(4, i), max_tokens=20, ignore_eos=True) for i in range(3)]
    last = engine.serve("late", prompt(4, 9), max_tokens=2, ignore_eos=True)
    assert requests[0].num_preemptions == 0 < requests[2].num_preemptions
    assert len(last.tokens) == 6


@pytest.mark.parametrize(("length", "admitted"), [(392, True), (393, False)])
def test_admission_leaves_the_watermark_free(length, admitted):
    """It is 2 of 200 blocks here: beside the 100 blocks of the first prompt 98 may be taken."""
    engine = Engine(num_blocks=200, max_model_len=500, max_num_batched_tokens=1000)
    engine.add("runs", prompt(400), max_tokens=2)
    engine.add("comes", prompt(length, 3), max_tokens=2)
    engine.step()
    assert (len(engine.scheduler.running) == 2) == admitted


@pytest.mark.parametrize(("policy", "ended"), [("priority", ["a1", "a2", "b", "c"]), ("fcfs", ["c", "a1", "b", "a2"])])
def test_priority_goes_first_and_equals_by_arrival(policy, ended):
    """Under `fcfs` priorities mean nothing."""
    engine = Engine(max_num_seqs=1, scheduling_policy=policy)
    for name, priority in (("c", 2), ("a1", 0), ("b", 1), ("a2", 0)):
        engine.add(name, prompt(4), priority=priority, max_tokens=1)
    engine.run()
    assert list(engine.reasons) == ended


def test_priority_inversion_cannot_last():
    """What waits with a better priority takes the place of what runs with a worse one, and only of that."""
    engine = Engine(num_blocks=8, max_model_len=32, scheduling_policy="priority", max_num_seqs=2)
    low = engine.add("low", prompt(8), priority=5, max_tokens=20, ignore_eos=True)
    same = engine.add("same", prompt(8, 1), priority=1, max_tokens=20, ignore_eos=True)
    engine.step()
    urgent = engine.add("urgent", prompt(8, 2), priority=1, max_tokens=4, ignore_eos=True)
    engine.step()
    assert low.status is Status.WAITING and same.status is urgent.status is Status.RUNNING
    engine.add("late", prompt(8, 3), priority=1, max_tokens=4, ignore_eos=True)
    engine.step()
    assert same.status is urgent.status is Status.RUNNING  # an equal does not push an equal out
    engine.run()


def test_a_long_prompt_of_worse_priority_leaves_room_in_the_step():
    """Else who waits with a better priority, and could be let in, would wait for all of its chunks."""
    engine = Engine(num_blocks=64, scheduling_policy="priority")
    engine.add("long", prompt(60), priority=1, max_tokens=2)
    engine.step()
    urgent = engine.add("urgent", prompt(6, 5), priority=0, max_tokens=2, ignore_eos=True)
    same = engine.add("same", prompt(6, 2), priority=1, max_tokens=2, ignore_eos=True)
    assert sorted(count for _, count in engine.step().rows) == [6, 10]
    assert urgent.status is Status.RUNNING and same.status is Status.WAITING
    search = engine.add("search", prompt(60, 3), priority=2, use_beam_search=True, n=2, max_tokens=2)
    while search.status is Status.WAITING:
        engine.step()
    engine.add("urgent too", prompt(6, 4), priority=0, max_tokens=1)
    engine.step()
    assert "urgent too" in engine.finished and search.status is Status.RUNNING


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_comes_back_before_later_ones(mode):
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=8, preemption_mode=mode)
    engine.add("first", prompt(8), max_tokens=20, ignore_eos=True)
    second = engine.add("second", prompt(8, 1), max_tokens=20, ignore_eos=True)
    for i in range(3):
        engine.add(f"later {i}", prompt(8, 2 + i), max_tokens=2, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
        if second.num_preemptions and second.status in (Status.WAITING, Status.SWAPPED):
            assert {seq.name for seq in engine.scheduler.running} <= {"first"}
    assert second.num_preemptions > 0 and len(engine.finished) == 5


def test_classic_order_runs_whole_prompts_first_and_alone():
    engine = Engine(enable_chunked_prefill=False, max_num_batched_tokens=64)
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.step(2)
    engine.add("long", prompt(40, 2), max_tokens=20, ignore_eos=True)
    engine.add("short", prompt(3, 3), max_tokens=20, ignore_eos=True)
    engine.add("too much", prompt(30, 4), max_tokens=20, ignore_eos=True)
    assert sorted(count for _, count in engine.step().rows) == [3, 40]  # no decode beside them
    assert [count for _, count in engine.step().rows] == [30]  # it did not fit, and was not cut
    assert [count for _, count in engine.step().rows] == [1] * 4
    engine.run()


def test_classic_order_needs_a_budget_for_the_longest_prompt():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 16; .* at least max_model_len, 64"):
        Engine(enable_chunked_prefill=False)


def test_delay_factor_lets_prompts_gather():
    """It is times a step of prompts, and not the planning beside it."""
    engine = Engine(depth=2, enable_chunked_prefill=False, max_num_batched_tokens=64, scheduler_delay_factor=2.0)
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.flying.append(engine.scheduler.schedule())
    engine.now = 0.01  # the next plan is made at once, while the prompt is computed
    engine.flying.append(engine.scheduler.schedule())
    engine.now = 1.0
    engine.land()
    engine.add("second", prompt(5, 2), max_tokens=20, ignore_eos=True)
    engine.now = 2.9
    assert [count for _, count in engine.step().rows] == [1]
    engine.now = 3.1
    assert [count for _, count in engine.step().rows] == [5]


def test_delay_factor_counts_from_the_earliest_arrival():
    """A stream of better-priority arrivals, each of them new, must not hold up the prompts for ever."""
    engine = Engine(depth=2, enable_chunked_prefill=False, max_num_batched_tokens=64, scheduler_delay_factor=2.0,
                    scheduling_policy="priority")  # fmt: skip
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.now = 1.0
    engine.land()
    engine.add("early", prompt(6, 2), priority=5, max_tokens=20, ignore_eos=True)
    engine.now = 3.05
    engine.add("urgent", prompt(7, 3), priority=0, max_tokens=20, ignore_eos=True)
    engine.now = 3.1
    assert [count for _, count in engine.step().rows] == [7, 6]


def test_classic_order_lets_a_better_priority_in_before_who_was_swapped():
    engine = Engine(16, 64, 32, enable_chunked_prefill=False, max_num_batched_tokens=64, preemption_mode="swap",
                    scheduling_policy="priority")  # fmt: skip
    running = engine.add("running", prompt(20), priority=1, max_tokens=40, ignore_eos=True)
    low = engine.add("low", prompt(20, 2), priority=9, max_tokens=30, ignore_eos=True)
    while low.status is not Status.SWAPPED:
        engine.step()
    urgent = engine.add("urgent", prompt(4, 3), priority=0, max_tokens=2, ignore_eos=True)
    later = engine.add("later", prompt(4, 4), priority=9, max_tokens=2, ignore_eos=True)
    assert [count for _, count in engine.step().rows] == [4]
    assert urgent.status is running.status is Status.RUNNING
    while low.status is Status.SWAPPED:
        assert later.status is Status.WAITING  # which is behind the one that was swapped
        engine.step()
    engine.run()


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_samples_share_the_prompt_and_copy_the_block_they_go_on_in(caching):
    engine = Engine(enable_prefix_caching=caching)
    engine.add("a", prompt(14), n=4, max_tokens=10, ignore_eos=True)
    engine.step()
    entered = engine.step()
    assert len(entered.new) == 3 and len(entered.rows) == 4
    assert [count for _, count in entered.rows] == [1] * 4  # the prompt is computed once, but for its last token
    tables = [row.blocks[0] for row in entered.new]
    assert all(table[:3] == tables[0][:3] for table in tables) and len({table[3] for table in tables}) == 3
    assert len(entered.copies) == 3 and len({source for source, _ in entered.copies}) == 1
    assert not engine.scheduler.admission.samples.holders  # all have branched off
    engine.run()
    assert engine.finished == ["a"] and engine.scheduler.blocks.num_free == 64


def test_one_token_of_each_sample_computes_the_prompt_once():
    """The first sample ends before the others begin; its request keeps the prompt's blocks for them."""
    engine = Engine(enable_prefix_caching=False, max_num_seqs=2)
    engine.serve("a", prompt(30), n=5, max_tokens=1, ignore_eos=True)
    assert engine.scheduler.counters["num_computed_tokens_total"] == 30 + 4
    wanted = [expected(prompt(30), 1, 64, seed=sample_seed(i)) for i in range(5)]
    assert [*engine.answers["a"].values()] == wanted


def test_samples_enter_as_room_permits():
    """A request for more samples than there is room for runs them a few at a time."""
    engine = Engine(num_blocks=10, max_model_len=40, max_num_seqs=3)
    engine.serve("a", prompt(20), n=7, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preempted_samples_find_the_prompt_again(caching):
    engine = Engine(num_blocks=16, max_model_len=48, enable_prefix_caching=caching, preemption_mode="recompute")
    seqs = engine.add("a", prompt(22), n=6, max_tokens=20, ignore_eos=True).group.seqs[:]
    engine.run()
    assert sum(seq.num_preemptions for seq in seqs) > 2
    assert all(row.num_computed >= 21 for plan in engine.plans[2:] for row in plan.new)


def test_auto_swaps_where_moving_is_cheaper():
    """A block of 4 tokens: moving one costs as much as computing 3 of them, or 5."""
    for swap_cost, swapped in ((3.0, True), (5.0, False)):
        engine = Engine(16, 48, 64, swap_cost=swap_cost, preemption_mode="auto", enable_prefix_caching=False)
        for i in range(8):
            engine.add(str(i), prompt(8, i), max_tokens=30, ignore_eos=True)
        engine.run()
        assert engine.scheduler.counters["num_preemptions_total"] > 5
        assert bool(engine.scheduler.counters["num_swapped_blocks_total"]) == swapped
        assert (engine.scheduler.counters["num_recomputed_tokens_total"] < 10) == swapped


def test_auto_does_not_swap_what_others_have():
    """They keep the prompt's blocks on the device, so who comes back has next to nothing to compute again."""
    for start, how in ((1, "recompute"), (5, "swap")):
        engine = Engine(64, 64, 64, swap_cost=3.0, scheduling_policy="priority", max_num_seqs=2)
        engine.add("first", prompt(20), max_tokens=30, ignore_eos=True)
        engine.step(2)
        low = engine.add("low", prompt(20, start), priority=1, max_tokens=8, ignore_eos=True)
        while low.num_tokens < 22:
            engine.step()
        engine.add("urgent", prompt(4, 3), max_tokens=2)
        engine.step()
        assert [(name, by) for name, by, _ in engine.scheduler.admission.preempted] == [("low", how)]
        engine.run()


def test_blocks_ahead_of_the_tokens_are_not_swapped():
    engine = Engine(16, 48, 64, preemption_mode="swap", scheduling_policy="priority", num_lookahead_slots=9,
                    max_num_seqs=1, enable_prefix_caching=False)  # fmt: skip
    engine.add("low", prompt(6), priority=1, max_tokens=8, ignore_eos=True)
    engine.step()
    engine.add("urgent", prompt(4, 3), max_tokens=2)
    assert len(engine.step().swap_out) == 2
    engine.run()
    assert engine.scheduler.space.host.num_free == 64


def test_admission_keeps_room_for_growth_once_it_knows_it():
    """Without a reserve more than a fifth of all tokens is computed again."""
    again = {}
    for conservativeness in (0.0, 1.0):
        engine = Engine(64, 64, max_num_seqs=32, max_num_batched_tokens=64, enable_prefix_caching=False,
                        preemption_mode="recompute", schedule_conservativeness=conservativeness)  # fmt: skip
        for i in range(64):
            engine.add(str(i), prompt(16, i), max_tokens=32, ignore_eos=True)
        engine.run()
        counters = engine.scheduler.counters
        again[conservativeness] = counters["num_recomputed_tokens_total"] / counters["num_computed_tokens_total"]
    assert again[1.0] < 0.1 < 0.2 < again[0.0]


# --- the policy `fair` ------------------------------------------------------------------------------------------------


def test_a_step_takes_a_tenth_of_a_second_by_default():
    fair = EngineConfig(scheduling_policy="fair", max_num_seqs=64)
    assert [step_tokens(fair, 2048, seconds) for seconds in (0.05, 0.1, 0.4, 9.0)] == [2048, 2048, 512, 64]
    others = {"scheduling_policy": "fcfs"}, {"max_num_batched_tokens": 2048}, {"enable_chunked_prefill": False}
    assert all(step_tokens(dataclasses.replace(fair, **fields), 2048, 9.0) == 2048 for fields in others)


@pytest.mark.parametrize(
    ("others", "slots"),
    [
        pytest.param(others, slots, marks=[pytest.mark.full] * ((others, slots) not in {(1, 2), (2, 2)}))
        for others in (1, 2, 3)
        for slots in (1, 2, 4)
    ],
)
def test_a_newcomer_waits_at_most_for_a_budget_and_a_request_of_each_client(others, slots):
    """However many samples the others have asked for, and whenever it comes."""
    budget, length, max_tokens = 4, 6, 20
    in_the_way = others * (budget + length + 2 * max_tokens)  # tokens
    for samples in (1, 6):
        for arrival in range(0, 4 + others * samples * max_tokens // slots, 9):
            engine = Engine(max_num_seqs=slots, max_num_batched_tokens=budget, scheduling_policy="fair")
            for i in range(others):
                engine.add(f"{i}", prompt(length, i), client=f"{i}", n=samples, max_tokens=max_tokens, ignore_eos=True)
            while engine.scheduler.step < arrival and engine.scheduler.has_work():
                engine.step()
            engine.add("new", prompt(2, 9), client="new", max_tokens=1)
            begun = engine.scheduler.step
            while "new" not in engine.finished:
                engine.step()
            assert engine.scheduler.step - begun <= in_the_way / slots + 2


def test_a_newcomer_takes_the_slot_of_who_has_most_of_them():
    engine = Engine(600, 128, max_num_seqs=16, max_num_batched_tokens=32, scheduling_policy="fair")
    engine.add("many", prompt(8), client="a", n=40, max_tokens=100, ignore_eos=True)
    engine.step(30)
    engine.add("few", prompt(4, 3), client="b", max_tokens=2, ignore_eos=True)
    engine.step(2)
    assert engine.finished == ["few"] and engine.scheduler.counters["num_preemptions_total"] == 1
    engine.run()
    assert engine.scheduler.counters["num_preemptions_total"] == 1


def test_two_clients_get_the_same_however_much_they_ask_for():
    """At any time as long as both wait; and for that nobody is preempted again and again."""
    engine = Engine(400, 64, max_num_seqs=8, max_num_batched_tokens=16, scheduling_policy="fair")
    for i in range(60):
        engine.add(f"a{i}", prompt(2, i), client="a", n=1 + i % 3, max_tokens=40)
    for i in range(150):
        engine.add(f"b{i}", prompt(2, i), client="b", max_tokens=1 + i % 20, ignore_eos=True)
    fair, written = engine.scheduler.admission.policy, {"a": 0, "b": 0}
    while all(fair.clients[client].backlogs for client in "ab"):
        engine.step()
        for client in "ab":
            mine = (answers for name, answers in engine.answers.items() if name[0] == client)
            written[client] = sum(len(tokens) for answers in mine for tokens in answers.values())
        assert abs(written["a"] - written["b"]) <= 4 * 40  # what half of the slots may come to hold
    assert min(written.values()) > 4 * 4 * 40  # it took long enough to tell
    assert engine.scheduler.counters["num_preemptions_total"] <= 8
    engine.run()


def test_no_stream_of_newcomers_holds_up_a_request_for_ever():
    """Each of them asks for a little, and is a client of its own."""
    engine = Engine(max_num_seqs=2, scheduling_policy="fair")
    engine.add("first", prompt(4), client="a", max_tokens=10, ignore_eos=True)
    engine.add("second", prompt(4), client="a", max_tokens=10, ignore_eos=True)
    for i in range(200):
        engine.add(f"new {i}", prompt(3, i), client=f"new {i}", max_tokens=3, ignore_eos=True)
        engine.step()
    assert "second" in engine.finished and len(engine.scheduler.waiting) > 20
    engine.run()
    assert len(engine.scheduler.admission.policy.clients) <= 2  # who has gone is forgotten


@pytest.mark.parametrize("contended", [False, True])
def test_nobody_saves_up_what_is_not_asked_for(contended):
    """Who has had little for long does not come before others for as long."""
    engine = Engine(400, 64, max_num_seqs=4, scheduling_policy="fair")
    for i in range(60):
        for client in "bc" if contended else "b":
            engine.add(f"{client}{i}", prompt(4, i), client=client, max_tokens=8, ignore_eos=True)
        if i % 8 == 0:
            engine.add(f"a{i}", prompt(2, i), client="a", max_tokens=2, ignore_eos=True)
        while not contended and len(engine.scheduler.requests) > 1:
            engine.step()
    while contended and len(engine.finished) < 60:
        engine.step()
    count = len(engine.finished)
    for i in range(30):
        engine.add(f"a late {i}", prompt(4, i), client="a", max_tokens=8, ignore_eos=True)
        engine.add(f"b late {i}", prompt(4, i), client="b", max_tokens=8, ignore_eos=True)
    engine.run()
    first = [name[0] for name in engine.finished[count : count + 24]]
    assert min(first.count("a"), first.count("b")) >= 6


def test_a_newcomer_does_not_have_to_be_caught_up_with():
    """Two clients have long shared what others left them: one more gets no more than they do from then on."""
    engine = Engine(800, 600, max_num_seqs=12, scheduling_policy="fair")
    for i in range(2):
        engine.add(f"leaves most to others {i}", prompt(4), client=f"{i}", max_tokens=500, ignore_eos=True)
    for i in range(80):
        engine.add(f"b{i}", prompt(4, i), client="b", max_tokens=8, ignore_eos=True)
        engine.add(f"c{i}", prompt(4, i), client="c", max_tokens=8, ignore_eos=True)
    while len(engine.finished) < 80:
        engine.step()
    for i in range(40):
        engine.add(f"d{i}", prompt(4, i), client="d", max_tokens=8, ignore_eos=True)
    while len(engine.finished) < 120:
        engine.step()
    first = [name[0] for name in engine.finished[80:]]
    assert min(first.count(client) for client in "bcd") >= 8


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (11, 14, 19))])
def test_one_client_alone_is_served_as_by_arrival(seed):
    """What it is given back, as its requests end before they had to, is no reason to preempt its own."""
    order = {}
    for policy in ("fcfs", "fair"):
        rng = random.Random(seed)
        slots, tokens = rng.choice((4, 6, 8)), rng.choice((8, 16))
        engine = Engine(600, scheduling_policy=policy, max_num_seqs=slots, max_num_batched_tokens=tokens)
        for i in range(30):
            length, n = rng.randint(2, 9), rng.choice((1, 1, 2, 3, 4))
            engine.add(str(i), prompt(length, i), max_tokens=rng.randint(1, 50), n=n)
        engine.run()
        assert engine.scheduler.counters["num_preemptions_total"] == 0
        order[policy] = engine.finished
    assert order["fair"] == order["fcfs"]


def test_nobody_is_preempted_for_less_than_a_steps_tokens():
    engine = Engine(max_num_seqs=3, scheduling_policy="fair")  # 16 tokens a step
    engine.add("three", prompt(2), client="a", n=3, max_tokens=4, ignore_eos=True)
    engine.step(2)
    engine.serve("one", prompt(2, 3), client="b", max_tokens=4, ignore_eos=True)
    assert engine.scheduler.counters["num_preemptions_total"] == 0


def test_a_long_prompt_of_another_client_shares_the_step():
    engine = Engine(num_blocks=64, scheduling_policy="fair", schedule_conservativeness=0.0)
    engine.add("long", prompt(60), client="a", max_tokens=2)
    engine.step()
    engine.add("as long", prompt(60, 2), client="b", max_tokens=2)
    engine.add("short", prompt(4, 3), client="c", max_tokens=2)
    assert sorted(count for _, count in engine.step().rows) == [8, 8]
    assert sorted(count for _, count in engine.step().rows) == [4, 6, 6]
    engine.run()


def test_a_client_is_charged_with_what_it_has_had():
    """A prompt's tokens but for cached ones, twice the output's, and nothing again after a preemption."""
    engine = Engine(num_blocks=12, max_model_len=44, scheduling_policy="fair", preemption_mode="recompute")
    fair, counters = engine.scheduler.admission.policy, {}
    engine.add("plain", prompt(9), client="plain", max_tokens=30, ignore_eos=True)
    engine.add("samples", prompt(10, 2), client="samples", n=3, max_tokens=12, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
        counters |= {name: client.counter for name, client in fair.clients.items() if not client.num_requests}
    assert engine.scheduler.counters["num_preemptions_total"] > 0
    assert counters == {"plain": 9 + 2 * 30, "samples": 10 + 2 + 2 * 3 * 12}


def test_a_client_is_not_charged_with_what_is_cached_or_aborted():
    engine = Engine(scheduling_policy="fair")
    engine.add("before", prompt(9), client="a", max_tokens=1)
    engine.add("again", prompt(9), client="b", max_tokens=8, ignore_eos=True)
    engine.step()
    fair = engine.scheduler.admission.policy
    start = fair.clients["b"].counter - 2 * 8 - 9
    engine.scheduler.abort("again")
    assert fair.clients["b"].counter == start + 7  # the rest of the step's tokens, of its prompt
    engine.add("cached", prompt(9), client="b", max_tokens=2, ignore_eos=True)
    counter = fair.clients["b"].counter
    engine.run()
    assert fair.clients["b"].counter == counter + 1 + 2 * 2
    engine.add("beams", prompt(9, 3), client="c", use_beam_search=True, n=2, max_tokens=4, ignore_eos=True)
    counter = fair.clients["c"].counter
    engine.run()
    # After the first token each of two beams computes what follows the 8 tokens that are cached.
    assert fair.clients["c"].counter == counter + 9 + 2 + sum(2 * (tokens + 2) for tokens in (2, 3, 4))


def test_explain_says_who_was_served_instead_and_tells_no_name():
    engine = Engine(max_num_seqs=2, scheduling_policy="fair")

    def step():
        engine.step()
        engine.now += 1.0

    engine.add("long", prompt(4), client="secret a", n=2, max_tokens=5, ignore_eos=True)
    step()
    for name in ("b1", "b2"):
        engine.add(name, prompt(4, 3), client="secret b", max_tokens=5, ignore_eos=True)
    step()
    report = engine.scheduler.reports.explain("b2")
    fairness = report["fairness"]
    assert fairness["number"] == 2 and fairness["counter"] >= fairness["virtual_time"] >= 0
    assert report["answers"][0]["served_instead"] == {"client": 1, "sequences": 1}  # the other slot has b1
    while engine.scheduler.has_work():
        step()
    waited = engine.scheduler.reports.explain("b2")["answers"][0]["stays"][0]
    assert waited["served_instead"] == {"client": 1, "sequences": 1} and "slots" in waited["waited_for"]
    assert "secret" not in str(report["answers"]) + str(fairness)
    plain = Engine()
    plain.add("x", [1], max_tokens=1)
    assert "fairness" not in plain.scheduler.reports.explain("x")


# --- blocks that several share, and making way ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["priority", "fair"])
@pytest.mark.parametrize("shared", [{"n": 3}, {}], ids=["samples", "prefix"])
def test_blocks_of_several_make_way_where_all_of_them_do(shared, policy):
    """A worse class's samples and requests of one prompt cannot keep a better one out until they have ended."""
    engine = Engine(num_blocks=64, max_model_len=240, scheduling_policy=policy, max_num_batched_tokens=64)
    low = {"priority": 9, "client": "low", "max_tokens": 30, "ignore_eos": True}
    engine.add("first", prompt(8, 4), **low | {"max_tokens": 200})  # behind which all others of its client stand
    for name in ("a", "b", "c") if not shared else ("a",):
        engine.add(name, prompt(160), **low, **shared)
        engine.step()
    engine.step(4)
    assert engine.scheduler.blocks.num_free < 25
    engine.add("urgent", prompt(200, 3), priority=0, client="urgent", max_tokens=2, ignore_eos=True)
    engine.step(5)
    assert "urgent" in engine.finished and "a" not in engine.finished
    engine.run()


def test_who_would_free_nothing_is_not_preempted():
    """The blocks of the last to come are shared with one that stays, so its preemption helps nobody."""
    engine = Engine(num_blocks=24, max_model_len=90, scheduling_policy="priority", max_num_batched_tokens=90)
    engine.add("stays", prompt(40), priority=0, max_tokens=20, ignore_eos=True)
    engine.step()
    engine.add("shares", prompt(40), priority=9, max_tokens=20, ignore_eos=True)
    engine.step()
    engine.add("urgent", prompt(64, 3), priority=1, max_tokens=2, ignore_eos=True)
    engine.step()
    assert engine.scheduler.counters["num_preemptions_total"] == 0
    engine.run()


def test_nobody_makes_way_for_what_the_prefix_cache_has():
    engine = Engine(num_blocks=42, max_model_len=120, scheduling_policy="priority", max_num_batched_tokens=120)
    engine.add("first", prompt(80), priority=0, max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("low", prompt(60, 3), priority=9, max_tokens=30, ignore_eos=True)
    engine.step()
    assert engine.scheduler.blocks.num_free < 10
    engine.add("same prompt", prompt(80), priority=1, max_tokens=2, ignore_eos=True)
    engine.step(2)
    assert "same prompt" in engine.finished and engine.scheduler.counters["num_preemptions_total"] == 0


def test_prompts_kept_for_samples_make_way_first():
    """Samples that have yet to branch off a prompt find it in the cache, or compute it again."""
    engine = Engine(num_blocks=40, max_model_len=140, scheduling_policy="priority", max_num_seqs=2,
                    max_num_batched_tokens=140)  # fmt: skip
    engine.add("high", prompt(8, 4), priority=0, max_tokens=40, ignore_eos=True)
    engine.add("samples", prompt(100), priority=9, n=4, max_tokens=4, ignore_eos=True)
    engine.step(2)
    assert engine.scheduler.admission.samples.holders
    engine.add("urgent", prompt(120, 3), priority=1, max_tokens=2, ignore_eos=True)
    engine.step(2)
    assert "urgent" in engine.finished and "samples" not in engine.finished
    engine.run()


def test_a_prompt_that_another_has_computed_has_its_share_of_a_step():
    """Under `fair` the first in line shares a step where it fits, and blocks that it shares take no room."""
    engine = Engine(num_blocks=56, max_model_len=130, scheduling_policy="fair")
    engine.add("first", prompt(80), client="a", max_tokens=30, ignore_eos=True)
    engine.step(6)
    engine.add("long", prompt(100, 3), client="b", max_tokens=2, ignore_eos=True)
    engine.step()
    engine.add("shares", [*prompt(80), 5, 6], client="c", max_tokens=2, ignore_eos=True)
    assert engine.scheduler.blocks.num_free < 20
    engine.step()
    assert engine.scheduler.requests["shares"].num_cached == 80


# --- what is given up goes --------------------------------------------------------------------------------------------


@pytest.fixture
def objects_of_the_test():
    """Lets the garbage collector look at what a test makes, and not at all else, which takes long."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("objects_of_the_test")
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_what_is_given_up_while_it_waits_does_not_stay_in_memory(policy):
    """An overloaded engine's clients come and go; the first in line has yet to come in."""
    engine = Engine(max_num_seqs=1, max_model_len=240, num_blocks=64, scheduling_policy=policy)
    engine.add("runs", prompt(3), max_tokens=200, ignore_eos=True)
    engine.step()
    for i in range(7):
        engine.add(f"stays {i}", prompt(4), client=str(i % 2), max_tokens=1)
    for i in range(500):
        engine.add(f"goes {i}", prompt(4), client=str(i % 3), max_tokens=1)
        engine.scheduler.abort(f"goes {i}")
    check_integrity(engine.scheduler)
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is Sequence]
    assert sum(seq.group.request_id.startswith("goes") for seq in alive) < 80
    engine.scheduler.abort("runs")
    engine.run()
    assert all(f"stays {i}" in engine.finished for i in range(7))
