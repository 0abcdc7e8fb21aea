"""The engine end to end on the demo model: the same tokens whatever the batch, the chunks, the cache and the pool."""

from __future__ import annotations

import csv
import os
import queue
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config import DEMO
from engine import LLM, SamplingParams
from executor import WorkerError
from integrity import check_integrity
from observe.logs import start_log
from outputs import Choices, Generation
from plan import EngineCoreRequest, EngineOutput
from test_logprobs import forced

GREEDY = SamplingParams(temperature=0, max_tokens=48)


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


STORY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
FEW = {"num_gpu_blocks_override": 256, "block_size": 4, "schedule_conservativeness": 0.0}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"max_num_batched_tokens": 32, "max_num_seqs": 32}, marks=pytest.mark.full),
        pytest.param(FEW | {"preemption_mode": "recompute", "swap_space": 0.0}, marks=pytest.mark.full),
        FEW | {"preemption_mode": "swap", "swap_space": 0.01},
        pytest.param({"enable_chunked_prefill": False, "scheduler_delay_factor": 0.5}, marks=pytest.mark.full),
    ],
    ids=["chunks of 32", "recompute", "swap", "classic order"],
)
def test_same_answers_however_they_are_computed(make_llm, work, answers, fields):
    llm = make_llm(**fields)
    assert tokens(llm.generate(*work, use_tqdm=False)) == answers
    check_integrity(llm.core.scheduler)
    if "num_gpu_blocks_override" in fields:
        metrics = llm.core.metrics()
        assert metrics["num_preemptions_total"] > 5
        assert (metrics["num_swapped_blocks_total"] > 0) == (llm.config.preemption_mode != "recompute")


@pytest.mark.full
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_same_answers_as_one_of_four(make_llm, work, answers, caching):
    llm = make_llm(num_gpu_blocks_override=160, block_size=16, enable_prefix_caching=caching)
    prompts, params = (some[::4] + some[1::12] for some in work)
    outputs = llm.generate(prompts, [replace(p, n=4) for p in params], use_tqdm=False)
    for output, answer in zip(outputs, answers[::4] + answers[1::12], strict=True):
        assert [completion.token_ids for completion in output.outputs] == [answer] * 4
    check_integrity(llm.core.scheduler)


@pytest.mark.parametrize(
    ("part", "blocks", "hits"), [(slice(0, 50, 4), 64, 200), pytest.param(slice(50), 80, 1000, marks=pytest.mark.full)]
)
def test_prefixes_come_back_from_host_memory(make_llm, work, answers, part, blocks, hits):
    """The second round finds in host memory what the first one had to drop from a small pool."""
    llm = make_llm(num_gpu_blocks_override=blocks, block_size=16, preemption_mode="recompute", swap_space=0.1)
    for _ in range(2):
        assert tokens(llm.generate(*(some[part] for some in work), use_tqdm=False)) == answers[part]
    assert llm.core.metrics()["host_cache_hits_total"] > hits


def test_same_answers_with_a_warm_cache(llm, work, answers):
    before = llm.core.metrics()["prefix_cache_hits_total"]
    assert tokens(llm.generate(*(some[::3] for some in work), use_tqdm=False)) == answers[::3]
    assert llm.core.metrics()["prefix_cache_hits_total"] > before


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        pytest.param("float32", "auto", marks=pytest.mark.long),
        pytest.param("bfloat16", "auto", marks=pytest.mark.full),
        pytest.param("bfloat16", "fp8", marks=pytest.mark.full),
    ],
)
def test_batch_invariant_logits_are_equal_to_the_bit(make_llm, work, dtype, cache):
    """Alone, together, in chunks, from the prefix cache, and after preemption either way."""
    prompts = [prompt[:30] for prompt in work[0][:6]]
    scored = [{}, {"n": 2, "logprobs": 0}]
    params = [replace(STORY, max_tokens=8, temperature=i % 2, seed=i, **scored[i % 2]) for i in range(6)]

    def run(batches: list[slice], **fields) -> tuple[set[bytes], list[float], dict]:
        options = {"dtype": dtype, "kv_cache_dtype": cache, "batch_invariant": True, "block_size": 4}
        llm, rows = make_llm(max_model_len=40, **options, **fields), set()
        model = llm.core.executor.worker.model
        logits = model.logits

        def record(hidden: torch.Tensor) -> torch.Tensor:
            values = logits(hidden)
            rows.update(row.view(torch.uint8).numpy().tobytes() for row in values)
            return values

        model.logits = record
        outputs = [o for batch in batches for o in llm.generate(prompts[batch], params[batch], use_tqdm=False)]
        summed = [o.outputs[0].cumulative_logprob for o in outputs[-6:] if o.outputs[0].cumulative_logprob is not None]
        return rows, summed, llm.core.metrics()

    alone, summed, _ = run([slice(i, i + 1) for i in range(6)], enable_prefix_caching=False)
    assert len(alone) > 6 * 8 and len(set(summed)) == 3
    few = {"num_gpu_blocks_override": 24, "schedule_conservativeness": 0.0, "enable_prefix_caching": False}
    for happened, fields in (
        ("num_requests_running", {"max_num_batched_tokens": 16, "max_num_seqs": 16, "enable_prefix_caching": False}),
        ("prefix_cache_hits_total", {}),
        ("num_preemptions_total", few | {"preemption_mode": "recompute"}),
        ("num_swapped_blocks_total", few | {"preemption_mode": "swap", "swap_space": 0.01}),
    ):
        rows, values, metrics = run([slice(None)] * (1 + (happened == "prefix_cache_hits_total")), **fields)
        assert rows == alone and values == summed, happened
        assert metrics[happened] > 0 or happened == "num_requests_running"


@pytest.mark.parametrize(
    "count", [8, pytest.param(50, marks=pytest.mark.full), pytest.param(200, marks=pytest.mark.long)]
)
def test_together_and_one_by_one(llm, count):
    """Prompts with the lengths of real requests, scaled to the demo's context of 1,024; every other one greedy."""
    with Path(__file__).with_name("azure_lengths.csv").open() as file:
        lengths = list(csv.reader(line for line in file if not line.startswith("#")))[1:]
    rng, prompts, params = random.Random(0), [], []
    for i, (prompt, output) in enumerate(lengths[:count]):
        prompts.append([rng.randrange(5, 1024) for _ in range(max(1, int(prompt) // 10))])
        limit, heat = max(1, int(output) // 10), 0.9 * (i % 2)
        params.append(SamplingParams(temperature=heat, top_p=0.95, top_k=50, seed=i, max_tokens=limit))
    assert len(prompts) == count
    together = tokens(llm.generate(prompts, params, use_tqdm=False))
    llm.core.reset_prefix_cache()
    alone = [tokens(llm.generate(p, q, use_tqdm=False))[0] for p, q in zip(prompts, params, strict=True)]
    assert together == alone


@pytest.fixture(scope="module")
def penalized(llm) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts, parameters with penalties and biases, and the answers."""
    prompts, params = [[5 + i * 37 % 90 for i in range(3 * j, 9 * j + 4)] for j in range(16)], []
    for j in range(16):
        fields = {"repetition_penalty": 1.3} if j % 3 == 0 else {}
        fields |= {"frequency_penalty": 0.7, "presence_penalty": -0.2} if j % 3 == 1 else {}
        fields |= {"logit_bias": {j: 3.0, 80: -100.0}} if j % 4 == 0 else {}
        fields |= {"allowed_token_ids": [*range(40, 640)]} if j % 5 == 0 else {}
        params.append(SamplingParams(temperature=j % 2, top_k=40, seed=j, max_tokens=40, ignore_eos=True, **fields))
    return prompts, params, tokens(llm.generate(prompts, params, use_tqdm=False))


def test_penalties_and_biases_are_each_answers_own(llm, penalized):
    prompts, params, want = penalized
    for j in (0, 1, 4, 9):
        assert tokens(llm.generate(prompts[j], params[j], use_tqdm=False)) == [want[j]]
    assert all(set(want[j]) <= set(range(40, 640)) for j in range(0, 16, 5))
    plain = [replace(p, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0) for p in params]
    free = tokens(llm.generate(prompts, plain, use_tqdm=False))
    for kind in range(3):  # where nothing is penalized nothing changes, and elsewhere most answers do
        same = [free[j] == want[j] for j in range(kind, 16, 3)]
        assert all(same) if kind == 2 else sum(same) < len(same) / 2


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"max_num_batched_tokens": 32, "max_num_seqs": 32}, marks=pytest.mark.full),
        FEW | {"num_gpu_blocks_override": 160, "preemption_mode": "recompute"},
        pytest.param(
            FEW | {"num_gpu_blocks_override": 160, "preemption_mode": "swap", "swap_space": 0.01},
            marks=pytest.mark.full,
        ),
    ],
    ids=["chunks of 32", "recompute", "swap"],
)
def test_penalties_and_biases_do_not_depend_on_how_tokens_are_computed(make_llm, penalized, fields):
    """What a preempted request's output counted is counted again, and prompts do not count as output."""
    (prompts, params, want), other = penalized, make_llm(**fields)
    assert tokens(other.generate(prompts, params, use_tqdm=False)) == want
    if "preemption_mode" in fields:
        assert other.core.metrics()["num_preemptions_total"] > 5


@pytest.mark.parametrize("part", [slice(0, 50, 6), pytest.param(slice(50), marks=pytest.mark.full)])
def test_priorities_change_the_order_and_not_the_tokens(make_llm, work, answers, part):
    llm = make_llm(scheduling_policy="priority", **FEW)
    ranks = [i * 7 % 5 for i in range(len(answers))][part]
    assert tokens(llm.generate(*(some[part] for some in work), use_tqdm=False, priority=ranks)) == answers[part]
    same = llm.generate(*(some[part] for some in work), use_tqdm=False, priority=3)
    assert tokens(same) == answers[part]
    with pytest.raises(ValueError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], priority=[0], use_tqdm=False)


def test_min_p_and_top_k_of_one_are_greedy(llm):
    greedy = tokens(llm.generate("ROMEO:\n", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False))
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        params = SamplingParams(temperature=1.0, max_tokens=20, **narrow)
        assert tokens(llm.generate("ROMEO:\n", params, use_tqdm=False)) == greedy


def test_an_option_that_is_none_and_a_backend_that_is_not_there_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for fields, message in (({"nonsense": 1}, "nonsense; .*block_size"), ({"backend": "triton"}, "TRITON_I|no triton")):
        with pytest.raises(ValueError, match=message):
            LLM(DEMO, device="cpu", **fields)


def test_a_pool_smaller_than_the_context_shortens_it(make_llm):
    llm = make_llm(num_gpu_blocks_override=8, block_size=16)
    assert llm.core.facts["max_model_len"] == 128
    with pytest.raises(ValueError, match=r"200 tokens; at most 127 .* context of 128"):
        llm.generate([[5] * 200], use_tqdm=False)


def test_requests_that_wait_for_new_weights_run_or_are_refused_or_given_up(llm, monkeypatch):
    core, params = llm.core, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    monkeypatch.setattr(core, "pausing", True)
    for name, prompt in (("fine", [5, 6]), ("bad", [10**6]), ("left", [5, 6])):
        core.add(EngineCoreRequest(name, prompt, params))
    with pytest.raises(ValueError, match="'fine' is in use"):
        core.add(EngineCoreRequest("fine", [5], params))
    core.abort("left")
    core.admit()
    assert not core.has_work()
    core.pausing, news = False, []
    core.admit()
    while core.has_work():
        news += core.step()
    errors = {output.request_id: str(output.error) for output in news}
    assert errors.keys() == {"fine", "bad"} and errors["fine"] == "None" and "token id 1000000" in errors["bad"]


def test_generation_keeps_the_ending_token_out_of_the_text(llm):
    ids = llm.tokenizer.encode("hello there")
    for include in (False, True):
        params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
        generation = Generation([5], params, llm.tokenizer)
        generation.push(EngineOutput("a", ids[:-1]))
        generation.push(EngineOutput("a", ids[-1:], finish_reason="stop", stop_reason=ids[-1]))
        assert generation.text == llm.tokenizer.decode(ids if include else ids[:-1])
        assert generation.token_ids == ids and generation.finish_reason == "stop"


def test_start_log_says_what_fits(llm):
    text = start_log(llm.core.facts, llm.core.executor.note())
    assert len(text.splitlines()) <= 6
    assert "  note      what may surprise\n" in start_log(llm.core.facts | {"notes": ["what may surprise"]}, "")
    said = ["Qwen3ForCausalLM", "parameters, activations in float32", "cpu, backend cpu", "blocks of 64"]
    assert all(fact in text for fact in [*said, "full length of 1,024"])
    assert list(llm.core.facts["startup"]) == ["imports", "weights", "KV pool", "warm-up"]
    assert all(f"{phase} {seconds:.2f} s" in text for phase, seconds in llm.core.facts["startup"].items())


# --- several answers to a prompt --------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, seed=7, n=4)
OPENING = "ROMEO:\nWhat light"


def answers_of(output) -> list[list[int]]:
    assert output.finished and [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module")
def logprob(llm):
    """Log-probability of an answer, from the model's logits of prompt and answer in one go, past the scheduler."""

    def total(prompt: str, answer: list[int]) -> float:
        logprobs = forced(llm, llm.tokenizer.encode(prompt) + answer)[-len(answer) - 1 : -1]
        return float(logprobs[torch.arange(len(answer)), answer].sum())

    return total


def test_samples_are_distinct_and_each_reproducible(llm):
    (output,) = llm.generate(OPENING, SAMPLED, use_tqdm=False)
    four = answers_of(output)
    assert len({tuple(answer) for answer in four}) == 4
    assert answers_of(llm.generate(OPENING, SAMPLED, use_tqdm=False)[0]) == four
    for n in (1, 2):  # whether others are drawn beside it makes no difference to a sample
        assert answers_of(llm.generate(OPENING, replace(SAMPLED, n=n), use_tqdm=False)[0]) == four[:n]
    assert answers_of(llm.generate(OPENING, replace(SAMPLED, seed=8), use_tqdm=False)[0])[0] not in four
    for completion in output.outputs:
        assert completion.cumulative_logprob is None
        assert llm.tokenizer.decode(completion.token_ids).startswith(completion.text)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    chat = llm.chat([{"role": "user", "content": "Who is there?"}], replace(SAMPLED, temperature=3.0), use_tqdm=False)
    assert len({completion.text for completion in chat[0].outputs}) == 4
    unseeded = answers_of(llm.generate(OPENING, replace(SAMPLED, seed=None), use_tqdm=False)[0])
    assert len({tuple(answer) for answer in unseeded}) == 4


def test_each_prompt_has_its_own_number_of_samples(llm):
    prompts, counts = ["Enter", "To be", "Exit", OPENING], [3, 1, 2, 4]
    params = [replace(SAMPLED, n=n, seed=n, max_tokens=10 + n) for n in counts]
    together = [answers_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    assert [len(answers) for answers in together] == counts
    for prompt, param, answers in zip(prompts, params, together, strict=True):
        assert answers_of(llm.generate(prompt, param, use_tqdm=False)[0]) == answers


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_are_scored_by_the_model(llm, logprob, penalty):
    params = SamplingParams(use_beam_search=True, n=3, beam_width=4, length_penalty=penalty, max_tokens=20)
    prompt = llm.tokenizer.render([{"role": "user", "content": "What is 23 + 58?"}])
    (output,) = llm.generate([llm.tokenizer.encode(prompt, add_special_tokens=False)], params, use_tqdm=False)
    beams = answers_of(output)
    scores = [completion.cumulative_logprob for completion in output.outputs]
    assert len({tuple(beam) for beam in beams}) == 3 and scores == sorted(scores, reverse=True)
    for beam, score in zip(beams, scores, strict=True):
        assert score == pytest.approx(logprob(prompt, beam) / len(beam) ** penalty, abs=1e-3)
    for completion in output.outputs:
        ended = completion.token_ids[-1] in llm.core.model_config.eos_token_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert penalty != 0.0 or output.outputs[0].text == "81"
    assert not llm.core.has_work()


def test_a_beam_search_is_as_wide_as_n_and_may_be_too_wide(llm, make_llm):
    params = SamplingParams(use_beam_search=True, n=3, max_tokens=8)
    same = replace(params, beam_width=3)
    beams = [llm.generate("Enter", asked, use_tqdm=False)[0] for asked in (params, same)]
    assert answers_of(beams[0]) == answers_of(beams[1])
    narrow = make_llm(max_num_seqs=2)
    with pytest.raises(ValueError, match=r"beam_width is 3; it must be at most 2.*max_num_seqs"):
        narrow.generate(["Exit", "Enter"], [GREEDY, params], use_tqdm=False)
    assert not narrow.core.has_work()
    check_integrity(narrow.core.scheduler)
    assert len(narrow.generate("Enter", replace(SAMPLED, n=5), use_tqdm=False)[0].outputs) == 5  # these take turns


def test_a_stop_string_in_one_sample_leaves_the_others(llm):
    free = llm.generate(OPENING, SAMPLED, use_tqdm=False)[0].outputs
    text = free[2].text
    stop = next(part for i in range(4, 40) if sum((part := text[i : i + 6]) in other.text for other in free) == 1)
    cut = llm.generate(OPENING, replace(SAMPLED, stop=stop), use_tqdm=False)[0].outputs
    assert (cut[2].text, cut[2].finish_reason, cut[2].stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert len(cut[2].token_ids) < len(free[2].token_ids)
    assert cut[:2] + cut[3:] == free[:2] + free[3:]
    (common,) = llm.generate(OPENING, replace(SAMPLED, stop="e"), use_tqdm=False)
    assert {completion.stop_reason for completion in common.outputs} == {"e"}
    assert not llm.core.has_work()


def test_what_choices_tell_the_engine(llm):
    """A stop string that is found here ends a sample there, and the whole request where it was the last."""
    hello, there = llm.tokenizer.encode("hello"), llm.tokenizer.encode(" there")
    aborted, params = [], SamplingParams(n=2, stop="hello", max_tokens=50)

    def push(index, ids, **more):
        return choices.push(EngineOutput("a", ids, index=index, **more), lambda *what: aborted.append(what))

    choices = Choices("a", None, [5], params, llm.tokenizer)
    assert (push(0, there, num_cached_tokens=3), choices.metrics.num_cached_tokens) == (" there", 3)
    first = choices.metrics.first_token_time
    assert push(1, hello) == "" and aborted == [("a", 1, "stop")]
    assert push(1, there) is None and push(1, there, finish_reason="length") is None
    assert not choices.finished and choices.num_generated == len(hello + there)
    assert push(0, there, finish_reason="length", finished=True) == " there"
    assert choices.finished and aborted == [("a", 1, "stop")]  # the engine knows
    assert choices.metrics.first_token_time == first <= choices.metrics.finished_time

    choices, aborted[:] = Choices("a", None, [5], params, llm.tokenizer), []
    push(0, there, finish_reason="length")
    assert push(1, hello) == "" and choices.finished and aborted == [("a", None, "stop")]

    choices = Choices("a", None, [5], params, llm.tokenizer)
    with pytest.raises(AssertionError, match="without all of its answers"):
        push(0, there, finish_reason="length", finished=True)


def test_the_client_in_process_has_the_methods_of_the_one_across_processes(llm):
    client, params = llm.client, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    streams = [client.add_request(EngineCoreRequest(f"client-{i}", [5 + i, 80, 300], params)) for i in range(3)]
    client.abort("client-1")
    outputs = []
    for stream in (streams[2], streams[0]):  # whoever waits runs the engine for all
        tokens, finished = [], False
        while not finished:
            output = client.get_output(stream)
            tokens, finished = tokens + output.token_ids, output.finished
        outputs.append(tokens)
    prompts = [[7, 80, 300], [5, 80, 300]]
    assert outputs == [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with pytest.raises(queue.Empty):
        client.get_output(streams[1])
    assert client.utility("metrics")[0]["num_requests_running"] == 0
    with pytest.raises(ValueError, match="no utility 'close'"):
        client.utility("close")
    with pytest.raises(ValueError, match="prompt"):
        client.add_request(EngineCoreRequest("client-3", [], params))
    assert not client.streams


def test_chat_takes_what_a_template_is_rendered_with_and_nothing_else(llm):
    question = [{"role": "user", "content": "What is 23 + 58?"}]
    half = [*question, {"role": "assistant", "content": "8"}]
    ask = {"sampling_params": GREEDY, "use_tqdm": False}
    whole = llm.chat(question, **ask, chat_template_kwargs={"enable_thinking": False})[0]
    rest = llm.chat(half, **ask, add_generation_prompt=False, continue_final_message=True)[0]
    assert (whole.outputs[0].text, rest.outputs[0].text) == ("81", "1")
    with pytest.raises(TypeError, match="sampling_parms"):
        llm.chat(question, sampling_parms=GREEDY)
    for name in ("self", "messages", "add_generation_prompt", "a b"):
        with pytest.raises(ValueError, match=name):
            llm.chat(question, chat_template_kwargs={name: 1})


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["moves", *(pytest.param(place, marks=pytest.mark.full) for place in ("schedule", "update", "submit"))]
)
def test_ctrl_c_anywhere_in_a_step_leaves_books_that_are_right(make_llm, monkeypatch, place):
    """The blocks of the first prompt are in host memory, so that the step which is interrupted brings them back."""
    sizes = {"block_size": 16, "num_gpu_blocks_override": 24, "max_model_len": 256, "swap_space": 0.05, "threads": 1}
    first = [5 + i * i % 900 for i in range(160)]
    with make_llm(**sizes) as llm:
        core, params = llm.core, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        answer = llm.generate([first], params, use_tqdm=False)[0].outputs[0].token_ids
        for k in range(6):
            llm.generate([[7 + i * (k + 3) % 900 for i in range(200)]], params, use_tqdm=False)
        owners = {"moves": core.executor.worker.ops, "schedule": core.scheduler, "update": core.scheduler}
        owner = owners.get(place, core.executor)
        name = {"moves": "swap_blocks"}.get(place, place)
        method = getattr(owner, name)

        def interrupted(*args):
            monkeypatch.setattr(owner, name, method)
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does
            return method(*args)

        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([first], params, use_tqdm=False)
        check_integrity(core.scheduler)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not core.has_work() and core.scheduler.blocks.num_free == 24
        assert llm.generate([first], params, use_tqdm=False)[0].outputs[0].token_ids == answer


def test_what_has_come_before_ctrl_c_is_told_by_the_next_step(make_llm, monkeypatch):
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with make_llm(threads=1) as llm:
        core, tokens = llm.core, []
        core.add(EngineCoreRequest("a", [5, 6, 7], greedy))
        update, wanted = core.scheduler.update, llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0]

        def interrupted(*args):
            monkeypatch.setattr(core.scheduler, "update", update)
            os.kill(os.getpid(), signal.SIGINT)
            return update(*args)

        core.add(EngineCoreRequest("b", [5, 6, 7], greedy))
        monkeypatch.setattr(core.scheduler, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            while True:
                core.step()
        while core.has_work():
            tokens += [id for output in core.step() if output.request_id == "b" for id in output.token_ids]
        assert tokens == wanted.token_ids


def test_whoever_is_ended_while_idle_workers_are_replaced_is_told(make_llm, monkeypatch):
    """The idle look at the workers may find them dead with a step in flight, and its request guilty of that."""
    with make_llm(threads=1) as llm:
        core, ended = llm.core, EngineOutput("a", [], "error", error="it has killed them", finished=True)

        def dead() -> None:
            raise WorkerError("rank 0 has died")

        monkeypatch.setattr(core.executor, "check", dead)
        monkeypatch.setattr(core.workers, "restart", lambda error: None)
        monkeypatch.setattr(core.scheduler, "start_over", lambda lost, cause: [ended])
        core.workers.check()
        assert core.has_work() and [*core.tell()] == [ended] and not core.has_work()
