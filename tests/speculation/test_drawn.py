"""Requests that are drawn at random get the same tokens with drafts and without, whoever makes the drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from config import DEMO
from engine import LLM, SamplingParams
from sampling_params import LoRARequest
from scheduling.drafts import Drafting
from test_speculation import PERSON, TAKEN, assert_equal

METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "mtp": {"method": "mtp", "num_speculative_tokens": 4},
}
ENGINE = {
    "dtype": "float32", "threads": 1, "block_size": 8, "max_num_seqs": 12, "max_model_len": 300, "enable_lora": True,
    "max_num_batched_tokens": 96, "num_gpu_blocks_override": 60, "schedule_conservativeness": 0.0,
}  # fmt: skip
FIELDS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.0, 0.5, 1.0], "top_k": [-1, 3, 40], "top_p": [1.0, 0.8], "min_p": [0.0, 0.1],
    "repetition_penalty": [1.0, 1.2], "frequency_penalty": [0.0, 0.5], "presence_penalty": [0.0, -0.5, 1.0],
    "logit_bias": [None, {260: -4.0, 300: 3.0}], "min_tokens": [0, 10], "n": [1, 2], "logprobs": [None, 2],
    "prompt_logprobs": [None, 0], "stop": [None, ["the"]], "stop_token_ids": [None, [*range(30, 300, 9)]],
    "bad_words": [None, ["to be"]], "ignore_eos": [False, True],
    "structured_outputs": [None, None, {"json": PERSON}, {"regex": "[a-z ]{9,50}"}, {"choice": ["to be", "or not"]}],
}  # fmt: skip
TEXTS = ("KING: to be, or not to be.\n" * 2 + "KING: to", "What is 23 + 58?", "Repeat lovely 9 times.", "1 2 3 1 2 3 1")


def drawn(seed: int) -> tuple[str, SamplingParams, LoRARequest | None]:
    """A request: a prompt, up to six fields that are not at their defaults, and maybe an adapter."""
    rng = random.Random(seed)
    names = ["temperature", *rng.sample(list(FIELDS)[1:], rng.randint(0, 5))]
    fields = {name: rng.choice(FIELDS[name]) for name in names}
    if fields.get("structured_outputs"):  # its end is the grammar's
        fields = {name: value for name, value in fields.items() if name not in ("min_tokens", "ignore_eos")}
    adapter = LoRARequest("products", 1, f"{DEMO}/adapters/products") if rng.random() < 0.4 else None
    return rng.choice(TEXTS), SamplingParams(max_tokens=rng.randint(16, 64), seed=seed, **fields), adapter


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "int4", "int8"])
def test_drawn_requests_are_answered_as_without_drafts(
    quantization: str | None, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other and with preemptions. Products of int8 round their inputs, so that the last bit of a sum may
    become a 127th: then 2 of 42 answers differ without drafts, too, in steps of other requests."""
    monkeypatch.setattr(Drafting, "price", lambda drafting, rows: 0.0)
    monkeypatch.setattr(Drafting, "_seconds", lambda drafting, rows, column: float(column == 1))
    monkeypatch.setattr("text.grammar.PATIENCE", 60.0)
    texts, params, adapters = zip(*map(drawn, range(40)), strict=True)

    def answers(**options: Any) -> tuple[list[Any], dict[str, float]]:
        llm = make_llm(**ENGINE, **options, **({"quantization": quantization} if quantization else {}))
        outputs = llm.generate([*texts], [*params], use_tqdm=False, lora_request=[*adapters])
        counters = llm.client.core.scheduler.counters
        llm.client.core.close()
        return outputs, counters

    plain, _ = answers()
    for options in METHODS.values():
        outputs, counters = answers(speculative_config=json.dumps(options))
        if quantization == "int8":
            pairs = [
                (o.outputs[i], p.outputs[i]) for o, p in zip(outputs, plain, strict=True) for i in range(len(p.outputs))
            ]
            assert sum(one.token_ids != other.token_ids for one, other in pairs) <= len(pairs) / 8
        else:
            assert_equal(outputs, plain)
        assert counters[TAKEN] > 5 and counters["num_preemptions_total"] > 0
