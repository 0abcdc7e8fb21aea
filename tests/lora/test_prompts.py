"""Prompt adapters in the engine. One that has the embeddings of words answers as if these stood in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from adapters import asked, make_adapter, make_prompt
from batch_state import BatchState
from config import DEMO, EngineConfig
from device.dry_run import dry_model
from engine import LLM, SamplingParams
from forked import forked_workers
from integrity import check_integrity
from lora.adapter import WEIGHTS
from lora.stacks import adapter_bytes
from oracle_checks import make_worker
from outputs import RequestOutput
from plan import NewRow, StepPlan
from random_checkpoints import DATA
from test_adapters import FEW, ROOMY, assert_equal, kill_after, refusal
from tokenizer import Tokenizer

ROOM = {"enable_lora": True, "max_prompt_adapter_token": 12, "sanitize_kv": True}
GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=2, ignore_eos=True)
TOKENIZER = Tokenizer(DEMO)
WORDS = [TOKENIZER.encode(text)[:10] for text in ("ROMEO.\nO, what a night! ", "Enter the QUEEN and her SON")]
SPEECH = "Enter the KING, with a torch, and speaks to the SERVANT."
PROMPTS = [TOKENIZER.encode(text) for text in ("What is 23 + 58?", SPEECH)]
ONE = [PROMPTS[0][-1:]]  # a prompt of one token


def given(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in prompts]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two prompt adapters of words, a plain one, and none."""
    place, table = tmp_path_factory.mktemp("prompts"), load_file(Path(DEMO, "model.safetensors"))
    embeddings = table["model.embed_tokens.weight"]
    made: list[Any] = [make_prompt(place / f"p{i}", embeddings[words]) for i, words in enumerate(WORDS)]
    make_adapter(place / "lora", 1)
    return [*made, asked(place / "lora"), None]


@pytest.fixture(scope="module")
def prompted(make_llm: Callable[..., LLM]) -> LLM:
    """Two slots, and rows of the host's memory for three."""
    return make_llm(**ROOMY, **ROOM, max_loras=2, max_cpu_loras=3)


@pytest.fixture(scope="module")
def wanted(adapters: list[Any], make_llm: Callable[..., LLM]) -> Callable[..., list[RequestOutput]]:
    """What each prompt brings with each adapter, where words stand in the prompt."""
    llm = make_llm(**ROOMY, enable_lora=True)

    def of(params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
        whole = [words + ids for words in (*WORDS, [], []) for ids in prompts]
        chosen = [None] * (len(WORDS) * len(prompts)) + [a for a in adapters[2:] for _ in prompts]
        return llm.generate(given(whole), params, use_tqdm=False, lora_request=chosen)

    return of


def answers(llm: LLM, adapters: list[Any], params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """The same with the words in adapters, all in a batch."""
    chosen = [adapter for adapter in adapters for _ in prompts]
    return llm.generate(given(prompts * len(adapters)), params, use_tqdm=False, lora_request=chosen)


def test_the_words_change_answers(wanted: Callable[..., list[RequestOutput]]) -> None:
    """Most of the eight are different, or the others would prove nothing."""
    assert len({str(output.outputs[0].token_ids) for output in wanted(GREEDY)}) >= 6


@pytest.mark.parametrize(
    "fields",
    [
        ROOMY | {"max_loras": 4},
        ROOMY | {"max_loras": 1, "max_num_batched_tokens": 16},
        FEW | {"max_loras": 3, "preemption_mode": "recompute", "swap_space": 0.0},
        FEW | {"max_loras": 3, "preemption_mode": "swap", "swap_space": 0.01},
        pytest.param(ROOMY | {"max_loras": 2, "enable_chunked_prefill": False}, marks=pytest.mark.full),
        pytest.param(ROOMY | {"max_loras": 3, "enable_prefix_caching": False}, marks=pytest.mark.full),
        pytest.param(ROOMY | {"max_loras": 3, "batch_invariant": True}, marks=pytest.mark.full),
        pytest.param(ROOMY | {"max_loras": 3, "backend": "reference"}, marks=pytest.mark.full),
    ],
    ids=["at once", "chunks", "recompute", "swap", "classic order", "no prefix cache", "batch invariant", "reference"],
)
def test_as_if_the_words_stood_in_the_prompt(
    make_llm: Callable[..., LLM], adapters: list[Any], wanted: Callable[..., Any], fields: dict[str, Any]
) -> None:
    llm = make_llm(**ROOM, **fields)
    want = wanted(GREEDY)
    for _ in range(2):  # the second round finds prefixes, each of its own adapter
        got = answers(llm, adapters, GREEDY)
        assert_equal(got, want)
        assert [output.prompt_token_ids for output in got] == PROMPTS * 4
    check_integrity(llm.core.scheduler)
    metrics = llm.core.metrics()
    if fields["num_gpu_blocks_override"] == 400:
        assert (metrics["prefix_cache_hits_total"] > 0) == llm.core.config.enable_prefix_caching
    else:
        assert metrics["num_preemptions_total"] > 0
    assert (metrics["num_swapped_blocks_total"] > 0) == (fields.get("preemption_mode") == "swap")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0, use_beam_search=True, n=3, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, presence_penalty=1.0, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, bad_words=["the", " the", "is 4"], min_tokens=4),
    ],
    ids=["n", "beams", "penalties", "bad words"],
)
def test_samples_and_beams(
    prompted: LLM, adapters: list[Any], wanted: Callable[..., Any], params: SamplingParams
) -> None:
    for prompts in (PROMPTS, ONE):
        assert_equal(answers(prompted, adapters, params, prompts), wanted(params, prompts))


def test_scores_are_of_the_clients_own_tokens(prompted: LLM, adapters: list[Any], wanted: Callable[..., Any]) -> None:
    """Also in chunks, and where the prompt has one token."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for prompts in (PROMPTS, ONE):
        got, want = answers(prompted, adapters, params, prompts), wanted(params, prompts)
        for ours, theirs in zip(got, want, strict=True):
            added = len(theirs.prompt_token_ids) - len(ours.prompt_token_ids)
            first, *scores = ours.prompt_logprobs
            assert first is None and len(ours.prompt_logprobs) == len(ours.prompt_token_ids)
            for here, there in zip(scores, theirs.prompt_logprobs[added + 1 :], strict=True):
                assert here.keys() == there.keys()
                assert all(abs(here[token].logprob - there[token].logprob) < 2e-4 for token in here)


def test_virtual_tokens_are_no_words_to_penalties() -> None:
    """Transformers gives penalties the ids of the prompt, in which PEFT's virtual tokens are not."""
    state = BatchState(2, 16, 4, 4, 9, "cpu")
    state.token_counts.fill_(7)
    row = NewRow(slot=1, token_ids=[-1, -2, 5, 6, 6, 3], blocks=[[0, 1]], penalties=(2.0, 0.0, 0.0), num_prompt=4)
    state.enter(StepPlan(0, new=[row]))
    assert state.token_counts[1].tolist() == [0, 0, 0, 2, 0, 1, 3, 0, 0]


def test_prompt_adapters_take_no_part_in_products() -> None:
    state = BatchState(2, 16, 4, 4, 9, "cpu")
    for i, ids in enumerate(([-9, 5], [5, 6])):
        state.enter(StepPlan(i, new=[NewRow(slot=i, token_ids=ids, blocks=[[i]], adapter=2)]))
    state.apply(reference)
    assert state.adapted.tolist() == [0, 2] and state.adapters.tolist() == [0, 2]


def test_prefixes_are_of_one_adapter_and_counted_with_its_tokens(
    make_llm: Callable[..., LLM], adapters: list[Any]
) -> None:
    llm, long = make_llm(**ROOMY, **ROOM, max_loras=1), [PROMPTS[1]]

    def hits(adapter: Any) -> int:
        return answers(llm, [adapter], GREEDY, long)[0].metrics.num_cached_tokens

    assert [hits(adapter) for adapter in adapters] == [0] * 4
    cached = [hits(adapter) for adapter in adapters]
    lengths = [len(words + PROMPTS[1]) for words in (*WORDS, [], [])]
    assert cached == [min(length // 4 * 4, length - 1) for length in lengths]
    request = llm.core.scheduler.reports.finished.popitem()[1]
    assert request["prompt_tokens"] == len(PROMPTS[1])


def test_virtual_tokens_are_in_the_plan_of_memory() -> None:
    folder, size = DATA / "families" / "qwen3", {}
    for virtual in (0, 7):
        worker = make_worker(folder, enable_lora=True, max_loras=3, max_prompt_adapter_token=virtual)
        model = worker.model
        dry = dry_model(worker.config, model.config, model.ops, model.dtype, 64, model.group.pipeline)
        size[virtual] = adapter_bytes(worker.config, dry)
        assert worker.adapters.pool.nbytes == 3 * size[virtual]
    assert worker.adapters.prompts.shape == (3, 7, 64)
    assert size[7] == size[0] + 4 * 7 * model.config.hidden_size


@pytest.fixture
def forked() -> Iterator[None]:
    with forked_workers():
        yield


def test_new_workers_have_the_prompts(
    make_llm: Callable[..., LLM], adapters: list[Any], wanted: Callable[..., Any], forked: None
) -> None:
    fields = ROOMY | {"distributed_executor_backend": "mp"}
    llm = make_llm(**ROOM, max_loras=2, max_cpu_loras=3, **fields)
    try:
        kill_after(llm.core, [2, 12])
        assert_equal(answers(llm, adapters, GREEDY), wanted(GREEDY))
        assert llm.core.metrics()["num_worker_restarts_total"] == 2
    finally:
        llm.core.close()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_context_that_virtual_tokens_fill(make_llm: Callable[..., LLM], adapters: list[Any]) -> None:
    llm = make_llm(**ROOMY, **ROOM, max_model_len=32)
    params = SamplingParams(temperature=0, max_tokens=30)
    full = answers(llm, [adapters[1]], params, [PROMPTS[0]])
    assert len(full[0].prompt_token_ids) + 10 + len(full[0].outputs[0].token_ids) <= 32
    long = [(PROMPTS[0] * 9)[:22]]
    with pytest.raises(ValueError, match="the prompt has 32 tokens, 10 of them its adapter's; at most 31 leave room"):
        answers(llm, [adapters[1]], params, long)
    assert len(answers(llm, [None], params, long)[0].outputs[0].token_ids) > 0
    with pytest.raises(ValueError, match=r"the prompt is empty; it must have at least 1 token"):
        answers(llm, [adapters[1]], params, [[]])
    with pytest.raises(ValueError, match=r"-1"):
        answers(llm, [adapters[1]], params, [[-1, 5]])


BAD: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], str]] = {
    "NaN": (lambda t: {"prompt_embeddings": t * float("nan")}, "prompt_embeddings has NaN or infinite elements"),
    "rows": (lambda t: {"prompt_embeddings": t[1:].clone()}, r"has shape \[4, 192\]; it must be \[5, 192\]"),
    "integers": (lambda t: {"prompt_embeddings": t.int()}, "has dtype torch.int32; it must be one of"),
    "none": (lambda t: {}, r"has the tensors \[\]; a prompt adapter has 'prompt_embeddings' alone"),
    "another": (lambda t: {"prompt_embeddings": t, "lm_head.weight": t.clone()}, r"has the tensors \['lm_head.weight'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_a_line(prompted: LLM, tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    make_prompt(tmp_path, torch.randn(5, 192))
    save_file(change(torch.randn(5, 192)), tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusal(prompted, tmp_path))


def test_more_virtual_tokens_than_there_is_room_for(
    prompted: LLM, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    make_prompt(tmp_path / "a", torch.randn(13, 192))
    assert "num_virtual_tokens is 13; max_prompt_adapter_token is 12" in refusal(prompted, tmp_path / "a")
    plain = make_llm(**ROOMY, enable_lora=True)
    assert "num_virtual_tokens is 13; max_prompt_adapter_token is 0" in refusal(plain, tmp_path / "a")


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="max_prompt_adapter_token is 4; without enable_lora it must be 0"):
        EngineConfig(max_prompt_adapter_token=4)
    with pytest.raises(ValueError, match="max_prompt_adapter_token is 4; with task 'embed', which makes vectors, it"):
        EngineConfig(max_prompt_adapter_token=4, enable_lora=True, task="embed")


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-shared"])
def test_models_with_inputs_for_each_layer_are_refused(tmp_path: Path, name: str) -> None:
    """PEFT gives embeddings to such a model, which finds no ids to look its layers' inputs up for."""
    worker = make_worker(DATA / "families" / name, enable_lora=True, max_prompt_adapter_token=4)
    make_prompt(tmp_path, torch.randn(3, worker.model.config.hidden_size))
    assert "has inputs for each layer, so no prompt adapters" in worker.adapters.load(0, str(tmp_path))
