"""The scheduler's steps: what they plan and what comes of their results, with a worker made of integers."""

from __future__ import annotations

import pytest

from fake_worker import Engine, expected, expected_beams, next_logprobs, prompt
from integrity import check_integrity
from plan import NewRow, StepPlan, bit_words
from ring import Codec
from sampling_params import COLUMNS
from scheduling.crash_isolation import MIN_DEATHS
from sequence import Status, derived_seed


def test_stop_token_ids_end_a_request_and_are_named():
    engine = Engine()
    wanted = expected(prompt(9), 5, 64, ignore_eos=True)[3]
    request = engine.add("a", prompt(9), max_tokens=20, ignore_eos=True, stop_token_ids=(wanted,))
    outputs = []
    while engine.scheduler.has_work():
        plan = engine.scheduler.schedule()
        outputs += engine.scheduler.update(plan, engine.worker.step(plan))
    assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_reason == wanted
    assert len(request.tokens) <= 9 + 4


def test_long_prompts_are_computed_in_chunks_beside_decodes():
    engine = Engine()
    engine.add("short", prompt(3), max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("long", prompt(40, 5), max_tokens=4, ignore_eos=True)
    mixed = engine.step()
    assert sorted(count for _, count in mixed.rows) == [1, 15]
    engine.run()


def test_one_waiting_prompt_never_stops_decodes():
    engine = Engine()
    engine.add("decoding", prompt(3), max_tokens=40, ignore_eos=True)
    engine.step()
    for i in range(5):
        engine.add(str(i), prompt(30, i), max_tokens=2, ignore_eos=True)
    while "decoding" not in engine.reasons:
        before = len(engine.outputs["decoding"])
        engine.step()
        assert len(engine.outputs["decoding"]) == before + 1


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], {}, "empty"),
        ([1, 50], {}, r"token id 50; allowed: 0 to 49"),
        ([-1], {}, "token id -1"),
        (prompt(64), {}, r"64 tokens; at most 63 .* context of 64"),
        (prompt(99), {}, "99 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(ids, params, message):
    engine = Engine()
    with pytest.raises(ValueError, match=message):
        engine.add("a", ids, **params)
    assert not engine.scheduler.has_work()


def test_request_larger_than_the_pool_is_refused():
    engine = Engine(num_blocks=8, max_model_len=64)
    with pytest.raises(ValueError, match=r"may grow to 54 tokens, 14 KV blocks of 4; the whole pool has 8"):
        engine.add("a", prompt(4), max_tokens=50)
    engine.serve("b", prompt(4), max_tokens=29)  # 33 tokens, of which the last is never computed: 8 blocks
    assert "b" in engine.reasons


def test_prompt_exactly_at_the_limit():
    engine = Engine(num_blocks=16, max_model_len=64)
    engine.serve("a", prompt(63), max_tokens=10)
    assert len(engine.outputs["a"]) == 1


@pytest.mark.parametrize("state", ["waiting", "held", "running", "in flight", "preempted", "swapped", "finished"])
def test_abort_in_each_state(state):
    swap = {"num_host_blocks": 8, "preemption_mode": "swap"} if state == "swapped" else {}
    engine = Engine(num_blocks=8, max_model_len=32, **swap)
    request = engine.add("a", prompt(4), max_tokens=25, ignore_eos=True)
    if state == "running":
        engine.step()
    elif state == "in flight":
        plan = engine.scheduler.schedule()
        engine.scheduler.abort("a")
        assert not [*engine.scheduler.update(plan, engine.worker.step(plan))]
    elif state == "held":
        engine.add("b", prompt(30), n=3, max_tokens=2)
        engine.step()
        assert len(engine.scheduler.requests["b"].held) == 2
        engine.scheduler.abort("b")
    elif state in ("preempted", "swapped"):
        engine.scheduler.abort("a")
        engine.add("b", prompt(4, 2), max_tokens=25, ignore_eos=True)
        request = engine.add("a", prompt(4), max_tokens=25, ignore_eos=True)
        while not request.num_preemptions:
            engine.step()
        assert (request.status is Status.SWAPPED) == (state == "swapped")
    elif state == "finished":
        engine.run()
    engine.scheduler.abort("a")
    engine.scheduler.abort("never heard of")
    check_integrity(engine.scheduler)
    assert "a" not in engine.scheduler.requests
    engine.run()
    for pool in (engine.scheduler.blocks, engine.scheduler.space.host):
        assert pool.num_free == pool.num_blocks


def test_unseeded_requests_draw_from_the_engines_seed():
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(s, i) for s in (0, 1) for i in ("a", "b")}) == 4
    assert -(2**63) <= derived_seed(0, "a") < 2**63


def test_a_sample_can_be_aborted_alone():
    engine = Engine()
    engine.add("a", prompt(14), n=3, max_tokens=10, ignore_eos=True)
    engine.scheduler.abort("a", 0)  # the one that the others wait for
    engine.step(2)
    engine.scheduler.abort("a", 1)
    engine.run()
    assert engine.finished == ["a"] and len(engine.answers["a"][2]) == 10 > len(engine.answers["a"][1])
    assert engine.scheduler.blocks.num_free == 64


def test_log_probabilities_are_added_up():
    engine = Engine()
    engine.serve("a", prompt(9), n=3, logprobs=0, max_tokens=6, ignore_eos=True)
    for index, tokens in engine.answers["a"].items():
        ids = prompt(9) + tokens
        wanted = sum(next_logprobs(ids[:i])[ids[i]] for i in range(9, len(ids)))
        assert engine.logprobs["a", index] == pytest.approx(wanted)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_beam_search_finds_the_same_beams_however_it_is_scheduled(width):
    wanted = expected_beams(prompt(9), 14, 40, width, width)
    for fields in ({}, {"num_blocks": 12 + 2 * width}, {"enable_prefix_caching": False}):
        for mode in ("recompute", "swap", "auto"):
            options = {"num_blocks": 64, "max_model_len": 40, "num_host_blocks": 40, "preemption_mode": mode}
            engine = Engine(**options | fields)
            engine.add("first", prompt(6, 3), max_tokens=24, ignore_eos=True)
            engine.add("a", prompt(9), n=width, use_beam_search=True, max_tokens=14)
            engine.serve("b", prompt(9), n=1, beam_width=width, use_beam_search=True, max_tokens=14)
            assert list(engine.answers["a"].values()) == wanted
            assert engine.answers["b"][0] == wanted[0]
            assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks


def test_a_beam_computes_no_more_than_its_last_block_again():
    """Each step of a search has a request for each beam, and keeps its place: before all that came later."""
    engine = Engine(256, max_num_batched_tokens=64, max_num_seqs=16)
    engine.add("a", prompt(30), n=4, use_beam_search=True, max_tokens=20, ignore_eos=True)
    for i in range(8):
        engine.add(str(i), prompt(9, i), max_tokens=20, ignore_eos=True)
    steps = []
    engine.planned = lambda: steps.append(
        [count for seq, count, _ in engine.scheduler.in_flight[-1].other_rows if seq.group.beam]
    )
    engine.run()
    # Of n tokens the last block has (n - 1) % 4 + 1.
    assert steps[:20] == [[30], *([(n - 1) % 4 + 1] * 4 for n in range(31, 50))]
    counters, ended = engine.scheduler.counters, engine.scheduler.stats.ended
    assert counters["prompt_tokens_total"] == 30 + 8 * 9 and counters["generation_tokens_total"] == 12 * 20
    assert sum(ended.values()) == 9 and engine.scheduler.reports.explain("a")["answers"][0]["output_tokens"] == 20


def test_a_search_keeps_its_place_in_the_queue():
    """Those that wait do not come between its steps. Its prompt is scored once."""
    engine = Engine(max_num_seqs=4)
    engine.add("a/3", prompt(3), max_tokens=1)  # a name that a beam's request would have
    engine.add("a", prompt(9), n=4, use_beam_search=True, max_tokens=12, prompt_logprobs=1)
    for i in range(20):
        engine.add(str(i), prompt(3, i), max_tokens=1)
    engine.run()
    assert engine.finished.index("a") <= 7 and len(engine.scores["a"]) == 8


def test_an_aborted_search_leaves_nothing_behind():
    engine = Engine()
    for steps in range(12):
        engine.add("a", prompt(30), n=4, use_beam_search=True, max_tokens=20, ignore_eos=True)
        engine.step(steps)
        assert engine.scheduler.reports.explain("a")["finished"] is False
        engine.searches.abort("a")
        while engine.flying or engine.scheduler.has_work():
            engine.step()
        assert not (engine.searches.running or engine.searches.of_beam or engine.answers["a"][0])
        assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    assert engine.scheduler.stats.ended == {"stop": 0, "length": 0, "abort": 12, "error": 0}


@pytest.mark.parametrize(
    ("fields", "params", "message"),
    [
        ({"max_num_seqs": 3}, {"n": 4}, "beam_width is 4; it must be at most 3"),
        ({"num_blocks": 13}, {"n": 4, "max_tokens": 40}, "54 tokens, 14 KV blocks of 4; the whole pool has 13"),
    ],
)
def test_a_search_that_can_never_run_is_refused(fields, params, message):
    with pytest.raises(ValueError, match=message):
        Engine(**fields).add("a", prompt(14), use_beam_search=True, **params)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_step_looks_at_who_needs_it(depth):
    """Between two blocks a plan has the rows of the one before, as an object, and nothing else; so have its news."""
    engine = Engine(depth=depth, max_num_batched_tokens=64)
    seqs = [engine.add(str(i), prompt(6, i), max_tokens=40, ignore_eos=True) for i in range(5)]
    engine.step(10)
    looked, first = [], len(engine.plans)
    look = engine.scheduler.lanes.all[0].decodes.expect
    engine.scheduler.lanes.all[0].decodes.expect = lambda seq: looked.append((engine.scheduler.step, seq)) or look(seq)
    engine.step(8)
    plans = engine.plans[first:]
    grown = [plan for plan in plans if plan.new_blocks]
    assert len(grown) == 2 and all(len(plan.new_blocks) == 5 for plan in grown)
    assert [step for step, _ in looked] == [plan.step for plan in grown for _ in range(5)]
    assert all(plan.rows is plans[0].rows for plan in plans) and len(plans[0].rows) == 5
    seq = seqs[2]
    assert seq.num_undelivered > 0 and seq.num_tokens == len(seq.delivered) + seq.num_undelivered
    with pytest.raises(AssertionError):
        seq.tokens  # noqa: B018 (it is to be refused: some have not been delivered)
    engine.scheduler.lanes.all[0].decodes.deliver(seq)
    output = seq.tokens[6:]
    assert len(output) == seq.num_tokens - 6 and not seq.num_undelivered
    assert output == engine.outputs["2"] == expected(prompt(6, 2), 40, 64, ignore_eos=True)[: len(output)]

    engine.scheduler.abort("1")
    rows = engine.step().rows
    assert len(rows) == 4 and rows is not plans[0].rows and len(plans[0].rows) == 5
    engine.run()


def test_a_plan_that_is_made_before_the_result_of_the_last_one():
    """A token that ends a sequence is seen one step late: the row that ran too many leaves no trace."""
    engine = Engine(max_model_len=250, depth=2, max_num_batched_tokens=64)
    for i in range(8):
        engine.add(str(i), prompt(5, i), max_tokens=12)
    engine.run()
    ended = [i for i in range(8) if engine.reasons[str(i)] == "stop"]
    rows = sum(len(plan.rows) for plan in engine.plans)
    assert ended and rows == sum(map(len, engine.outputs.values())) + len(ended)


def test_what_a_step_in_flight_samples_is_sampled_again_after_a_preemption():
    for fields in ({}, {"preemption_mode": "swap", "num_host_blocks": 64}):
        engine = Engine(num_blocks=16, max_model_len=48, depth=2, **fields)
        for i in range(8):
            engine.add(str(i), prompt(6 + i, i), max_tokens=30, ignore_eos=True)
        engine.serve("beams", prompt(6, 9), use_beam_search=True, n=2, max_tokens=8, beam_width=2)
        assert engine.scheduler.reports.metrics()["num_preemptions_total"] > 5


@pytest.mark.parametrize("lost", [True, False], ids=["workers lost", "a result lost"])
def test_requests_survive_what_they_ran_on(lost):
    """Running, swapped, waiting and held ones, samples and beams: all get the tokens that they would have got."""
    engine = Engine(24, 48, 64, preemption_mode="swap", scheduling_policy="priority", max_num_seqs=10)
    for i in range(4):
        engine.add(str(i), prompt(6 + i, i), priority=i, max_tokens=30, ignore_eos=True)
    engine.add("samples", prompt(9, 7), n=4, max_tokens=12, priority=1)
    engine.add("search", prompt(9), n=3, use_beam_search=True, max_tokens=14, priority=2)
    times = 0
    while engine.scheduler.has_work():
        engine.step()
        if engine.scheduler.step % 5 == 0 and engine.scheduler.has_work():
            times += 1
            engine.lose(lost)
    assert times > 10
    engine.check()


def test_the_latest_to_come_is_refused_where_a_step_does_not_fit():
    engine = Engine()
    for name in ("a", "b"):
        engine.add(name, prompt(5), max_tokens=6, ignore_eos=True)
    engine.step()
    engine.lose(lost=False, cause="out of memory")
    assert engine.errors == {"b": "out of memory"}
    engine.run()


@pytest.mark.parametrize("lost", [True, False], ids=["it kills workers", "it does not fit"])
def test_only_who_does_not_fit_may_try_again(lost):
    engine = Engine()
    engine.add("a", prompt(5), max_tokens=6)
    for _ in range(MIN_DEATHS if lost else 1):
        engine.scheduler.schedule()
        outputs = engine.scheduler.start_over(lost, "its error")
    assert [(output.request_id, output.engine_fault) for output in outputs] == [("a", not lost)]


def test_no_more_are_preempted_than_make_room():
    """The last one has just the block that the first one needs."""
    engine = Engine(num_blocks=8, max_model_len=32, max_num_batched_tokens=32)
    first = engine.add("first", prompt(12), max_tokens=3, ignore_eos=True)
    second, last = (engine.add(name, prompt(length, length), max_tokens=2) for name, length in (("b", 14), ("c", 2)))
    engine.step(2)
    assert (first.num_preemptions, second.num_preemptions, last.num_preemptions) == (0, 0, 1)
    engine.run()


def test_what_chooses_tokens_travels_with_the_row():
    engine = Engine()
    fields, bias = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25}, {3: 2.0}
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -0.5}
    engine.add("a", prompt(5), max_tokens=1, logit_bias=bias, **fields, **penalties)
    engine.add("plain", prompt(5, 2), max_tokens=1)
    row, plain = engine.step().new
    assert dict(zip(COLUMNS, row.sampling, strict=True)) == fields and row.logit_bias == bias
    assert row.penalties == tuple(penalties.values()) and plain.penalties is None


def test_a_request_has_begun_once_a_part_of_an_answer_is_computed():
    """Also where that sample has ended, and the others have yet to come in."""
    engine = Engine(max_num_seqs=1)
    request = engine.add("a", prompt(20), n=2, max_tokens=1).group
    engine.step()
    assert not request.has_begun
    engine.step()
    assert len(request.seqs) == 1 and request.has_begun
    one = engine.add("b", prompt(5), max_tokens=3, ignore_eos=True).group
    while not engine.outputs["b"]:
        assert not one.has_begun
        engine.step()
    engine.lose(lost=False)  # it waits again, with its token
    assert one.has_begun
    engine.run()


def test_long_lists_of_tokens_travel_as_bits():
    """Each sample has them: as numbers, the list of a whole vocabulary of 152,000 would take 700 KB for each."""
    engine = Engine()
    lists = {"allowed_token_ids": [*range(50)], "stop_token_ids": [3, 40]}
    engine.serve("a", prompt(5), n=8, max_tokens=2, ignore_eos=True, **lists)
    rows = [row for plan in engine.plans for row in plan.new]
    assert len(rows) >= 8
    assert all(row.allowed == {0: 2**32 - 1, 1: 2**18 - 1} and row.stops == {0: 1 << 3, 1: 1 << 8} for row in rows)
    row = NewRow(slot=0, token_ids=[1], blocks=[[0]], allowed=bit_words(range(152_000)))
    assert len(Codec().encode(StepPlan(0, new=[row] * 256))) < 256 * 40_000


POISONS = {
    "its prompt": dict(at=lambda tokens: tokens >= 1),
    "its third token": dict(at=lambda tokens: tokens >= 12),
    "all its samples": dict(at=lambda tokens: tokens >= 10, n=4),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("poison", POISONS)
def test_a_request_that_kills_workers_is_found_and_ended(poison, place, chunked, depth):
    """Steps go through between its deaths, because others run, too, and it lives for some steps each time."""
    at, fields = POISONS[poison]["at"], {"n": POISONS[poison].get("n", 1)}
    engine = Engine(num_blocks=80, max_num_seqs=14, max_num_batched_tokens=64, enable_chunked_prefill=chunked,
                    preemption_mode="swap", num_host_blocks=20, depth=depth)  # fmt: skip

    def kills(ran: set[str]) -> bool:
        poisoned = engine.scheduler.requests.get("poison") if "poison" in ran else None
        return poisoned is not None and all(at(seq.num_known) for seq in poisoned.seqs)

    engine.kills = kills
    for i in range(12):
        if i == place:
            engine.add("poison", prompt(9, 3), max_tokens=30, ignore_eos=True, **fields)
        engine.add(str(i), prompt(6 + i, i), max_tokens=20, ignore_eos=True)
        if i % 4 == 3:
            engine.step()
    engine.run()
    error = f"killed; {engine.deaths} steps that this request ran in have ended so, and in the last it was alone"
    assert engine.errors == {"poison": error}
    assert 2 <= engine.deaths <= 2 + 4  # of at most 13 suspects
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    isolation = engine.scheduler.admission.isolation
    assert not isolation.suspects and not isolation.candidates and not isolation.isolated


def test_each_of_several_such_requests_is_found():
    engine, bad = Engine(num_blocks=120, max_num_seqs=16, max_num_batched_tokens=64), {"2", "3", "9"}
    engine.kills = lambda ran: bool(ran & bad)
    for i in range(16):
        engine.add(str(i), prompt(6, i), max_tokens=10, ignore_eos=True)
    engine.run()
    assert engine.errors.keys() == bad
    assert engine.deaths <= 2 + 4 + 2 * (1 + 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_deaths_that_nobody_is_to_blame_for_cost_no_request(depth):
    """An operator's kills: in steps that are far apart, and then in two that are not, after which all are tried."""
    engine = Engine(num_blocks=80, depth=depth, max_num_batched_tokens=256)
    engine.kills = lambda ran: engine.scheduler.step in {3, 9, 15, 25, 26}
    for i in range(6):
        engine.add(str(i), prompt(6, i), max_tokens=40, n=2 if i == 4 else 1, ignore_eos=True)
    tried, number = set(), 0
    while engine.scheduler.has_work():
        engine.step()
        isolation = engine.scheduler.admission.isolation
        tried.add(frozenset(request.request_id for request in isolation.isolated))
        if isolation.isolated and not number:  # who comes meanwhile waits, and may leave
            number = engine.scheduler.step
            engine.add("late", prompt(7), max_tokens=5, ignore_eos=True)
            engine.add("gone", prompt(7), max_tokens=5)
            assert engine.scheduler.reports.metrics()["num_requests_waiting"] >= 2
            engine.scheduler.abort("gone")
            assert engine.scheduler.reports.explain("late")["answers"][0]["state"] == "aside"
    engine.run()
    assert engine.deaths == 5 and set(engine.reasons.values()) == {"length"}
    assert tried == {frozenset(names) for names in ("", "345", "2", "1", "0")}
    waited = engine.scheduler.reports.explain("late")["answers"][0]["stays"][0]["waited_for"]
    assert set(waited) <= {"trial", "step"}


def test_explain_tells_where_the_time_went():
    engine = Engine(num_blocks=8, max_model_len=32, max_num_seqs=2, preemption_mode="recompute")
    engine.now = 5.0

    def step():
        engine.step()
        engine.now += 1.0

    engine.add("first", prompt(8), max_tokens=20, ignore_eos=True)
    second = engine.add("second", prompt(8, 2), max_tokens=20, ignore_eos=True)
    engine.now += 0.5
    step()
    engine.add("third", prompt(30, 3), max_tokens=1)
    while not second.num_preemptions:
        step()
    waiting = engine.scheduler.reports.explain("second")
    assert not waiting["finished"] and waiting["answers"][0]["state"] == "waiting"
    assert engine.scheduler.reports.explain("third")["answers"][0]["ahead"] == 1
    while engine.scheduler.has_work():
        step()
    for name in ("first", "second", "third"):
        report = engine.scheduler.reports.explain(name)
        stays = report["answers"][0]["stays"]
        assert report["finished"] and sum(stay["seconds"] for stay in stays) == pytest.approx(report["seconds"])
        for stay in stays:
            if stay["state"] == "waiting":
                assert sum(stay["waited_for"].values()) == pytest.approx(stay["seconds"])
    first, second, third = (
        engine.scheduler.reports.explain(name)["answers"][0]["stays"] for name in ("first", "second", "third")
    )
    assert [stay["state"] for stay in first] == ["waiting", "running"] and first[0]["seconds"] == 0.5
    assert [stay["state"] for stay in second][:4] == ["waiting", "running", "waiting", "running"]
    assert second[1]["preempted"] == {"for": "first", "by": "recompute", "tokens": 16}
    assert set(second[2]["waited_for"]) == {"blocks"} and second[3]["recomputed_tokens"] > 0
    assert set(third[0]["waited_for"]) <= {"slots", "blocks", "step"} and third[1]["chunks"] == [16, 14]
    assert engine.scheduler.reports.explain("nobody") is None


def test_explain_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr("scheduling.reports.MAX_REPORTS", 2)
    engine = Engine()
    for i in range(3):
        engine.serve(str(i), [1], max_tokens=1)
    assert [engine.scheduler.reports.explain(str(i)) is None for i in range(3)] == [True, False, False]
