"""The library's face for scripts: prompts of all forms, and what vLLM's users know `LLM` and `LLMEngine` by."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import engine
from config import DEMO, EngineConfig
from engine import LLM, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from outputs import cosine
from plan import EngineOutput, StepResult
from processes.client import EngineDeadError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is 23 + 58?"}]


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_may_be_a_dict_and_lists_may_be_mixed(llm):
    ids = llm.tokenizer.encode("To be")
    plain = llm.generate("To be", GREEDY, use_tqdm=False)
    forms = ["To be", ids, {"prompt": "To be"}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "any"}]
    mixed = llm.generate(forms, GREEDY, use_tqdm=False)
    assert tokens(mixed) == tokens(plain) * 5
    assert [output.prompt for output in mixed] == ["To be", None, "To be", None, "any"]
    assert all(output.prompt_token_ids == ids for output in mixed)
    assert tokens(llm.generate({"prompt": "To be"}, GREEDY, use_tqdm=False)) == tokens(plain)
    assert tokens(llm.generate(tuple(forms), GREEDY, use_tqdm=False)) == tokens(mixed)
    assert tokens(llm.generate(forms[:2], (GREEDY, replace(GREEDY, max_tokens=2)), use_tqdm=False)) == [
        tokens(plain)[0], tokens(plain)[0][:2]]  # fmt: skip


def test_prompts_of_another_salt_do_not_share_cached_prefixes(make_llm):
    llm, ids = make_llm(block_size=16), list(range(5, 85))
    cached = []
    for salt in ("a", "a", "b", None):
        prompt = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        cached.append(output.num_cached_tokens)
        assert output.num_cached_tokens == output.metrics.num_cached_tokens
    assert cached[1] > 0 and [cached[i] for i in (0, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize(
    "bad", [None, [[5, True]], [{"prompt_token_ids": "a"}], {"prompt_token_ids": [2**31]}, [["a"]], [[5], []]]
)
def test_what_is_no_prompt_is_refused(llm, bad):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(bad, GREEDY, use_tqdm=False)
    assert not llm.core.has_work()


def test_arguments_of_the_wrong_type_are_refused(llm):
    for fields in ({"sampling_params": [GREEDY, None]}, {"lora_request": [None]}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            llm.generate(["a", "b"], use_tqdm=False, **fields)
    with pytest.raises(TypeError, match="prompt_embeds"):
        llm.generate("a", GREEDY, prompt_embeds=None)


def test_truncate_prompt_tokens_keeps_the_last_ones(llm):
    ids = list(range(5, 1005)) * 2
    for keep, kept in ((3, 3), (1000, 1000), (-1, 1023)):
        params = replace(GREEDY, max_tokens=1, truncate_prompt_tokens=keep)
        (output,) = llm.generate([ids], params, use_tqdm=False)
        assert output.prompt_token_ids == ids[-kept:] and len(output.prompt_token_ids) == kept
        assert tokens([output]) == tokens(llm.generate([ids[-kept:]], replace(GREEDY, max_tokens=1), use_tqdm=False))
    short = llm.generate([[5, 6]], replace(GREEDY, truncate_prompt_tokens=3), use_tqdm=False)[0]
    assert short.prompt_token_ids == [5, 6]
    for keep in (0, 1025):
        with pytest.raises(ValueError, match=rf"truncate_prompt_tokens is {keep}; it must be -1, or from 1 to 1024"):
            llm.generate([ids], replace(GREEDY, truncate_prompt_tokens=keep), use_tqdm=False)


def test_the_templates_own_end_of_a_turn_ends_a_chat(llm, monkeypatch):
    other = next(id for id in sorted(llm.tokenizer.special_ids) if id > 1)  # 0 and 1 are the model's own ends
    template = "{% for m in messages %}{{ m.content }}" + llm.tokenizer.token(other) + "\n{% endfor %}"
    ends, past_ends, calls = replace(GREEDY, ignore_eos=False), replace(GREEDY, ignore_eos=True), []
    monkeypatch.setattr(llm, "generate", lambda ids, params, use_tqdm, lora: calls.append(params) or [])
    for params in (ends, None, (past_ends, replace(ends, stop_token_ids=[9]))):
        llm.chat([QUESTION, QUESTION], params, chat_template=template)
    llm.chat(QUESTION, ends)
    assert [calls[0].stop_token_ids, calls[1].stop_token_ids] == [(other,), (other,)]
    assert [p.stop_token_ids for p in calls[2]] == [(), (9, other)] and calls[3] is ends


def test_chat_takes_another_template(llm):
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ 'A:' if add_generation_prompt }}{{ mood }}"
    for opening, text in ((True, "What is 23 + 58?|A:glad"), (False, "What is 23 + 58?|glad")):
        (output,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template=template, add_generation_prompt=opening,
                             chat_template_kwargs={"mood": "glad"})  # fmt: skip
        assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    ids = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].prompt_token_ids
    assert llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template=None)[0].prompt_token_ids == ids
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    both = llm.chat([QUESTION, parts], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in both] == [ids, ids]
    tools = [{"type": "function", "function": {"name": "add"}}]
    named = llm.chat(QUESTION, GREEDY, use_tqdm=False, tools=tools, chat_template="{{ tools[0].function.name }}")
    assert named[0].prompt_token_ids == llm.tokenizer.encode("add", add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        (QUESTION, "{% if %}", "chat_template does not compile: "),
        (QUESTION, 5, "chat_template is 5; it must be a template's source"),
        (QUESTION, "{{ raise_exception('no') }}", "chat template: no"),
        ([{"role": "usr", "content": "a"}], None, "message 0 has the role 'usr'; .* user, assistant, tool, function$"),
        ([{"role": "owl", "content": "a"}], "{{ messages[0].role == 'bat' }}", "it must be one of .*, function, bat$"),
        ([[]], None, "messages: it must be a list of at least one message"),
    ],
)
def test_a_bad_conversation_is_refused_by_name(llm, messages, template, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)


def test_texts_are_scored_in_pairs_or_one_against_all(make_llm):
    questions, answers = ["What is the capital of France?", "And of Germany?"], ["It is Paris.", "It is Berlin."]
    with make_llm(task="embed", max_model_len=128) as embedder:
        left, right = ([one.outputs.embedding for one in embedder.embed(texts)] for texts in (questions, answers))
        for first, pairs in ((questions, [(0, 0), (1, 1)]), (questions[0], [(0, 0), (0, 1)])):
            scores = [output.outputs.score for output in embedder.score(first, answers, use_tqdm=False)]
            assert scores == pytest.approx([cosine(left[i], right[j]) for i, j in pairs], abs=1e-4)
        (encoded,) = embedder.encode(answers[0], pooling_task="embed", use_tqdm=False)
        assert list(encoded.outputs.data) == pytest.approx(right[0], abs=1e-5)
        with pytest.raises(ValueError, match=r"classify.* this one's is 'embed'"):
            embedder.encode(answers[0], pooling_task="classify", use_tqdm=False)


def test_a_text_is_a_conversation_whose_answer_may_fill_the_context(llm, monkeypatch):
    text = llm.chat(QUESTION[0]["content"], GREEDY, use_tqdm=False)[0]
    assert text.prompt_token_ids == llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].prompt_token_ids
    monkeypatch.setattr(llm, "generate", lambda ids, params, *rest: params)
    assert llm.chat("Hi").max_tokens is None
    monkeypatch.setitem(llm.client.facts, "default_sampling", {"max_tokens": 5})
    assert llm.chat("Hi").max_tokens == 5


def test_generate_says_once_that_its_default_has_cut_an_answer(llm, monkeypatch, capfd):
    lines: list[str] = []
    monkeypatch.setattr(engine, "warn_once", lines.append)
    for params in (SamplingParams(ignore_eos=True, max_tokens=17), SamplingParams(ignore_eos=True), GREEDY):
        llm.generate(["To be", "or"], params, use_tqdm=False)
    (line,) = {*lines}
    assert line.startswith("an answer ended at 16 tokens, the default of `SamplingParams.max_tokens`")
    capfd.readouterr()
    assert llm.generate([]) == [] and capfd.readouterr().err == ""  # not even a bar


# --- the face ---------------------------------------------------------------------------------------------------------


def test_the_options_show_to_editors_and_an_engine_takes_them_as_a_record(llm):
    assert inspect.signature(LLM) == inspect.signature(EngineConfig).replace(return_annotation=inspect.Signature.empty)
    made = LLM.from_engine_args(EngineArgs(DEMO, dtype="float32", device="cpu", max_num_seqs=4, block_size=16))
    assert made.config.max_num_seqs == 4 and made.core.facts["block_size"] == 16
    outputs = [each.generate("To be", GREEDY, use_tqdm=False) for each in (made, llm)]
    assert tokens(outputs[0]) == tokens(outputs[1])
    with pytest.raises(TypeError, match="positional"):
        LLM(DEMO, "float32")
    with pytest.raises(TypeError, match="positional"):
        EngineArgs(DEMO, "float32")


def test_metrics_cache_and_calls_of_the_worker(make_llm):
    llm = make_llm(block_size=16)
    for _ in range(2):
        llm.generate([[5] * 40], GREEDY, use_tqdm=False)
    metrics = llm.get_metrics()
    assert metrics["generation_tokens_total"] == 12 and metrics["prefix_cache_hits_total"] > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate([[5] * 40], GREEDY, use_tqdm=False)[0].metrics.num_cached_tokens == 0
    assert llm.collective_rpc("block_bytes") == [llm.core.executor.worker.block_bytes()]
    assert llm.get_tokenizer().encode("To be") == llm.tokenizer.encode("To be")


@pytest.mark.parametrize(
    "name", ["adapters.load", "load_weights", "sleep", "step", "_restore", "nonsense", "os:getpid", ""]
)
def test_by_its_name_a_method_of_the_worker_is_called_only_if_it_changes_nothing(llm, monkeypatch, name):
    monkeypatch.setattr(llm.core.executor, "worker", None)  # nobody asks it anything
    for call in (llm.collective_rpc, partial(llm.core.utility, "collective_rpc")):
        with pytest.raises(ValueError, match=f"method is '{name}'; by its name .* block_bytes or facts alone"):
            call(name)


def test_generate_takes_no_id_of_a_request_that_the_caller_has_added(make_llm):
    llm = make_llm()
    for name in ("0", "2"):
        llm.llm_engine.add_request(name, "a", GREEDY)
    assert [output.request_id for output in llm.generate(["b", "c"], GREEDY, use_tqdm=False)] == ["1", "3"]


def test_a_closed_llm_has_let_go_of_its_memory_and_says_that_it_is_closed(make_llm):
    with make_llm(num_gpu_blocks_override=16) as llm:
        assert llm.generate("a", GREEDY, use_tqdm=False)
        worker = weakref.ref(llm.core.executor.worker)
        llm.llm_engine.add_request("left", "a", GREEDY)
    assert worker() is None  # `close` sees to it, and not a collection some time later
    for call in (
        lambda: llm.generate("a", GREEDY, use_tqdm=False),
        lambda: llm.generate([], GREEDY),
        lambda: llm.chat(QUESTION, GREEDY),
        lambda: llm.beam_search("a", BeamSearchParams(2, 4)),
        llm.get_tokenizer, llm.get_default_sampling_params, llm.get_metrics, llm.reset_prefix_cache,
        lambda: llm.collective_rpc("block_bytes"),
        lambda: llm.llm_engine.add_request("b", "a", GREEDY),
        llm.llm_engine.step,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="this engine is closed"):
            call()
    assert not llm.llm_engine.has_unfinished_requests()
    llm.close()


def test_a_folder_without_a_tokenizer_serves_token_ids(llm, tmp_path):
    for path in Path(DEMO).iterdir():
        if path.is_file() and "token" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    fields = {"model": str(tmp_path), "dtype": "float32", "device": "cpu"}
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        LLM(**fields)
    bare, ids = LLM(**fields, skip_tokenizer_init=True), llm.tokenizer.encode("To be")
    (output,) = bare.generate([{"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert tokens([output]) == tokens(llm.generate([ids], GREEDY, use_tqdm=False)) and output.outputs[0].text == ""
    (beams,) = bare.beam_search([ids], BeamSearchParams(2, 4))
    assert [(len(beam.tokens), beam.text) for beam in beams.sequences] == [(len(ids) + 4, "")] * 2
    end = tokens([output])[0][2]
    (ended,) = bare.generate([ids], replace(GREEDY, stop_token_ids=[end]), use_tqdm=False)
    assert ended.outputs[0].stop_reason == end
    for call, message in (
        (lambda: bare.generate("a", GREEDY), "a prompt that is text takes a tokenizer, and this engine has none"),
        (lambda: bare.generate({"prompt": "a"}, GREEDY), "a prompt that is text"),
        (lambda: bare.chat(QUESTION, GREEDY), "a conversation takes a tokenizer"),
        (lambda: bare.chat(QUESTION, GREEDY, chat_template="a"), "a conversation takes a tokenizer"),
        (lambda: bare.generate([ids], replace(GREEDY, stop="a")), r"stop is .'a',.; without a tokenizer"),
        (lambda: bare.generate([ids], replace(GREEDY, bad_words=("a",))), r"bad_words is .'a',.; without a tokenizer"),
        (bare.get_tokenizer, "this engine has no tokenizer .skip_tokenizer_init."),
        (lambda: bare.tokenizer.decode([5]), "the text of tokens takes a tokenizer"),
        (lambda: bare.tokenizer.longest_token, "a prompt that is text takes a tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert bare.tokenizer.token(5) == "" and not bare.tokenizer.has_chat_template and not bare.core.has_work()


# --- beam search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.0, -2.0])
def test_beam_search_has_vllms_records(llm, penalty):
    prompt = llm.tokenizer.encode(llm.tokenizer.render(QUESTION), add_special_tokens=False)
    fields = {"max_tokens": 8, "length_penalty": penalty}
    beams = SamplingParams(use_beam_search=True, n=3, **fields)
    params = BeamSearchParams(beam_width=3, **fields)
    (wanted,) = llm.generate([prompt], beams, use_tqdm=False)
    outputs = llm.beam_search([prompt, {"prompt": "To be"}], params)
    assert len(outputs) == 2 and [len(output.sequences) for output in outputs] == [3, 3]
    kept = llm.beam_search([prompt], replace(params, include_stop_str_in_output=True))[0].sequences
    eos = llm.core.model_config.eos_token_ids
    assert any(beam.finish_reason == "stop" for beam in outputs[0].sequences)
    for beam, whole, answer in zip(outputs[0].sequences, kept, wanted.outputs, strict=True):
        ended = answer.finish_reason == "stop"
        assert whole.tokens == prompt + answer.token_ids
        assert beam.tokens == (whole.tokens[:-1] if ended else whole.tokens)
        assert beam.text == llm.tokenizer.decode(beam.tokens, skip_special_tokens=False)
        assert beam.text.startswith(llm.tokenizer.decode(prompt, skip_special_tokens=False))
        assert (beam.finish_reason, beam.stop_reason in eos) == (answer.finish_reason, ended)
        score = beam.cum_logprob / len(answer.token_ids) ** penalty
        # The last bits of a logit depend on what else is in the batch.
        assert beam.cum_logprob == pytest.approx(whole.cum_logprob, rel=1e-5)
        assert score == pytest.approx(answer.cumulative_logprob, rel=1e-5)


def test_a_bad_beam_search_is_refused_by_name(llm):
    for fields, message in (
        ({"beam_width": 0}, "n is 0"),
        ({"beam_width": None}, "beam_width is None"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 0.5}, "temperature is 0.5; with use_beam_search it must be 0 or 1"),
    ):
        with pytest.raises(ValueError, match=message):
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields))
    with pytest.raises(ValueError, match=r"params is SamplingParams.*; it must be BeamSearchParams"):
        llm.beam_search("a", GREEDY)
    assert llm.beam_search([], BeamSearchParams(2, 4)) == []


def test_a_beam_search_that_the_engine_gives_up_says_why(llm, monkeypatch):
    monkeypatch.setattr(llm.core.executor.worker, "step", lambda plan: StepResult(plan.step, [], error="no luck"))
    with pytest.raises(RuntimeError, match="no luck"):
        llm.beam_search("a", BeamSearchParams(2, 4))
    assert not llm.core.has_work()


# --- the loop in the caller's hands -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_of_mine():
    engine = LLMEngine.from_engine_args(EngineArgs(DEMO, dtype="float32", device="cpu", block_size=16))
    yield engine
    engine.close()


def run(engine: LLMEngine) -> dict[str, list]:
    """All that `step` returns of each request."""
    texts: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts.setdefault(output.request_id, []).append(output)
    return texts


def test_an_engine_tells_all_that_a_request_has_so_far(llm, engine_of_mine):
    engine = engine_of_mine
    engine.add_request("a", "To be", GREEDY)
    engine.add_request("b", {"prompt": "Enter"}, replace(GREEDY, max_tokens=3, n=2, temperature=0.9, seed=5))
    assert engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 2
    outputs = run(engine)
    assert engine.step() == [] and engine.get_num_unfinished_requests() == 0
    (wanted,) = llm.generate("To be", GREEDY, use_tqdm=False)
    grown = [output.outputs[0].token_ids for output in outputs["a"]]
    assert grown == [wanted.outputs[0].token_ids[: i + 1] for i in range(6)]
    assert [output.finished for output in outputs["a"]] == [False] * 5 + [True]
    assert outputs["a"][-1].outputs == wanted.outputs and outputs["a"][-1].prompt == "To be"
    texts = [output.outputs[0].text for output in outputs["a"]]
    assert all(wanted.outputs[0].text.startswith(text) for text in texts) and texts[0] != texts[-1]
    assert [len(answer.token_ids) for answer in outputs["b"][-1].outputs] == [3, 3]
    assert outputs["a"][0].metrics.finished_time is None and outputs["a"][-1].metrics.finished_time is not None


def test_what_an_engine_gave_up_is_told_no_more(engine_of_mine, monkeypatch):
    engine = LLMEngine(engine_of_mine.config)
    monkeypatch.setattr(engine.client, "get_output", lambda stream, timeout=None: stream.get(0))
    for name in "abc":
        engine.add_request(name, "To be", GREEDY)
    ended = EngineOutput("b", [5], "stop", finished=True)
    for news in (EngineOutput("a", [5]), ended, EngineDeadError("the engine process has ended")):
        engine.stream.put(news)
    with pytest.raises(EngineDeadError):
        engine.step()
    assert list(run(engine)) == ["b"] and not engine.has_unfinished_requests()
    for name, give_up in (("d", lambda: engine.abort_request("d")), ("e", engine.close)):
        engine.add_request(name, "To be", GREEDY)
        engine._follow(EngineOutput(name, [5]))  # and Ctrl-C keeps `step` from returning it
        give_up()
        assert not engine.has_unfinished_requests()


def test_an_engine_ends_at_a_stop_string_and_lets_requests_go(llm, engine_of_mine):
    engine, params = engine_of_mine, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    free = llm.generate("ROMEO:\n", replace(params, max_tokens=40), use_tqdm=False)[0].outputs[0].text
    engine.add_request("stopped", "ROMEO:\n", replace(params, stop=free[12:17]))
    for name in ("gone", "one of two", "two of two"):
        engine.add_request(name, "ROMEO:\n", params)
    with pytest.raises(ValueError, match="request id 'gone' is in use"):
        engine.add_request("gone", "a", params)
    rest = engine.step() + engine.step()
    assert {output.request_id for output in rest} == {"stopped", "gone", "one of two", "two of two"}
    engine.abort_request("gone")
    engine.abort_request(["one of two", "two of two", "unknown"])
    rest = run(engine)
    assert set(rest) == {"stopped"}
    last = rest["stopped"][-1].outputs[0]
    assert (last.text, last.finish_reason) == (free[: free.index(free[12:17])], "stop")
    engine.step()
    assert not engine.client.core.has_work() and engine.client.core.metrics()["num_requests_running"] == 0
    engine.add_request("gone", "a", GREEDY)  # the name is free again
    assert run(engine)["gone"][-1].finished


def test_an_engine_refuses_by_name(engine_of_mine):
    for args, name in (
        ((5, "a", GREEDY), "request_id"),
        (("a", 5, GREEDY), "prompt"),
        (("a", [10**6], GREEDY), "prompt"),
        (("a", "a", None), "sampling_params"),
        (("a", "a", GREEDY, 1), "priority"),
        (("a", "a", GREEDY, "high"), "priority"),
    ):
        with pytest.raises(ValueError, match=name):
            engine_of_mine.add_request(*args)
    assert not engine_of_mine.has_unfinished_requests() and not engine_of_mine.client.core.has_work()


def test_an_engine_says_what_it_had_to_give_up(engine_of_mine, monkeypatch):
    engine_of_mine.add_request("a", "a", GREEDY)
    with monkeypatch.context() as patch:
        worker = engine_of_mine.client.core.executor.worker
        patch.setattr(worker, "step", lambda plan: StepResult(plan.step, [], error="no luck"))
        (output,) = run(engine_of_mine)["a"]
    assert output.finished and "no luck" in output.error and output.outputs[0].finish_reason == "error"
