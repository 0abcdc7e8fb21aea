"""The messages of errors that users quote, whole. Other tests look for the field's name alone."""

from __future__ import annotations

from typing import Any

import pytest

from config import DEMO
from engine import LLM, LoRARequest, SamplingParams

SHORT = SamplingParams(max_tokens=6)
PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature is -1; it must be a number from 0.0 to 100.0"),
    ({"top_p": 0}, "top_p is 0; it must be above 0, in float32, and at most 1"),
    ({"n": 0}, "n is 0; it must be a whole number from 1 to 65536"),
    ({"stop": ""}, "stop has ''; each stop must be a string of at least one character"),
    ({"min_tokens": 20}, "min_tokens is 20; it must be at most max_tokens, 16"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature is 0.5; with use_beam_search it must be 0 or 1"),
]
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seq": 1}, "EngineConfig has no max_num_seq; the nearest is max_num_seqs"),
    ({"block_size": 0}, "block_size is 0; it must be at least 1 and at most 4096"),
    ({"max_model_len": 4096}, "max_model_len is 4096; the model was made for at most 1024"),
    ({"max_num_batched_tokens": 8}, "max_num_batched_tokens is 8; it must be at least max_num_seqs, 256"),
    ({"preemption_mode": "swap", "swap_space": 0.0}, "swap_space is 0.0 GiB; one KV block takes 196608 bytes"),
    ({"scheduler_delay_factor": 0.5}, "scheduler_delay_factor is 0.5; with chunked prefill it must be 0"),
    (
        {"num_gpu_blocks_override": 2, "max_model_len": 1000},
        "max_model_len is 1000; the KV pool of 2 blocks of 64 holds 128 tokens: lower max_model_len or give the pool "
        "more room",
    ),
    (
        {"model": "/nowhere"},
        "there is no folder /nowhere; --model takes a folder in Hugging Face layout, a GGUF file, or an id on the hub, "
        "like Qwen/Qwen3-0.6B",
    ),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        "max_num_batched_tokens is 512; without chunked prefill it must be at least max_model_len, 1024",
    ),
    (
        {"batch_invariant": True, "tensor_parallel_size": 2},
        "tensor_parallel_size is 2; with batch_invariant, which a sum over ranks is not, it must be 1",
    ),
]
PROMPTS: list[tuple[Any, str]] = [
    (5, "prompts is 5; it must be a prompt or a list of prompts"),
    ([{"prompt": 5}], "a prompt's text is 5; it must be a string"),
    (["a", 5], "a prompt is 5; it must be a string, token ids or a dict of these"),
    ([{}], "a prompt is {}; it must have prompt or prompt_token_ids"),
    ([{"promt": "a"}], "a prompt has the key 'promt'; known: prompt, prompt_token_ids, cache_salt"),
    ([{"prompt": "a", "cache_salt": 5}], "a prompt's cache_salt is 5; it must be a string"),
    ("", "the prompt is empty; it must have at least 1 token"),
    ([[5, -1]], "a prompt has the token id -1; it must be from 0 to 2147483647"),
    ([[5], [99999]], "the prompt has token id 99999; allowed: 0 to 1023"),
    (
        [[5]] * 3 + [[5] * 1024],
        "the prompt has 1024 tokens; at most 1023 leave room for output within the context of 1024",
    ),
]
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {"temperature": 0}}, "sampling_params is {'temperature': 0}; it must be SamplingParams"),
    ({"sampling_params": [SHORT]}, "sampling_params has 1 entries for 2 prompts"),
    ({"sampling_params": SamplingParams(logprobs=21)}, "logprobs is 21; it must be at most max_logprobs, 20"),
    ({"priority": "high"}, "priority is 'high'; it must be a whole number"),
    ({"priority": 1}, "priority is 1; it must be 0, because scheduling_policy is 'auto'"),
    ({"lora_request": "a"}, "lora_request is 'a'; it must be a LoRARequest or None"),
    ({"lora_request": LoRARequest("sql", 1, "/a")}, "lora_request is 'sql'; it needs an engine with enable_lora"),
]
TALKS: list[tuple[Any, str]] = [
    (5, "messages is 5; it must be a text, a list of messages, or a list of such lists"),
    (["a", "b"], "messages is ['a', 'b']; it must be a text, a list of messages, or a list of such lists"),
    ([{"content": "a"}], "messages: message 0 must be an object with a role, which is a string"),
    (
        [{"role": "user", "content": 5}],
        "messages: message 0 must have a content, which is a string or a list of text parts",
    ),
]


def message_of(call: Any, *args: Any, **fields: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **fields)
    return str(caught.value)


@pytest.mark.parametrize(("fields", "message"), PARAMS)
def test_parameters(fields: dict[str, Any], message: str) -> None:
    assert message_of(SamplingParams, **fields) == message


@pytest.mark.parametrize(("fields", "message"), OPTIONS)
def test_options(fields: dict[str, Any], message: str) -> None:
    assert message_of(LLM, **({"model": DEMO, "device": "cpu"} | fields)) == message


def test_requests(llm: LLM) -> None:
    for prompts, message in PROMPTS:
        assert message_of(llm.generate, prompts, SHORT, use_tqdm=False) == message
    for fields, message in CALLS:
        assert message_of(llm.generate, ["a", "b"], use_tqdm=False, **fields) == message
    for messages, message in TALKS:
        assert message_of(llm.chat, messages, SHORT, use_tqdm=False) == message
    assert message_of(llm.llm_engine.add_request, 5, "a", SHORT) == "request_id is 5; it must be a string"
    assert not llm.core.has_work()
