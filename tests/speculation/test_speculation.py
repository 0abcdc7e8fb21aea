"""Speculative decoding on the demo: with drafts, every request gets the tokens that it gets without them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batch_state import BatchState
from config import DEMO, EngineConfig
from core import EngineCore
from device.startup import check_drafts
from engine import LLM, SamplingParams
from fake_worker import Engine, prompt
from forked import forked_workers
from integrity import check_integrity
from layers import Batch
from model_config import ModelConfig
from outputs import RequestOutput
from plan import StepPlan
from replay import replay
from scheduling.drafts import MARGIN, AcceptanceStats, Drafting
from speculation.options import SpeculativeConfig
from text.grammar import Constraint, Grammars
from worker import Worker

ROOMY = {"threads": 1, "num_gpu_blocks_override": 600, "block_size": 4, "max_num_seqs": 16}
FEW = {"num_gpu_blocks_override": 50, "schedule_conservativeness": 0.0, "max_model_len": 120}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
DRAFTED, TAKEN = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
LINE = "KING: to be, or not to be.\n"
REPEATS = LINE * 2 + "KING: to"
SPEECH = "Enter the KING, with a torch, and speaks to the SERVANT of it.\n\n"
REPEAT_TASK = [{"role": "user", "content": "Repeat lovely 9 times."}]
WAYS: list[dict[str, Any]] = [  # to ask; each of them is heeded for every token that comes after drafts
    {"temperature": 0, "logprobs": 2}, {"temperature": 0.7, "seed": 1}, {"temperature": 1, "seed": 2, "top_k": 9},
    {"temperature": 1, "seed": 3, "top_p": 0.8, "logprobs": 0}, {"temperature": 1, "seed": 4, "min_p": 0.1},
    {"temperature": 0, "repetition_penalty": 1.2}, {"temperature": 0.5, "seed": 5, "frequency_penalty": 0.6},
    {"temperature": 0, "presence_penalty": 1.5, "logprobs": 1}, {"temperature": 0, "logit_bias": {260: -5.0, 300: 2.0}},
    {"temperature": 0, "min_tokens": 12, "ignore_eos": False}, {"temperature": 0, "max_tokens": 1},
    {"temperature": 0, "bad_words": ["to be", "not"]}, {"temperature": 0.8, "seed": 6, "n": 3, "logprobs": 0},
    {"temperature": 0, "allowed_token_ids": list(range(100, 900))}, {"temperature": 0, "stop": ["not"]},
    {"temperature": 0, "stop_token_ids": [*range(20, 400, 3)], "logprobs": 0, "ignore_eos": False},
    {"temperature": 0, "prompt_logprobs": 1}, {"temperature": 0, "structured_outputs": {"regex": "(to be, )+or not"}},
]  # fmt: skip
PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
}  # fmt: skip
GRAMMARS: list[dict[str, Any]] = [  # each of them looks at the drafts
    {"temperature": 0, "structured_outputs": {"json": PERSON}, "logprobs": 1, "ignore_eos": False},
    {"temperature": 1, "seed": 8, "structured_outputs": {"json": PERSON}, "masked_logprobs": True, "logprobs": 2},
    {"temperature": 0.8, "seed": 9, "structured_outputs": {"choice": [LINE, LINE.lower(), SPEECH]}, "n": 3},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{9,50}"}, "repetition_penalty": 1.3, "min_tokens": 20},
    {"temperature": 1, "seed": 10, "structured_outputs": {"regex": "([a-z]{2,5} )+"}, "bad_words": ["the", "be t"],
     "presence_penalty": 0.5, "logprobs": 0, "n": 2},
    {"use_beam_search": True, "n": 2, "temperature": 0, "structured_outputs": {"regex": "(to |be )+or not"}},
]  # fmt: skip
WAYS += GRAMMARS
ASKED = [SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | way) for way in WAYS]
PROMPTS = [REPEATS, SPEECH]


class Guesses:
    """Proposes what is known to be the answer, and sometimes something else."""

    def __init__(self, answers: list[list[int]], most: int):
        self.answers, self.most = answers, most

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        """Draft what follows in the answer that each sequence has so far begun."""
        slots = batch.slots if count else batch.slots[:0]
        for slot in slots[slots >= 0].tolist():
            count = int(state.num_known[slot])
            prefix = state.token_ids[slot, :count].tolist()
            fits = (answer[count:] for answer in self.answers if answer[:count] == prefix)
            drafts, mixed = next(fits, [])[: self.most], zlib.crc32(str(prefix).encode())
            if drafts and mixed % 3 == 0:
                place = mixed // 3 % len(drafts)
                drafts[place] = (drafts[place] + 1) % 1000
            state.token_ids[slot, count : count + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            state.num_drafts[slot] = len(drafts)


def guess(worker: Worker, answers: list[list[int]], padded: bool) -> None:
    """Give a worker that proposer, and if rows are `padded`, as on a GPU, have it compute the most drafts."""
    worker.proposer = Guesses(answers, worker.state.most_drafts)
    if padded:
        worker.state.with_drafts = lambda plan: plan


def fill_less(
    grammars: Grammars, plan: StepPlan, rows: Any, fill: Callable[..., dict[Any, str]] = Grammars.fill
) -> dict[Any, str]:
    """Take one of several drafts back, after the step was planned."""
    failed, size = fill(grammars, plan, rows), 4 * grammars.words
    plan.masks = [(slot, masks[:-size] if len(masks) > 2 * size else masks) for slot, masks in plan.masks]
    return failed


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def assert_equal(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    """The same tokens for the same reasons, with the same log-probabilities up to rounding."""
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours.outputs) == len(theirs.outputs)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text)
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            for here, there in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert here.keys() == there.keys()
                for token, value in here.items():
                    assert value.logprob == pytest.approx(there[token].logprob, abs=2e-4)
            if other.cumulative_logprob is not None:
                assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=2e-3)


def many() -> tuple[list[str], list[SamplingParams]]:
    return [prompt for prompt in PROMPTS for _ in ASKED], [params for _ in PROMPTS for params in ASKED]


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture(scope="module")
def plain(make_llm: Callable[..., LLM]) -> list[RequestOutput]:
    """What the engine answers without drafts."""
    return make_llm(**ROOMY).generate(*many(), use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 40} | FEW,
        {"enable_prefix_caching": False, "async_scheduling": True, "sanitize_kv": True},
        {"disturbed": True},
        pytest.param({"preemption_mode": "swap", "swap_space": 0.1} | FEW, marks=pytest.mark.full),
        pytest.param({"enable_chunked_prefill": False, "scheduling_policy": "fair"}, marks=pytest.mark.full),
        pytest.param({"async_scheduling": True, "sanitize_kv": True} | FEW, marks=pytest.mark.full),
        pytest.param({"backend": "reference"}, marks=pytest.mark.full),
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 40} | FEW,
        pytest.param(
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": False}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(
    options: dict[str, Any], plain: list[RequestOutput], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked, however it is scheduled; if rows are padded, as on a GPU, and grammars break off anywhere."""
    padded, follow = "disturbed" in options, Constraint.follow
    if padded:
        options = {name: value for name, value in options.items() if name != "disturbed"}
        monkeypatch.setattr(Constraint, "follow", lambda c, ids, drafts: follow(c, ids, drafts[: len(ids) % 4]))
        monkeypatch.setattr(Grammars, "fill", fill_less)
    monkeypatch.setattr(Drafting, "price", lambda drafting, rows: 0.0)  # so that all rows have drafts
    monkeypatch.setattr("text.grammar.PATIENCE", 60.0)  # so that masks along them are always there
    answers = [[*one.prompt_token_ids, *o.token_ids] for one in plain for o in one.outputs]
    llm = make_llm(**ROOMY | options, speculative_config=NGRAM)
    llm.collective_rpc(guess, args=(answers, padded))
    outputs = llm.generate(*many(), use_tqdm=False)
    assert_equal(outputs, plain)
    core = llm.client.core
    taken = [0] * len(ASKED)
    for i, output in enumerate(outputs):
        answers = core.scheduler.reports.explain(output.request_id)["answers"]
        taken[i % len(ASKED)] += sum(answer["accepted_tokens"] for answer in answers)
    assert [count > 1 for count in taken[-len(GRAMMARS) :]] == [not way.get("use_beam_search") for way in GRAMMARS]
    counters = core.scheduler.counters
    assert counters[DRAFTED] > counters[TAKEN] > 300
    assert "num_gpu_blocks_override" not in options or counters["num_preemptions_total"] > 0
    check_integrity(core.scheduler)
    # What drafts have left in full blocks is found again, and is right.
    assert_equal(llm.generate(*many(), use_tqdm=False), plain)
    core.close()


@pytest.mark.parametrize("grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_came_before_is_proposed(
    options: dict[str, Any], grammar: bool, make_llm: Callable[..., LLM], llm: LLM, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A repeated word is taken at a stroke, and a journal of it can be replayed, without the grammar."""
    monkeypatch.setattr(Drafting, "price", lambda drafting, rows: 0.0)  # whatever else the machine does
    monkeypatch.setattr("text.grammar.PATIENCE", 60.0)
    file = tmp_path / "steps.jsonl"

    def ask(of: LLM) -> list[RequestOutput]:
        if not grammar:
            return of.chat(REPEAT_TASK, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        regex = {"regex": r"(, to be|, or not to be|\.\nKING: to be){9}"}
        params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=regex)
        return of.generate([LINE * 2 + "KING: to be"], params, use_tqdm=False)

    drafting = make_llm(**ROOMY | options, speculative_config=NGRAM, log_scheduler=str(file))
    outputs = ask(drafting)
    assert_equal(outputs, ask(llm))
    scheduler = drafting.client.core.scheduler
    tokens, taken = len(outputs[0].outputs[0].token_ids), scheduler.counters[TAKEN]
    assert taken > tokens / 2 and scheduler.step <= tokens / 2 + 1
    assert replay(file.read_text().splitlines()).counters == scheduler.counters
    accepted = drafting.client.utility("metrics")[0]["spec_decode_num_accepted_tokens_per_pos_total"]
    assert list(accepted) == ["0", "1", "2", "3"] and sum(accepted.values()) == taken
    (answer,) = drafting.client.utility("explain", outputs[0].request_id)[0]["answers"]
    assert answer["accepted_tokens"] == taken <= answer["draft_tokens"] == scheduler.counters[DRAFTED]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"backend": "reference", "async_scheduling": True}, marks=pytest.mark.full)], ids=str
)
def test_what_another_request_had_is_proposed(
    options: dict[str, Any], make_llm: Callable[..., LLM], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To requests of the same salt alone. What a slot had before stays there while others are free."""
    monkeypatch.setattr(Drafting, "price", lambda drafting, rows: 0.0)
    drafting = make_llm(**ROOMY | options, speculative_config=json.dumps({"method": "suffix"}))
    params, taken = SamplingParams(temperature=1, seed=5, max_tokens=60, ignore_eos=True), []
    counters = drafting.client.core.scheduler.counters
    for salt in ("one", "one", "two"):
        before = counters[TAKEN]
        prompt = {"prompt": SPEECH, "cache_salt": salt}
        outputs = drafting.generate([prompt], params, use_tqdm=False)
        assert_equal(outputs, llm.generate([SPEECH], params, use_tqdm=False))
        taken.append(counters[TAKEN] - before)
    assert taken[0] == taken[2] < 30 < 50 < taken[1]
    drafting.client.core.close()


@pytest.mark.parametrize(
    ("changes", "dtype", "most"),
    [
        ({}, torch.float32, 15), ({"kv_shapes": ((1, 512),) * 6}, torch.bfloat16, 31),
        ({"delta": object()}, torch.float16, 15),
    ],
)  # fmt: skip
def test_drafts_that_the_kernels_do_not_take_are_refused(changes: dict[str, Any], dtype: torch.dtype, most: int):
    kernels = pytest.importorskip("kernels")
    model = replace(ModelConfig.from_folder(DEMO), **changes)
    for count in (most, most + 1):
        config = EngineConfig(speculative_config=json.dumps({"num_speculative_tokens": count}))
        with contextlib.nullcontext() if count == most else pytest.raises(ValueError, match=f"takes at most {most}$"):
            check_drafts(config, model, kernels, dtype)


def test_options_of_suffix_decoding() -> None:
    assert SpeculativeConfig.of('{"method": "suffix"}').num_speculative_tokens == 24
    text = '{"num_speculative_tokens": 2, "draft_tensor_parallel_size": 1, "disable_by_batch_size": 4}'
    assert SpeculativeConfig.of(text) == SpeculativeConfig(2)
    assert SpeculativeConfig.ignored(text) == ["disable_by_batch_size", "draft_tensor_parallel_size"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "no JSON"),
        ("[]", "must be an object"),
        ({}, "has no num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be a whole number from 1 to 32"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": 2, "method": "magic"}, "method is 'magic'; it must be one of"),
        ({"num_speculative_tokens": 2, "tokens": 2}, "has 'tokens'; known: num_speculative_tokens, method"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 9, "prompt_lookup_max": 5}, "prompt_lookup_min is 9; it"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 17}, "prompt_lookup_min is 17"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": 1}, "min is 2; it must be at most prompt_lookup_max, 1"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": "5"}, "prompt_lookup_max is '5'"),
    ],
)
def test_bad_options_are_named(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match="speculative_config") as error:
        EngineConfig(speculative_config=given if isinstance(given, str) else json.dumps(given))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "mtp", "pipeline_parallel_size": 2}, {"task": "embed"}, {"batch_invariant": True},
        {"enable_expert_parallel": True, "data_parallel_size": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_with_drafts_is_refused(options: dict[str, Any]) -> None:
    wanted = NGRAM | {name: options[name] for name in ("method",) if name in options}
    with pytest.raises(ValueError, match="speculative_config"):
        EngineConfig(speculative_config=json.dumps(wanted), **{k: v for k, v in options.items() if k != "method"})


def kill_with_drafts_in_flight(core: EngineCore) -> list[int]:
    """Have a worker killed at two of the steps to come; returns the processes that were killed so far."""
    killed: list[int] = []
    executor, submit = core.executor, core.executor.submit

    def submit_and_kill(plan: StepPlan) -> None:
        submit(plan)
        pid = executor.processes[-1 - len(killed) % len(executor.processes)].pid
        due = plan.drafts and core.scheduler.counters[TAKEN] > 5 * (1 + len(killed)) and len(killed) < 2
        if due and pid not in killed:  # results that it had sent may still be taken after its death
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    executor.submit = submit_and_kill
    return killed


@pytest.mark.parametrize(
    "options",
    [{"distributed_executor_backend": "mp"}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.full)],
    ids=str,
)
def test_a_worker_dies_with_drafts_in_flight(
    options: dict[str, Any], make_llm: Callable[..., LLM], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests go on where they stopped, as they do without drafts."""
    monkeypatch.setattr(Drafting, "price", lambda drafting, rows: 0.0)
    drafting = make_llm(**ROOMY | options, speculative_config=NGRAM)
    core = drafting.client.core
    killed = kill_with_drafts_in_flight(core)
    params = [SamplingParams(temperature=0, max_tokens=40), SamplingParams(temperature=0.5, seed=4, max_tokens=40)]
    outputs = drafting.chat([REPEAT_TASK] * 2, params, use_tqdm=False)
    assert_equal(outputs, llm.chat([REPEAT_TASK] * 2, params, use_tqdm=False))
    assert core.metrics()["num_worker_restarts_total"] == len(killed) == 2
    check_integrity(core.scheduler)
    core.close()


def test_drafts_cease_where_they_do_not_pay() -> None:
    """A draft must bring a row's share of the tokens in its share of the seconds."""
    approx = partial(pytest.approx, rel=0.01)  # planning takes a little, too
    config = EngineConfig(speculative_config=json.dumps(NGRAM))
    flat = Drafting(config, {}, [(1, 1.0, 0.0), (2, 1.1, 0.0), (4, 1.2, 0.0), (64, 1.9, 0.0)])
    steep = Drafting(config, {}, [(1, 1.0, 0.0), (2, 2.0, 0.0), (4, 4.0, 0.0)])
    assert flat.price(1) == approx(0.1 * MARGIN) and flat.price(2) == approx((1.2 / 1.1 - 1) * MARGIN)
    assert [steep.price(rows) for rows in (1, 2, 3, 100)] == approx([MARGIN] * 4)
    assert 0 < flat.price(32) < 1 and flat.price(64) == approx(MARGIN)
    assert Drafting(config, {}, ()).price(9) == 0
    stats = AcceptanceStats()
    chances = [stats.chance]
    for taken in [0] * 20 + [4] * 20:
        stats.learn(4, taken)
        chances.append(stats.chance)
    assert chances[20] < 0.15 < 0.6 == chances[0] < 0.85 < chances[40] <= 1
    assert stats.presence == pytest.approx(1)
    for _ in range(20):
        stats.learn(0, 0)  # there were none to judge by,
    assert stats.chance == chances[40] and stats.presence < 0.1  # but it is known how often that is so


def flight_of(chances: list[float], step: int = 1) -> Any:
    group = SimpleNamespace(beam=None)
    seqs = [SimpleNamespace(acceptance=AcceptanceStats(chance), group=group) for chance in chances]
    return SimpleNamespace(plan=StepPlan(step), seqs=seqs)


def test_a_model_makes_no_more_drafts_than_pay() -> None:
    """For all sequences together, because it makes them for all. In a crowd a look-up still costs nothing."""
    model = EngineConfig(speculative_config='{"num_speculative_tokens": 4, "method": "mtp"}')
    lookup = EngineConfig(speculative_config=json.dumps(NGRAM))
    times = [(1, 1.0, 0.2), (2, 1.1, 0.2), (4, 1.2, 0.2), (8, 1.3, 0.2), (64, 7.3, 6.2)]
    drafting, free = Drafting(model, {}, times), Drafting(lookup, {}, times)
    for policy in (drafting, free):
        policy.begin_step(1, 1, [])
    assert drafting.needed == free.needed == pytest.approx(0.1 * MARGIN, rel=0.01)
    assert [drafting.proposals(flight_of([chance])) for chance in (0.3, 0.6, 0.8, 0.95)] == [0, 1, 4, 4]
    assert free.proposals(flight_of([0.3])) == 4
    drafting.begin_step(2, 4, [])
    assert drafting.proposals(flight_of([0.9, 0.1, 0.1, 0.1])) == 0 < drafting.proposals(flight_of([0.9] * 4))
    drafting.begin_step(64, 33, [])
    free.begin_step(64, 33, [])
    assert drafting.proposals(flight_of([1.0] * 33, 64)) == 0
    assert free.proposals(flight_of([1.0] * 33, 64)) == 4 and free.proposals(flight_of([1.0] * 33, 65)) == 0


def test_a_model_that_pays_again_is_asked_again() -> None:
    """And its sequences leave the settled decodes at once."""
    model = EngineConfig(speculative_config='{"num_speculative_tokens": 4, "method": "mtp"}')
    drafting = Drafting(model, {}, [(1, 1.0, 0.2), (2, 1.1, 0.2)])
    params = SimpleNamespace(constrained=False, min_tokens=0)
    group, stats = SimpleNamespace(params=params, num_prompt=1), AcceptanceStats(0.9)
    seq: Any = SimpleNamespace(acceptance=stats, group=group, limit=100, num_known=5, num_tokens=5, proposed=[])
    assert drafting.begin_step(9, 1, [seq]) == [seq]
    assert drafting.proposals(flight_of([0.1])) == 0 and drafting.begin_step(10, 1, [seq]) == []
    assert drafting.wanted(seq) == 0 < drafting.proposals(flight_of([0.9]))
    assert drafting.begin_step(11, 1, [seq]) == [seq] and drafting.wanted(seq) == 4


def test_only_drafts_that_were_computed_count() -> None:
    """For the policy's time and for what is counted: of the most that a plan may have, few are there."""
    computed = {}
    for drafts in (0, 4):
        options = json.dumps(NGRAM | {"num_speculative_tokens": drafts}) if drafts else None
        engine = Engine(max_num_batched_tokens=32, scheduling_policy="fair", speculative_config=options)
        engine.worker.trims = True
        engine.serve("a", prompt(5, 0), client="a", max_tokens=40, ignore_eos=True)
        counters, policy = engine.scheduler.counters, engine.scheduler.policy
        computed[drafts] = counters["num_computed_tokens_total"] - counters[DRAFTED], policy.virtual_time
        assert drafts == 0 or counters[TAKEN] > 5
    refused = computed[4][0] - (computed[0][0] - counters[TAKEN])
    assert refused == 0 and abs(computed[4][1] - computed[0][1]) <= 2


def test_what_was_proposed_is_for_the_next_step_alone() -> None:
    """Its drafts are gone from the device then, so a grammar must not follow them again."""
    engine = Engine(speculative_config=json.dumps(NGRAM))
    seq = engine.add("a", prompt(5, 0), max_tokens=50, ignore_eos=True, structured_outputs={"choice": ["any"]})
    while not seq.proposed:
        engine.step()
    engine.scheduler.drafting.proposals = lambda plan: 0
    engine.step()
    assert seq.proposed == [] and seq in engine.scheduler.running
