"""The library's face for scripts: prompts of all forms, and what vLLM's users know `LLM` and `LLMEngine` by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import SamplingParams

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
        cached.append(llm.generate(prompt, GREEDY, use_tqdm=False)[0].metrics.num_cached_tokens)
    assert cached[1] > 0 and [cached[i] for i in (0, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (5, "prompts is 5; it must be a prompt or a list"),
        (None, "prompts is None"),
        (["a", 5], "a prompt is 5; it must be a string, token ids or a dict of these"),
        ([[5, True]], "a prompt is .5, True."),
        ([{}], "a prompt is {}; it must have prompt or prompt_token_ids"),
        ([{"prompt": 5}], "a prompt's text is 5; it must be a string"),
        ([{"prompt": "a", "cache_salt": 5}], "a prompt's cache_salt is 5; it must be a string"),
        ([{"promt": "a"}], "a prompt has the key 'promt'; known: prompt, prompt_token_ids, cache_salt"),
        ([{"prompt_token_ids": "a"}], "a prompt is 'a'; it must be"),
        ([{"prompt_token_ids": []}], "the prompt is empty"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm, bad, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(bad, GREEDY, use_tqdm=False)
    assert not llm.core.has_work()


def test_arguments_of_the_wrong_type_are_refused_by_name(llm):
    for params, message in (
        ({"temperature": 0}, "sampling_params is {'temperature': 0}; it must be SamplingParams"),
        ([GREEDY, None], "sampling_params is None; it must be SamplingParams"),
        ([GREEDY], "sampling_params has 1 entries for 2 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(TypeError, match="lora_request"):
        llm.generate("a", GREEDY, lora_request=None)


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


def test_chat_takes_another_template(llm):
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ 'A:' if add_generation_prompt }}{{ mood }}"
    for opening, text in ((True, "What is 23 + 58?|A:glad"), (False, "What is 23 + 58?|glad")):
        (output,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template=template, add_generation_prompt=opening,
                             chat_template_kwargs={"mood": "glad"})  # fmt: skip
        assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    own = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].prompt_token_ids
    assert llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template=None)[0].prompt_token_ids == own
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    both = llm.chat([QUESTION, parts], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in both] == [own, own]
    tools = [{"type": "function", "function": {"name": "add"}}]
    named = llm.chat(QUESTION, GREEDY, use_tqdm=False, tools=tools, chat_template="{{ tools[0].function.name }}")
    assert named[0].prompt_token_ids == llm.tokenizer.encode("add", add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        (QUESTION, "{% if %}", "chat_template does not compile: "),
        (QUESTION, 5, "chat_template is 5; it must be a template's source"),
        (QUESTION, "{{ raise_exception('no') }}", "chat template: no"),
        ("hello", None, "messages is 'hello'; it must be a conversation"),
        ([[]], None, "messages: it must be a list of at least one message"),
        (["hello"], None, "messages: it must be a list"),
        ([{"content": "a"}], None, "messages: message 0 must be an object with a role"),
        ([{"role": "user", "content": 5}], None, "messages: message 0 must have a content"),
    ],
)
def test_a_bad_conversation_is_refused_by_name(llm, messages, template, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
