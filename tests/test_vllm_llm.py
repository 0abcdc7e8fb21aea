"""What vLLM's own tests under tests/entrypoints/llm and pooling ask of `LLM` and no other file here does, on the demo.

The rest is asked in test_engine.py and test_llm.py.

Left out, as features of later work:
    structured output, reasoning, LoRA, multimodal input, sleep mode, prompt embeds   see test_vllm_openai.py
    per-token embeddings and classes, `LLM.reward`                    pool nothing
    collective_rpc with functions, plug-ins, GPU memory utilization    are about vLLM's workers and devices

Where Manta differs, on purpose:
    `sampling_params` is one record or a list; anything else is refused by name.
    A priority other than 0 is refused without the policy `priority`; vLLM ignores it.
    `encode` needs no `pooling_task`; vLLM insists on it, because its models can have several tasks.
    `PoolingParams` has `dimensions` and `use_activation`; vLLM's older `activation` is gone there, too.
    Metrics are always there; vLLM has them with `disable_log_stats=False`.
    Errors are ValueErrors with other words than vLLM's.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import DEMO
from engine import LLM, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams

PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The future is"]
SHORT = SamplingParams(temperature=0, max_tokens=4)
SYSTEM = {"role": "system", "content": "You are a helpful assistant"}
TALKS = [[SYSTEM, {"role": "user", "content": text}] for text in ("Explain entropy.", "What is 23 + 58?")]
TEXT = "The chef prepared a delicious meal."
FIRST = ["What is the capital of France?", "What is the capital of Germany?"]
SECOND = ["The capital of France is Paris.", "The capital of Germany is Berlin."]


@pytest.fixture(scope="module")
def embedder(make_llm) -> Iterator[LLM]:
    with make_llm(task="embed", max_model_len=128) as made:
        yield made


def classifier(folder: Path, labels: int) -> LLM:
    """The demo with a random classification head."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    names = {str(i): f"label {i}" for i in range(labels)}
    more = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": labels, "id2label": names}
    (folder / "config.json").write_text(json.dumps(config | more))
    weights = load_file(folder / "model.safetensors")
    head = torch.randn(labels, config["hidden_size"], generator=torch.Generator().manual_seed(0)) / 8
    save_file(weights | {"score.weight": head.to(torch.bfloat16)}, folder / "model.safetensors")
    return LLM(str(folder), dtype="float32", device="cpu", max_model_len=128)


# --- generate ---------------------------------------------------------------------------------------------------------


def test_one_record_of_parameters_or_one_for_each_prompt(llm):
    each = [SamplingParams(temperature=t, top_p=0.95) for t in (0.01, 0.3, 0.7, 0.99)]
    for params in (each, each[1], None):
        outputs = llm.generate(PROMPTS, sampling_params=params, use_tqdm=False)
        assert [output.prompt for output in outputs] == PROMPTS and all(output.finished for output in outputs)
        assert all(isinstance(output, RequestOutput) and output.outputs[0].text for output in outputs)
        assert all(output.metrics is not None for output in outputs)
    with pytest.raises(ValueError, match="3 entries for 4 prompts"):
        llm.generate(PROMPTS, sampling_params=each[:3], use_tqdm=False)


def test_priorities(make_llm, llm):
    wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SHORT, use_tqdm=False)]
    by_rank = make_llm(scheduling_policy="priority")
    for engine, priorities in ((llm, (None, 0, [0] * 4)), (by_rank, (None, 1, [3, 2, 1, 0]))):
        for priority in priorities:
            outputs = engine.generate(PROMPTS, SHORT, use_tqdm=False, priority=priority)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
        for priority in (0, [0]):
            assert len(engine.generate(PROMPTS[0], SHORT, use_tqdm=False, priority=priority)) == 1
        for wrong in ([0] * 3, []):
            with pytest.raises(ValueError, match=f"priority has {len(wrong)} entries for 4 prompts"):
                engine.generate(PROMPTS, SHORT, use_tqdm=False, priority=wrong)
    for wrong in (1, [0, 0, 0, 1]):
        with pytest.raises(ValueError, match="priority is 1; it must be 0"):
            llm.generate(PROMPTS, SHORT, use_tqdm=False, priority=wrong)
    by_rank.close()


def test_an_answer_ends_with_the_context(make_llm):
    with make_llm(max_model_len=20) as small:
        for output in small.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False):
            assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 20
            assert output.outputs[0].finish_reason == "length"


def test_logprobs_of_a_long_prompt(llm):
    params = SamplingParams(top_p=0.9, top_k=50, temperature=0.8, prompt_logprobs=10, logprobs=2, max_tokens=1)
    ids = list(range(1000))
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert len(output.prompt_logprobs) == 1000 and output.prompt_logprobs[0] is None
    for id, table in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
        assert id in table and 10 <= len(table) <= 11 and {entry.rank for entry in table.values()} >= set(range(1, 11))
        assert sum(math.exp(entry.logprob) for entry in table.values()) <= 1.0001
    assert output.outputs[0].token_ids[0] in output.outputs[0].logprobs[0]


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chats(llm):
    (one,) = llm.chat(TALKS[1], SHORT, use_tqdm=False)
    first, second = llm.chat(TALKS, SHORT, use_tqdm=False)
    assert second.outputs[0].token_ids == one.outputs[0].token_ids and first.prompt_token_ids != one.prompt_token_ids
    rendered = llm.get_tokenizer().render(TALKS[1])  # and no special token comes before it
    assert one.prompt_token_ids == llm.get_tokenizer().encode(rendered, add_special_tokens=False)


# --- what samples nothing ---------------------------------------------------------------------------------------------


def test_prompts_that_are_embedded(embedder):
    ids = embedder.get_tokenizer().encode(TEXT)
    for prompts in (TEXT, [ids], [TEXT, ids], {"prompt_token_ids": ids}):
        outputs = embedder.embed(prompts, use_tqdm=False)
        assert len(outputs) == (len(prompts) if isinstance(prompts, list) else 1)
        for output in outputs:
            assert isinstance(output, PoolingRequestOutput) and output.prompt_token_ids == ids
            assert len(output.outputs.embedding) == 192
    (encoded,) = embedder.encode(TEXT, pooling_task="embed", use_tqdm=False)
    assert list(encoded.outputs.data) == pytest.approx(outputs[0].outputs.embedding, abs=1e-5)


def test_embeddings_are_normalized_unless_not(embedder):
    def found(normalize: bool | None) -> torch.Tensor:
        (output,) = embedder.embed([TEXT], PoolingParams(use_activation=normalize), use_tqdm=False)
        return torch.tensor(output.outputs.embedding)

    default, normal, raw = found(None), found(True), found(False)
    assert torch.allclose(default, normal, atol=1e-5) and not torch.allclose(normal, raw, atol=1e-2)
    assert torch.allclose(normal, raw / raw.norm(), atol=1e-5)


def test_pooling_parameters_are_for_all_or_for_each(embedder):
    for params in ([PoolingParams()] * 4, PoolingParams(), None):
        outputs = embedder.encode(PROMPTS, pooling_params=params, use_tqdm=False)
        assert len(outputs) == 4 and all(output.finished for output in outputs)
    with pytest.raises(ValueError, match="3 entries for 4 prompts"):
        embedder.encode(PROMPTS, pooling_params=[PoolingParams()] * 3, use_tqdm=False)


def test_another_task_is_refused(embedder, llm):
    for task in ("token_embed", "classify", "token_classify", "score"):
        with pytest.raises(ValueError, match=f"{task}.* this one's is 'embed'"):
            embedder.encode(TEXT, pooling_task=task, use_tqdm=False)
    for wrong in (lambda: embedder.classify(TEXT), lambda: embedder.generate(TEXT), lambda: llm.embed(TEXT)):
        with pytest.raises(ValueError, match="task"):
            wrong()


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [(FIRST[0], SECOND[0], [(0, 0)]), (FIRST[0], SECOND, [(0, 0), (0, 1)]), (FIRST, SECOND, [(0, 0), (1, 1)])],
)
def test_scores_of_an_embedder(embedder, first, second, pairs):
    left, right = (
        [torch.tensor(output.outputs.embedding) for output in embedder.embed(texts, use_tqdm=False)]
        for texts in (FIRST, SECOND)
    )
    scores = [output.outputs.score for output in embedder.score(first, second, use_tqdm=False)]
    assert scores == pytest.approx([float(left[i] @ right[j]) for i, j in pairs], abs=1e-4)


def test_classes(tmp_path):
    with classifier(tmp_path, 2) as made:

        def found(activation: bool | None) -> torch.Tensor:
            outputs = made.classify([TEXT], PoolingParams(use_activation=activation), use_tqdm=False)
            return torch.tensor([output.outputs.probs for output in outputs])

        default, active, raw = found(None), found(True), found(False)
        assert default.shape == (1, 2) and torch.allclose(default, active, atol=1e-5)
        assert not torch.allclose(active, raw, atol=1e-2) and torch.allclose(raw.softmax(-1), active, atol=1e-5)
        (encoded,) = made.encode(TEXT, pooling_task="classify", use_tqdm=False)
        assert list(encoded.outputs.data) == pytest.approx(default[0].tolist(), abs=1e-5)
        with pytest.raises(ValueError, match="task"):
            made.encode(TEXT, pooling_task="embed", use_tqdm=False)
        with pytest.raises(ValueError, match="score is for"):  # it has two labels
            made.score("ping", "pong", use_tqdm=False)


def test_scores_of_a_classifier(tmp_path):
    with classifier(tmp_path, 1) as made:
        one = [output.outputs.score for output in made.score(FIRST[0], SECOND, use_tqdm=False)]
        each = [output.outputs.score for output in made.score(FIRST, SECOND, use_tqdm=False)]
        assert all(0 < score < 1 for score in one + each) and one[0] == pytest.approx(each[0], abs=1e-5)
        assert one[1] != pytest.approx(each[1], abs=1e-5)
