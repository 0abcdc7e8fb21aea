"""Log-probabilities of output and prompt: against transformers, and the same however their tokens are computed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine import LLM, SamplingParams
from fake_worker import Engine, expected, known_logprobs, prompt, sample_seed
from integrity import check_integrity
from outputs import Choices, Generation, RequestOutput
from plan import EngineOutput, Logprobs, NewRow, StepPlan

if TYPE_CHECKING:
    import torch

# --- the scheduler alone ----------------------------------------------------------------------------------------------


def scores_of(tokens: list[int], k: int, first: int = 1) -> list[Logprobs]:
    return [known_logprobs(tokens, place, k) for place in range(first, len(tokens))]


FIELDS = {
    "plain": {},
    "no cache": {"enable_prefix_caching": False},
    "ahead": {"depth": 2},
    "ahead, swap": {"depth": 2, "preemption_mode": "swap", "num_host_blocks": 40, "num_blocks": 18},
    "ahead, recompute": {"depth": 2, "preemption_mode": "recompute", "num_blocks": 18},
    "classic": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
    "fair": {"scheduling_policy": "fair", "num_blocks": 20},
    "window": {"windows": (6,), "num_blocks": 10},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_each_token_is_scored_once_however_it_is_scheduled(fields):
    """Requests with and without log-probabilities over a small pool, with prefixes in common, twice."""
    engine = Engine(**{"max_model_len": 64} | fields)
    for i in range(8):
        wanted = {"prompt_logprobs": i % 3} if i % 2 else {}
        wanted |= {"logprobs": i % 4} if i > 3 else {}
        engine.add(str(i), prompt(14 + 3 * (i % 5)), max_tokens=12, n=1 + (i == 5), client=str(i % 2), **wanted)
        engine.step()
    engine.run()
    for i in range(8):
        ids = prompt(14 + 3 * (i % 5))
        assert engine.scores[str(i)] == (scores_of(ids, i % 3) if i % 2 else [])
        for index, answer in engine.answers[str(i)].items():
            assert answer == expected(ids, 12, 64, seed=sample_seed(index))
            scores = engine.token_logprobs[str(i), index]
            assert scores == (scores_of(ids + answer, i % 4, len(ids)) if i > 3 else [])
    if "num_blocks" in fields and fields.get("scheduling_policy") != "fair":
        assert engine.scheduler.reports.metrics()["num_preemptions_total"] > 0
    check_integrity(engine.scheduler)


def test_the_cache_is_not_read_for_what_must_be_scored_but_is_written():
    engine = Engine(num_blocks=64)
    ids = prompt(24)
    for name, wanted in (("first", {"prompt_logprobs": 0}), ("second", {"prompt_logprobs": 0}), ("third", {})):
        engine.serve(name, ids, max_tokens=2, ignore_eos=True, **wanted)
        report = engine.scheduler.reports.explain(name)
        assert report["cached_tokens"] == (23 if name == "third" else 0)
        notes = [stay.get("prefix_cache") for stay in report["answers"][0]["stays"] if stay["state"] == "running"]
        assert notes == [None if name == "third" else "not read: prompt_logprobs"]
    assert engine.scores["first"] == engine.scores["second"] == scores_of(ids, 0)


@pytest.mark.parametrize("lost", [True, False], ids=["killed", "failed"])
def test_what_was_sent_is_not_sent_again_after_a_step_is_lost(lost):
    engine, ids = Engine(num_host_blocks=8, max_num_batched_tokens=8), prompt(40)
    engine.add("a", ids, max_tokens=8, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    engine.step(3)
    assert len(engine.scores["a"]) == 24
    engine.lose(lost)
    before = engine.scheduler.counters["num_computed_tokens_total"]
    engine.step()
    assert engine.scheduler.counters["num_computed_tokens_total"] == before + 8
    engine.step(6)
    engine.lose(lost)
    engine.run()
    assert engine.scores["a"] == scores_of(ids, 2)
    assert engine.token_logprobs["a", 0] == scores_of(ids + engine.outputs["a"], 1, 40)
    assert engine.outputs["a"] == expected(ids, 8, 64, ignore_eos=True)


def test_a_preempted_prompt_goes_on_where_its_scores_end():
    """Of what was scored the cache is read again, although it was not at first."""
    engine, ids = Engine(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=8), prompt(40)
    engine.add("a", ids, max_tokens=4, ignore_eos=True, prompt_logprobs=0, priority=1)
    engine.step(3)
    engine.serve("b", prompt(20, 9), max_tokens=4, ignore_eos=True)
    assert engine.scheduler.reports.metrics()["num_preemptions_total"] == 1
    assert engine.scores["a"] == scores_of(ids, 0)
    (answer,) = engine.scheduler.reports.explain("a")["answers"]
    stays = [stay for stay in answer["stays"] if stay["state"] == "running"]
    assert stays[0]["cached_tokens"] == 0 and stays[1]["cached_tokens"] == 24


@pytest.mark.parametrize("index", [0, None])
def test_a_request_is_aborted_amid_its_scores(index):
    engine, ids = Engine(depth=2, max_num_batched_tokens=8), prompt(40)
    engine.add("a", ids, n=3, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    engine.step(3)
    assert 0 < (sent := len(engine.scores["a"])) < 39
    engine.scheduler.abort("a", index)
    engine.run()
    if index is None:
        assert len(engine.scores["a"]) == sent
    else:  # another sample goes on with them
        assert engine.scores["a"] == scores_of(ids, 1) and engine.finished == ["a"]
    assert engine.scheduler.blocks.num_free == 64


def test_samples_share_a_prompt_that_is_scored_once():
    engine, ids = Engine(max_num_batched_tokens=16), prompt(30)
    engine.serve("a", ids, n=4, max_tokens=6, ignore_eos=True, prompt_logprobs=3, logprobs=2)
    assert engine.scores["a"] == scores_of(ids, 3)
    assert engine.scheduler.counters["num_computed_tokens_total"] < 30 + 4 * 7 + 3
    for index in range(4):
        answer = engine.answers["a"][index]
        assert engine.token_logprobs["a", index] == scores_of(ids + answer, 2, 30)


@pytest.mark.parametrize("length", [1, 2, 31, 64])
def test_no_tokens_of_output_may_be_asked_for(length):
    """Even where the prompt fills the context, and though the token that is dropped may be the end of sequence."""
    for start in range(4):
        engine, ids = Engine(num_blocks=17, max_model_len=64), prompt(length, start)
        engine.serve("a", ids, n=2, max_tokens=0, prompt_logprobs=2, logprobs=1)
        assert engine.scores["a"] == scores_of(ids, 2) and engine.reasons == {"a": "length"}
        assert engine.answers["a"] == {0: [], 1: []} and not engine.token_logprobs["a", 0]
        report, counters = engine.scheduler.reports.explain("a"), engine.scheduler.counters
        assert [answer["output_tokens"] for answer in report["answers"]] == [0, 0]
        assert counters["generation_tokens_total"] == 0 and engine.scheduler.admission.reserve.used_share == 0.7


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 6}, "logprobs is 6; it must be at most max_logprobs, 5"),
        ({"prompt_logprobs": 7}, "prompt_logprobs is 7; it must be at most max_logprobs, 5"),
        ({"max_tokens": 0}, r"max_tokens is 0; .* from 1 to 2147483647: 0 is only for prompt_logprobs"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "use_beam_search": True}, "max_tokens is 0; .*use_beam_search"),
        ({"logprobs": 1, "use_beam_search": True}, "logprobs is 1; with use_beam_search it must be left out"),
        ({"max_tokens": 0, "prompt_logprobs": 1, "length": 65}, "65 tokens; at most 64 fit the context of 64"),
        ({"prompt_logprobs": 1, "length": 64}, "64 tokens; at most 63 leave room for output within the context of 64"),
    ],
)
def test_what_cannot_be_is_refused_by_name(params, message):
    length = params.pop("length", 9)
    with pytest.raises(ValueError, match=message):
        Engine(max_logprobs=5).add("a", prompt(length), **params)
    Engine(max_logprobs=5).add("a", prompt(9), logprobs=5, prompt_logprobs=5)


def test_rows_that_want_none_decode_in_the_batch():
    engine = Engine()
    engine.add("a", prompt(9), max_tokens=20, ignore_eos=True, prompt_logprobs=0)
    engine.add("b", prompt(9), max_tokens=20, ignore_eos=True, logprobs=0)
    engine.step(4)
    assert [seq.name for seq in engine.scheduler.lanes.all[0].decodes.current.seqs] == ["a"]
    engine.run()


# --- what a caller gets -----------------------------------------------------------------------------------------------


def test_a_stop_string_cuts_the_log_probabilities_to_the_tokens_kept(llm):
    ids = llm.tokenizer.encode("to be or not to be")
    params = SamplingParams(stop="not", logprobs=0)
    scores = [Logprobs(-1.0 - i, [], []) for i in range(len(ids))]
    generation = Generation([5], params, llm.tokenizer)
    generation.push(EngineOutput("a", ids[:1], cumulative_logprob=-1.0, logprobs=scores[:1]))
    assert generation.logprobs == scores[:1]
    generation.push(EngineOutput("a", ids[1:], cumulative_logprob=-99.0, logprobs=scores[1:]))
    kept = len(generation.token_ids)
    assert generation.finished and 1 < kept < len(ids)
    assert generation.logprobs == scores[:kept] and generation.cumulative_logprob == sum(range(-kept, 0))


def test_a_prompts_log_probabilities_come_in_parts(llm):
    params = SamplingParams(prompt_logprobs=1, n=2)
    choices = Choices("a", None, [5, 6, 7, 8], params, llm.tokenizer)
    refuse: Any = None
    first, second = [Logprobs(-1.0, [9], [-0.5], 3)] * 2, [Logprobs(-2.0, [8], [-2.0], 1)]
    assert choices.push(EngineOutput("a", [], prompt_logprobs=first), refuse) == ""
    assert choices.prompt_logprobs == first and choices.metrics.first_token_time is None
    choices.push(EngineOutput("a", [], prompt_logprobs=second), refuse)
    choices.push(EngineOutput("a", [50], num_cached_tokens=2), refuse)
    assert choices.metrics.first_token_time is not None and choices.metrics.num_cached_tokens == 2
    choices.fail("broken")
    none, *others = choices.output().prompt_logprobs
    tables = [{token: (p.logprob, p.rank) for token, p in place.items()} for place in others]
    assert none is None and tables == [{6: (-1.0, 3), 9: (-0.5, 1)}, {7: (-1.0, 3), 9: (-0.5, 1)}, {8: (-2.0, 1)}]
    assert [list(place) for place in others] == [[6, 9], [7, 9], [8]]
    assert others[0][9].decoded_token == llm.tokenizer.decode([9], skip_special_tokens=False)
    assert choices.output().outputs[0].logprobs is None


def forced(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] in float64, from the model's logits over `ids` in one step, past the scheduler."""
    import torch

    import oracles

    llm.core.reset_prefix_cache()  # these blocks are written past its books
    worker, seen = llm.core.executor.worker, []
    forward = worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    blocks = list(range(-(-len(ids) // llm.config.block_size)))
    try:
        worker.step(StepPlan(0, rows=[(0, len(ids))], new=[NewRow(slot=0, token_ids=ids, blocks=[blocks])]))
    finally:
        worker.model.forward = forward
    with torch.inference_mode():
        return oracles.logprobs(worker.model.logits(seen[0]))


def check(output: RequestOutput, want: torch.Tensor, k: int, prompt_k: int) -> None:
    """All of a request's log-probabilities against those of its only answer's tokens, want [T, V] float64."""
    (answer,) = output.outputs
    ids, places = output.prompt_token_ids + answer.token_ids, [*(output.prompt_logprobs or []), *answer.logprobs]
    assert len(places) == len(ids) and places[0] is None
    for i, place in enumerate(places[1:], 1):
        row, wanted = want[i - 1], prompt_k if i < len(output.prompt_token_ids) else k
        top = row.sort(descending=True, stable=True)
        assert next(iter(place)) == ids[i] and wanted <= len(place) <= wanted + 1
        for token, score in place.items():
            assert abs(score.logprob - float(row[token])) <= 1e-4
            assert abs(float(top.values[score.rank - 1]) - float(row[token])) <= 1e-4  # ranks of nearly equals may turn
        assert {p.rank for p in place.values()} >= set(range(1, wanted + 1))
    sampled = [place[token].logprob for place, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(sampled))


ASKED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def test_they_are_the_models_own(llm):
    """Before temperature, penalties and whatever else changes the draw; of the prompt alone where no tokens come."""
    params = replace(ASKED, temperature=0.7, top_k=20, seed=3, repetition_penalty=1.4, logit_bias={90: 5.0})
    (output,) = llm.generate("ROMEO:\nWhat light", params, use_tqdm=False)
    want = forced(llm, output.prompt_token_ids + output.outputs[0].token_ids)
    check(output, want, 3, 2)
    (scored,) = llm.generate("ROMEO:\nWhat light", replace(ASKED, max_tokens=0, logprobs=None), use_tqdm=False)
    assert scored.outputs[0].token_ids == [] and scored.outputs[0].finish_reason == "length"
    assert scored.outputs[0].logprobs is None and scored.metrics.first_token_time is None and scored.finished
    for ours, theirs in zip(scored.prompt_logprobs[1:], output.prompt_logprobs[1:], strict=True):
        for token in ours.keys() | theirs.keys():
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_stop_strings_keep_them_with_their_tokens(llm):
    params = replace(ASKED, temperature=1.0, seed=5, n=2, max_tokens=20, stop=("a", "e", "o"), prompt_logprobs=None)
    (output,) = llm.generate("ROMEO:\nWhat light", params, use_tqdm=False)
    assert len(output.outputs) == 2 and output.prompt_logprobs is None
    for answer in output.outputs:
        assert len(answer.logprobs) == len(answer.token_ids) and answer.finish_reason == "stop"
        sampled = [place[token].logprob for place, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(sampled))
    (plain,) = llm.generate("ROMEO:\nWhat light", replace(params, logprobs=None), use_tqdm=False)
    assert [a.token_ids for a in plain.outputs] == [a.token_ids for a in output.outputs]


def test_a_beam_search_has_none_but_of_its_prompt(llm):
    params = SamplingParams(temperature=0, use_beam_search=True, n=2, max_tokens=4, prompt_logprobs=1)
    (output,) = llm.generate("ROMEO:", params, use_tqdm=False)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.outputs[0].logprobs is None


def with_chunks_and_preemption(
    llm: LLM, count: int, lengths: range
) -> tuple[list[RequestOutput], list[SamplingParams]]:
    """What comes of prompts of these lengths, for whose answers the pool is too small."""
    rng, prompts, params = random.Random(0), [], []
    for i in range(count):
        prompts.append([rng.randrange(5, 1024) for _ in range(rng.choice(lengths))])
        params.append(replace(ASKED, logprobs=i % 20, prompt_logprobs=(3 * i) % 20, max_tokens=20 + i % 40, seed=i,
                              temperature=i % 2))  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.core.metrics()["num_preemptions_total"] > 0
    return outputs, params


def test_they_are_the_models_own_with_chunks_and_preemption(make_llm):
    few = make_llm(num_gpu_blocks_override=24, block_size=8, max_model_len=80, max_num_batched_tokens=24,
                   max_num_seqs=8, schedule_conservativeness=0.0)  # fmt: skip
    for output, asked in zip(*with_chunks_and_preemption(few, 6, range(30, 50)), strict=True):
        want = forced(few, output.prompt_token_ids + output.outputs[0].token_ids)
        check(output, want, asked.logprobs, asked.prompt_logprobs)
