"""Embeddings and classification: against transformers, and how prompts that are pooled are run and refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import socket
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from config import DEMO, EngineConfig
from core import EngineCore
from cpu import machine
from device import warmup
from device.launched import Launched
from device.memory import fit_pool, largest_step
from device.startup import print_plan, start_worker
from engine import PoolingParams, SamplingParams
from integrity import check_integrity
from model_config import ModelConfig
from models.pooling import settle_task, task_facts
from observe.journal import Journal
from plan import EngineCoreRequest, StepResult
from processes.client import MPClient
from processes.engine_process import EngineServer
from random_checkpoints import POOLED as CASES
from random_checkpoints import Checkpoints, pooled
from replay import replay
from scheduler import Scheduler
from sequence import SequenceGroup
from test_embedders import RAW, make, save_dense, save_modules
from worker_steps import SHAPE


class WithTokenizers(Checkpoints):
    """Copies of the folders, with the demo's tokenizer. That of "first-2" has the first two labels of "labels-3"."""

    def __init__(self, shared: Path, copies: Path):
        super().__init__("pooled", shared)
        self.copies = copies

    def __truediv__(self, name: str) -> Path:
        if not (copy := self.copies / name).exists():
            kind, _, count = name.partition("-")
            shutil.copytree(super().__truediv__("labels-3" if kind == "first" else name), copy)
            if kind == "first":
                self.cut(copy, int(count))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(DEMO) / file, copy)
        return copy

    @staticmethod
    def cut(folder: Path, count: int) -> None:
        """Leave a classifier its first labels alone."""
        raw, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(count)}
        raw["label2id"] = {label: int(i) for i, label in raw["id2label"].items()}
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(weights | {"score.weight": weights["score.weight"][:count].clone()}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def checkpoints(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> WithTokenizers:
    return WithTokenizers(shared, tmp_path_factory.mktemp("pooled"))


def wanted(hidden: torch.Tensor, kind: str, normalized: bool, dimensions: int | None = None) -> torch.Tensor:
    many = hidden.double()
    x = {
        "last": hidden[-1], "cls": hidden[0], "mean": many.mean(0), "max": many.amax(0),
        "mean_sqrt_len": many.sum(0) / len(hidden) ** 0.5,
        "weightedmean": (many * torch.arange(1, len(many) + 1)[:, None]).sum(0) / sum(range(1, len(many) + 1)),
    }[kind].float()[:dimensions]  # fmt: skip
    return x / x.norm() if normalized else x


@pytest.mark.parametrize(
    ("name", "backend"),
    [("qwen3", "cpu"), pytest.param("llama", "cpu", marks=pytest.mark.full), ("qwen3", "reference")],
)
@pytest.mark.parametrize("kind", ["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"])
def test_embeddings_equal_transformers(checkpoints, name, backend, kind):
    llm, prompts = make(checkpoints / name, task="embed", pooling_type=kind, backend=backend), CASES[name]["prompts"]
    oracle = load_file(checkpoints / name / "oracle.safetensors")
    for params in (PoolingParams(), RAW, PoolingParams(24), PoolingParams(24, False), PoolingParams(64, True)):
        outputs = llm.embed(prompts, params, use_tqdm=False)
        for i, one in enumerate(outputs):
            want = wanted(oracle[f"hidden{i}"], kind, params.use_activation is not False, params.dimensions)
            assert one.finished and one.prompt_token_ids == prompts[i] and one.outputs.hidden_size == len(want)
            assert (torch.tensor(one.outputs.embedding) - want).abs().max() <= 1e-4
    check_integrity(llm.core.scheduler)
    assert llm.core.metrics()["kv_cache_usage_perc"] == 0 == llm.core.metrics()["generation_tokens_total"]


@pytest.mark.parametrize(
    ("name", "task", "activation"),
    [
        pytest.param("labels-1", "score", torch.sigmoid, marks=pytest.mark.full),
        pytest.param("labels-2", "classify", lambda x: x.softmax(-1), marks=pytest.mark.full),
        ("labels-3", "classify", lambda x: x.softmax(-1)),
        pytest.param("multi", "classify", torch.sigmoid, marks=pytest.mark.full),
        ("first-1", "score", torch.sigmoid),
        ("first-2", "classify", lambda x: x.softmax(-1)),
    ],
)
def test_classes_equal_transformers(checkpoints, name, task, activation):
    kind, _, first = name.partition("-")
    case = CASES["labels-3" if kind == "first" else name]
    count = int(first) if kind == "first" else case["shape"]["num_labels"]
    llm, prompts = make(checkpoints / name), case["prompts"]
    assert llm.core.facts["task"] == task and llm.core.facts["num_labels"] == count
    oracle = load_file(checkpoints / name / "oracle.safetensors")
    logits = torch.stack([oracle[f"labels{i}"][:count] for i in range(len(prompts))])
    probs = torch.tensor([one.outputs.probs for one in llm.classify(prompts, use_tqdm=False)])
    assert (probs - activation(logits)).abs().max() <= 1e-4
    plain = torch.tensor([one.outputs.data for one in llm.encode(prompts, RAW, use_tqdm=False)])
    assert (plain - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}, {"backend": "reference"}], ids=str)
def test_each_token_has_a_vector(checkpoints, fields):
    """In one step with prompts that are pooled; of a classifier it is what the head says after each token."""
    prompts = CASES["qwen3"]["prompts"]
    oracle = load_file(checkpoints / "qwen3" / "oracle.safetensors")
    llm = make(checkpoints / "qwen3", task="embed", **fields)
    for cut, scaled in ((None, False), (24, None)):
        params = [PoolingParams(cut, scaled, "token_embed" if i % 2 else None) for i in range(len(prompts))]
        for i, one in enumerate(llm.encode(prompts, params, use_tqdm=False)):
            many = oracle[f"hidden{i}"][:, :cut]
            many = many / many.norm(dim=1, keepdim=True) if scaled is None else many
            assert (torch.tensor(one.outputs.data) - (many if i % 2 else many[-1])).abs().max() <= 1e-4
    folder, prompts = checkpoints / "labels-3", CASES["labels-3"]["prompts"]
    head = load_file(folder / "model.safetensors")["score.weight"].float()
    hidden = make(folder, task="embed", **fields).encode(prompts, RAW, use_tqdm=False, pooling_task="token_embed")
    for one, want in zip(make(folder, **fields).reward(prompts, use_tqdm=False), hidden, strict=True):
        probs = (torch.tensor(want.outputs.data) @ head.T).softmax(-1)
        assert (torch.tensor(one.outputs.data) - probs).abs().max() <= 1e-4


def test_vectors_of_tokens_go_through_dense_layers(checkpoints, tmp_path):
    """As ColBERT's: a linear layer makes them smaller. Two poolings in a row leave a token none."""
    folder, prompts = shutil.copytree(checkpoints / "qwen3", tmp_path / "model"), CASES["qwen3"]["prompts"]
    hidden = make(folder, task="embed").encode(prompts, RAW, use_tqdm=False, pooling_task="token_embed")
    save_modules(folder, {"pooling_mode": "mean"}, "Dense", "Normalize")
    dense = save_dense(folder, out_features=8, bias=False, activation_function="torch.nn.modules.linear.Identity")
    listed = json.loads((folder / "modules.json").read_text())
    llms = [make(folder)]
    (folder / "modules.json").write_text(json.dumps([listed[0], listed[2]]))  # as PyLate has it
    llms.append(make(folder))
    pairs = [pair for llm in llms for pair in zip(llm.encode(prompts, None, False, "token_embed"), hidden, strict=True)]
    for one, raw in pairs:
        want = torch.nn.functional.normalize(torch.tensor(raw.outputs.data) @ dense["linear.weight"].T)
        assert (torch.tensor(one.outputs.data) - want).abs().max() <= 1e-4
    save_modules(folder, {"pooling_mode": ["mean", "cls"]}, "Normalize")
    with pytest.raises(ValueError, match=r"this model pools by mean\+cls, so its tokens have no embeddings"):
        make(folder).encode(prompts, use_tqdm=False, pooling_task="token_embed")


def test_a_checkpoint_for_text_is_an_embedder_too(checkpoints, llm):
    """It has names with `model.` before them and a head, which is not read. The hidden states are those of the text."""
    embedder, prompt = make(Path(DEMO), task="embed", pooling_type="mean"), [5, 6, 7, 8]
    assert embedder.core.executor.worker.model.head is None
    seen, model = [], llm.core.executor.worker.model
    forward = model.forward
    model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    model.forward = forward
    (output,) = embedder.embed(prompt, RAW, use_tqdm=False)
    assert (torch.tensor(output.outputs.embedding) - seen[0][-4:].mean(0)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("pooling", "modules", "kind", "normalize"),
    [
        ({"pooling_mode": "lasttoken"}, ["Normalize"], "last", True),
        ({"pooling_mode": ["mean"]}, [], "mean", False),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ["Normalize"], "cls", True),
        ({"pooling_mode_mean_tokens": True}, [], "mean", False),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}, [], "last", False),
        ({"pooling_mode_weightedmean_tokens": True, "include_prompt": False}, [], "weightedmean", False),
        ({"pooling_mode_max_tokens": True}, [], "max", False),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, [], "mean_sqrt_len", False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, [], "cls+mean", False),
        ({"pooling_mode": ["mean", "cls"]}, ["Dropout", "Normalize"], "mean+cls", True),
        ({"word_embedding_dimension": 64}, [], "mean", False),  # the library's default
        (None, ["Normalize"], "last", True),
    ],
)
def test_a_folder_of_sentence_transformers_says_what_it_is(tmp_path, pooling, modules, kind, normalize):
    shutil.copy(Path(DEMO) / "config.json", tmp_path)
    save_modules(tmp_path, pooling, *modules)
    model_config = ModelConfig.from_folder(str(tmp_path))
    config, settled = settle_task(EngineConfig(str(tmp_path)), model_config)
    facts = task_facts(config, settled)
    assert [facts[name] for name in ("task", "pooling_type", "normalize")] == ["embed", kind, normalize]
    assert facts["vector_size"] == model_config.hidden_size * (kind.count("+") + 1)
    assert settle_task(config, settled) == (config, settled)
    assert settle_task(EngineConfig(str(tmp_path), task="generate"), model_config)[0].makes_vectors is False
    assert settle_task(EngineConfig(str(tmp_path), pooling_type="cls"), model_config)[0].pooling_type == "cls"
    assert config.max_model_len is None
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 99}')
    assert settle_task(EngineConfig(str(tmp_path)), model_config)[0].max_model_len == 99
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    for length, most in ((98, 98), (10**30, model_config.max_position), (1e30, model_config.max_position)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        assert settle_task(EngineConfig(str(tmp_path)), model_config)[0].max_model_len == most
    assert settle_task(EngineConfig(str(tmp_path), max_model_len=97), model_config)[0].max_model_len == 97
    for length in (1, True, "98", 9.5):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: model_max_length is .*; it must be a whole"):
            settle_task(EngineConfig(str(tmp_path)), model_config)


@pytest.mark.parametrize(
    ("pooling", "modules", "message"),
    [
        ({"pooling_mode": "min"}, [], "asks for the pooling min; Manta has last, mean, cls, max, weightedmean, mean_s"),
        ({"pooling_mode": ["max", "clsmean"]}, [], "asks for the pooling max, clsmean; Manta has last"),
        (
            {},
            ["Normalize", "Dense"],
            "Pooling:1_Pooling Normalize:2_Normalize Dense:3_Dense'; Manta has Transformer, Pooling, D",
        ),
        ({}, ["LSTM"], "LSTM:2_LSTM'; Manta has"),
        ({}, ["Dense"], "has no 2_Dense/config.json"),
        ({}, None, "modules.json is no list of modules"),
    ],
)
def test_what_a_folder_may_not_ask_for(tmp_path, pooling, modules, message):
    shutil.copy(Path(DEMO) / "config.json", tmp_path)
    save_modules(tmp_path, pooling, *modules or [])
    if modules is None:
        (tmp_path / "modules.json").write_text('["x"]')
    with pytest.raises(ValueError, match=message):
        settle_task(EngineConfig(str(tmp_path)), ModelConfig.from_folder(str(tmp_path)))


@pytest.mark.parametrize(
    ("architecture", "more", "fields", "message"),
    [
        ("Qwen3Model", {}, {"task": "generate"}, "task is 'generate'; Qwen3Model has no head for it"),
        ("Qwen3Model", {}, {}, "Qwen3Model has no head for it, so it must be 'embed'"),
        ("Qwen3ForCausalLM", {}, {"task": "classify"}, "no classification head, so it must be 'embed' or 'generate'"),
        ("Qwen3ForSequenceClassification", {}, {"task": "score"}, "the model has 2 labels, so it must be 'classify'"),
        ("Qwen3ForCausalLM", {}, {"task": "embed", "preemption_mode": "swap"}, "preemption_mode is 'swap'; with the"),
        (
            "Qwen3ForCausalLM",
            {"is_causal": False},
            {"task": "generate"},
            "Qwen3ForCausalLM is an encoder, so it must be",
        ),
        ("Qwen3ForSequenceClassification", {"id2label": {"1": "a"}}, {}, "it must name 0 to 0"),
        ("AlbertModel", {}, {}, "config.json is of a 'AlbertModel'; nearest"),
    ],
)
def test_what_a_model_cannot_do(tmp_path, architecture, more, fields, message):
    raw = pooled() | {"architectures": [architecture], "model_type": "qwen3"} | more
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        settle_task(EngineConfig(str(tmp_path), **fields), ModelConfig.from_folder(str(tmp_path)))


@pytest.mark.parametrize(
    ("more", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "regression"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
        ({"id2label": {"0": "yes"}}, "sigmoid"),
    ],
)
def test_what_becomes_of_a_classifications_logits(tmp_path, more, activation):
    raw = pooled() | {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"} | more
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_folder(str(tmp_path)).label_activation == activation


# --- scheduling -------------------------------------------------------------------------------------------------------


class Pooler:
    """A scheduler of prompts that are pooled, and what stands in for its worker: a prompt becomes its own tokens."""

    def __init__(self, num_blocks: int = 12, **fields):
        options = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "task": "embed"}
        options |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
        self.config = EngineConfig(**options | fields)
        self.sizes = {"num_blocks": num_blocks, "max_model_len": 40, "vocab_size": 50, "eos_token_ids": []}
        self.scheduler = Scheduler(self.config, **self.sizes)
        self.flying, self.slots, self.steps = deque(), {}, []

    def add(self, name: str, length: int, **fields) -> SequenceGroup:
        request = SequenceGroup(name, [len(name)] * length, SamplingParams(), pooling=PoolingParams(), **fields)
        self.scheduler.add(request)
        return request

    def plan(self) -> None:
        plan = self.scheduler.schedule()
        rows = {row.slot: bytes(row.token_ids) for row in plan.new}
        assert len(plan.rows) == len(rows) and all(count == len(rows[slot]) for slot, count in plan.rows)
        assert all(row.pooling is not None and row.num_computed == 0 for row in plan.new)
        self.steps.append([count for _, count in plan.rows])
        self.flying.append((plan, {i: rows[slot] for i, (slot, _) in enumerate(plan.rows)}))

    def land(self) -> dict[str, bytes | None]:
        plan, pooled = self.flying.popleft()
        news = self.scheduler.update(plan, StepResult(plan.step, [-1] * len(plan.rows), pooled=pooled))
        check_integrity(self.scheduler)
        assert all(one.finished and one.finish_reason == "stop" and not one.token_ids for one in news)
        return {one.request_id: one.pooled for one in news}

    def run(self, depth: int = 1) -> dict[str, bytes | None]:
        results = {}
        while self.scheduler.has_work():
            self.plan()
            if len(self.flying) == depth:
                results |= self.land()
        return results


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_is_filled_with_whole_prompts(depth):
    pooler, lengths = Pooler(), [5, 6, 4, 1, 2, 40, 3, 16, 1]
    for i, length in enumerate(lengths):
        pooler.add("x" * (i + 1), length)
    results = pooler.run(depth)
    assert results == {"x" * (i + 1): bytes([i + 1] * length) for i, length in enumerate(lengths)}
    # A step has 16 tokens and 4 prompts at most; one that is longer has a step of its own.
    filled = [step for step in pooler.steps if step]
    assert filled == [[1, 5, 6, 4], [2], [40], [3], [16], [1]] or depth == 2
    assert all(sum(step) <= 16 or len(step) == 1 for step in filled) and sum(map(len, filled)) == len(lengths)
    assert pooler.scheduler.blocks.num_free == 12 and not pooler.scheduler.blocks.block_of
    assert pooler.scheduler.counters["prompt_tokens_total"] == sum(lengths)
    assert (
        pooler.scheduler.counters["generation_tokens_total"] == 0 == pooler.scheduler.counters["num_preemptions_total"]
    )


def test_equal_prompts_are_computed_again():
    pooler = Pooler()
    for name in ("a", "b"):
        pooler.add(name, 12)
        pooler.run()
    assert pooler.steps == [[12], [12]]


def test_a_prompt_may_fill_the_context_and_no_more():
    pooler = Pooler()
    pooler.add("a", 40)
    with pytest.raises(ValueError, match="the prompt has 41 tokens; at most 40 fit the context of 40"):
        pooler.add("b", 41)
    assert len(pooler.run()["a"]) == 40


def test_aborts_and_lost_workers():
    pooler = Pooler(max_num_seqs=2)
    for name in "abcd":
        pooler.add(name, 4)
    pooler.plan()
    pooler.scheduler.abort("a")
    pooler.scheduler.abort("d")
    assert pooler.land() == {"b": bytes([1] * 4)}
    pooler.plan()
    pooler.flying.clear()
    assert not pooler.scheduler.start_over(lost=True, cause="worker 0 has died")
    check_integrity(pooler.scheduler)
    assert pooler.run() == {"c": bytes([1] * 4)}
    story = pooler.scheduler.reports.explain("c")
    assert story["finished"] and [stay["state"] for stay in story["answers"][0]["stays"]].count("running") == 2


def test_a_prompt_that_kills_workers_is_found():
    pooler, errors = Pooler(), []
    for i in range(9):
        pooler.add("x" * (i + 1), 4)
    while pooler.scheduler.has_work():
        pooler.plan()
        if bytes([7] * 4) in pooler.flying[0][1].values():
            pooler.flying.clear()
            errors += pooler.scheduler.start_over(lost=True, cause="worker 0 has died")
        else:
            pooler.land()
    assert [error.request_id for error in errors] == ["x" * 7]


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_whoever_is_served_first_is_let_in_first_and_pushes_nobody_out(policy):
    pooler, done = Pooler(scheduling_policy=policy, num_blocks=10), []
    for i in range(4):
        pooler.add("x" * (i + 1), 16, priority=5, client="many")
    pooler.plan()
    pooler.add("urgent", 16, priority=1, client="one")
    pooler.plan()
    while pooler.flying or pooler.scheduler.has_work():
        if not pooler.flying:
            pooler.plan()
        done += pooler.land()
    assert done.index("urgent") == 1 and pooler.scheduler.counters["num_preemptions_total"] == 0


def test_a_journal_can_be_replayed(tmp_path):
    pooler = Pooler()
    journal = Journal(str(tmp_path / "journal"), pooler.sizes, pooler.scheduler)
    for i in range(6):
        journal.added(pooler.add("x" * (i + 1), 3 * i + 1))
    while pooler.scheduler.has_work():
        pooler.plan()
        plan, pooled = pooler.flying[0]
        journal.planned(plan)
        journal.landed(StepResult(plan.step, [-1] * len(plan.rows), pooled=pooled))
        pooler.land()
    again = replay((tmp_path / "journal").read_text().splitlines())
    assert not again.has_work() and again.counters == pooler.scheduler.counters


# --- the engine -------------------------------------------------------------------------------------------------------


def test_requests_of_the_wrong_kind_are_refused(checkpoints, llm):
    embedder, classifier = make(checkpoints / "qwen3", task="embed"), make(checkpoints / "first-2")
    with pytest.raises(ValueError, match="asks for generated text; the task of this engine is 'embed'"):
        embedder.generate("To be", use_tqdm=False)
    with pytest.raises(ValueError, match="what an embedder or a classifier gives; the task is 'generate'"):
        llm.encode("To be", use_tqdm=False)
    for engine, method in ((llm, "embed"), (classifier, "embed"), (embedder, "classify"), (llm, "classify")):
        with pytest.raises(ValueError, match=f"{method} is for engines whose task is .* this one's is '"):
            getattr(engine, method)("To be", use_tqdm=False)
    for engine in (llm, classifier):
        with pytest.raises(ValueError, match="score is for engines whose task is embed or score; this one's is"):
            engine.score("a", "b", use_tqdm=False)
    with pytest.raises(ValueError, match="task is 'token_classify'; the engine's is 'embed', and does embed, token"):
        embedder.encode("To be", PoolingParams(task="token_classify"), use_tqdm=False)
    with pytest.raises(ValueError, match="pooling_params has the task 'token_embed'; it must be 'embed' here, or None"):
        embedder.embed("To be", PoolingParams(task="token_embed"), use_tqdm=False)
    with pytest.raises(
        ValueError, match="encode is for engines whose task is classify or score; this one's is 'embed'"
    ):
        embedder.reward("To be", use_tqdm=False)
    for dimensions in (0, 65):
        with pytest.raises(ValueError, match=f"dimensions is {dimensions}; it must be a whole number from 1 to 64"):
            embedder.embed("To be", PoolingParams(dimensions), use_tqdm=False)
    with pytest.raises(ValueError, match="dimensions is 3; with the task 'classify' it must be left out"):
        classifier.classify("To be", PoolingParams(3), use_tqdm=False)
    with pytest.raises(ValueError, match="the request has sampling parameters; with the task 'embed' nothing"):
        embedder.core.add(EngineCoreRequest("a", [1], SamplingParams(n=2), pooling=RAW))
    with pytest.raises(ValueError, match="pooling_params has 1 entries for 2 prompts"):
        embedder.embed(["a", "b"], [RAW], use_tqdm=False)
    for bad in ({"dimensions": 4}, {}, [None], SamplingParams()):
        with pytest.raises(
            ValueError, match=r"pooling_params has .*; it must be PoolingParams, a list of them, or None"
        ):
            embedder.embed(["a"], bad, use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt_name is \['query'\]; this model has no prompts"):
        embedder.embed(["a"], prompt_name=["query"], use_tqdm=False)
    with pytest.raises(ValueError, match=r"tokenization_kwargs is \[1\]; it must be a dict or None"):
        embedder.embed(["a"], tokenization_kwargs=[1], use_tqdm=False)
    with pytest.raises(ValueError, match=r"pooling_task is 'zz'; the tasks of engines do .*token_embed"):
        embedder.encode("a", pooling_task="zz", use_tqdm=False)
    with pytest.raises(ValueError, match=r"a prompt is 3\.5; it must be a string, token ids or a dict of these"):
        embedder.embed(["a", 3.5], use_tqdm=False)
    with pytest.raises(ValueError, match="the prompt has 257 tokens; at most 256 fit the context of 256"):
        embedder.embed([[1], [1] * 257], use_tqdm=False)
    assert not embedder.core.has_work() and not embedder.client.streams


def test_a_long_prompt_is_cut_where_asked_to(checkpoints):
    llm, ids, text = make(checkpoints / "qwen3", task="embed", max_model_len=40), list(range(90)), "two kings " * 40
    prompts = [ids, text, {"prompt": text}, {"prompt_token_ids": ids}, "a king"]
    whole = llm.tokenizer.encode(text)
    for keep, most in ((-1, 40), (7, 7)):
        outputs = llm.embed(prompts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": keep})
        expected = [ids[:most], whole[:most], whole[:most], ids[:most], llm.tokenizer.encode("a king")]
        assert [one.prompt_token_ids for one in outputs] == expected
    with pytest.raises(ValueError, match="the prompt has 90 tokens; at most 40 fit"):
        llm.embed(prompts, use_tqdm=False)
    for bad in (0, -2, 41, True, "5", 1.0):
        with pytest.raises(ValueError, match=r"truncate_prompt_tokens is .*; it must be -1, or from 1 to 40"):
            llm.encode(ids, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": bad})
    with pytest.raises(ValueError, match="tokenization_kwargs has 'padding'; known: truncate_prompt_tokens"):
        llm.encode(ids, use_tqdm=False, tokenization_kwargs={"padding": True})
    scorer, cut = make(checkpoints / "first-1", max_model_len=40), {"truncate_prompt_tokens": -1}
    (one,) = scorer.score("a king", text, use_tqdm=False, tokenization_kwargs=cut)
    assert one.prompt_token_ids == (llm.tokenizer.encode("a king") + whole)[:40]
    (one,) = llm.score("a king", text, use_tqdm=False, tokenization_kwargs=cut)
    assert one.prompt_token_ids == llm.tokenizer.encode("a king") + whole[:40]


def test_scores_are_cosines_of_an_embedder_and_what_a_classifier_says_of_a_pair(checkpoints):
    embedder, texts = make(checkpoints / "qwen3", task="embed"), ["To be", "or not to be", "that is"]
    vectors = [np.array(one.outputs.embedding) for one in embedder.embed(texts, RAW, use_tqdm=False)]
    scores = embedder.score("To be", texts, use_tqdm=False)
    for one, vector in zip(scores, vectors, strict=True):
        cosine = vectors[0] @ vector / np.linalg.norm(vectors[0]) / np.linalg.norm(vector)
        assert one.outputs.score == pytest.approx(cosine, abs=1e-5)
    assert scores[0].outputs.score == pytest.approx(1, abs=1e-5)
    ranker = make(checkpoints / "first-1")
    (pair,) = ranker.score(texts[0], texts[1], use_tqdm=False)
    ids = ranker.tokenizer.encode(texts[0]) + ranker.tokenizer.encode(texts[1])  # the demo puts nothing between them
    assert pair.prompt_token_ids == ids
    assert [pair.outputs.score] == ranker.classify(ids, use_tqdm=False)[0].outputs.probs
    settings = checkpoints / "first-1" / "config_sentence_transformers.json"
    settings.write_text('{"prompts": {"query": "To ask: "}, "default_prompt_name": "query"}')
    asking = make(checkpoints / "first-1")
    settings.unlink()
    for name, before in ((None, "To ask: "), ("query", "To ask: "), ("", "")):
        (pair,) = asking.score(*texts[:2], use_tqdm=False, prompt_name=name)
        assert pair.prompt_token_ids == asking.tokenizer.encode_pair(before + texts[0], texts[1])[0]
    for bad, words in (
        ((["a", "b"], "c"), "text_1 has 2 texts"), (("a", ["b", 3]), "text_2 is "), (([], []), "text_1 has 0 texts"),
        ((None, ["b"]), "text_1 is None; it must be a string"), (({"prompt": "a"}, "b"), "text_1 is {'prompt': 'a'}"),
        (("a", ["b", "c"], [RAW] * 2), "pooling_params is .*; it must be PoolingParams or None"),
        (("a", "b", PoolingParams(task="token_classify")), "has the task 'token_classify'; it must be 'score' here"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            ranker.score(*bad, use_tqdm=False)
    with pytest.raises(ValueError, match="use_activation is False; it is for models that score pairs"):
        embedder.score("a", "b", RAW, use_tqdm=False)


@pytest.mark.parametrize(
    "fields",
    [{"sanitize_kv": True}, {"batch_invariant": True}, {"max_num_seqs": 1}, {"async_scheduling": True},
     {"max_num_batched_tokens": 8, "num_lookahead_slots": 3}],
    ids=str,
)  # fmt: skip
def test_vectors_do_not_depend_on_how_they_are_computed(checkpoints, fields):
    oracle, prompts = load_file(checkpoints / "qwen3" / "oracle.safetensors"), CASES["qwen3"]["prompts"]
    llm = make(checkpoints / "qwen3", task="embed", pooling_type="mean", **fields)
    vectors = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
    for i, vector in enumerate(vectors):
        assert (torch.tensor(vector) - wanted(oracle[f"hidden{i}"], "mean", True)).abs().max() <= 1e-4
    if "batch_invariant" in fields:
        assert [llm.embed(prompt, use_tqdm=False)[0].outputs.embedding for prompt in prompts] == vectors


def test_an_engine_across_a_socket_gives_the_same(checkpoints):
    llm, (address, listener) = make(checkpoints / "qwen3", task="embed"), socket.socketpair()
    prompts = CASES["qwen3"]["prompts"]
    want = [np.array(one.outputs.embedding, dtype=np.float32) for one in llm.embed(prompts, use_tqdm=False)]
    threading.Thread(target=EngineServer(llm.core, listener).run, daemon=True).start()
    with address:
        client = MPClient(address)
        streams = [
            client.add_request(EngineCoreRequest(str(i), ids, SamplingParams(), pooling=PoolingParams()))
            for i, ids in enumerate(prompts)
        ]
        for stream, vector in zip(streams, want, strict=True):
            output = stream.get(timeout=30)
            assert output.finished and output.finish_reason == "stop"
            assert np.abs(np.frombuffer(output.pooled, dtype=np.float32) - vector).max() <= 1e-6
        refused = client.add_request(EngineCoreRequest("x", [1, 2], SamplingParams())).get(timeout=30)
        assert "asks for generated text" in refused.error and refused.finished
        client.shutdown()


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"pooling_type": "mean"}, marks=pytest.mark.full),
        pytest.param({"batch_invariant": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_warm_up_covers_random_traffic(tmp_path, kernel_device, fields):
    """Triton's kernels launch nothing that warm-up has not, and a rehearsal launches all of that."""
    pytest.importorskip("kernels")
    raw = SHAPE | {"architectures": ["MistralForSequenceClassification"], "num_labels": 3, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = {"model": str(tmp_path), "load_format": "dummy", "dtype": "float32", "block_size": 16, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 24, "max_model_len": 33, "distributed_executor_backend": "uni"} | fields
    prompts, vectors = [[i + 1] * n for i, n in enumerate((1, 7, 16, 24, 33, 2, 1))], []
    for backend in (("cpu", "cpu"), ("triton", kernel_device)):
        core = EngineCore(EngineConfig(**options | dict(zip(("backend", "device"), backend, strict=True))))
        for i, ids in enumerate(prompts):
            core.add(EngineCoreRequest(str(i), ids, SamplingParams(), pooling=RAW))
        outputs = {}
        while core.has_work():
            outputs |= {output.request_id: output for output in core.step()}
        assert not [output.error for output in outputs.values() if output.error]
        vectors.append([np.frombuffer(outputs[str(i)].pooled, dtype=np.float32) for i in range(len(prompts))])
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-4)
    made = start_worker(core.config, core.model_config).start
    launched, made.guard.seen, made.guard.armed = made.guard.seen, set(), False
    warmup.rehearse(made)
    assert launched <= made.guard.seen, launched - made.guard.seen


def test_a_plan_has_no_room_for_what_is_not_done(checkpoints, capsys, monkeypatch):
    free = machine.available_bytes()  # which other tests change between two plans
    monkeypatch.setattr(machine, "available_bytes", lambda: free)
    plain = EngineConfig(str(checkpoints / "qwen3"), task="embed", device="cpu", max_num_seqs=8, block_size=16)
    config, model_config = settle_task(plain, ModelConfig.from_folder(plain.model))
    assert largest_step(config, 40_000) == 40_000 and largest_step(config, 100) == 800
    worker = start_worker(plain, ModelConfig.from_folder(plain.model))
    facts, memory = worker.facts(), worker.facts()["memory"]
    assert memory["logits"] == memory["sampling"] == memory["logprobs"] == memory["graphs"] == 0
    assert not worker.state.token_counts.numel() and facts["num_host_blocks"] == 0
    # Two of the largest steps are 2 * 128 blocks; 8 prompts at full length are no more.
    assert facts["num_blocks"] == 8 * 16 == fit_pool(config, (0,), 10**6, 256)[0]
    assert fit_pool(dataclasses.replace(config, max_num_batched_tokens=256), (0,), 10**6, 4096)[0] == 2 * 256 + 8
    print_plan(plain, ModelConfig.from_folder(plain.model))
    text = capsys.readouterr().out
    assert "logits" not in text and "sampling" not in text and f"{facts['num_blocks']:,} blocks of 16" in text
    print_plan(plain, model_config)
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(("kind", "count"), [("Reward", 1), ("ProcessReward", 2)])
def test_the_head_of_a_reward_model_has_two_matrices(checkpoints, tmp_path, kind, count):
    """As in Qwen's code, which transformers does not have; the body is Llama's here, with biases of 0."""
    folder, prompts = shutil.copytree(checkpoints / "labels-3", tmp_path / "model"), CASES["labels-3"]["prompts"]
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [f"Qwen2For{kind}Model"]}))
    del tensors["score.weight"]
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]))
    one, two = torch.nn.Linear(64, 64), torch.nn.Linear(64, count)
    head = torch.nn.Sequential(one, torch.nn.ReLU(), two).requires_grad_(False)
    save_file(tensors | {f"score.{name}": x for name, x in head.state_dict().items()}, folder / "model.safetensors")
    outputs = make(folder, task="embed").embed(prompts, RAW, use_tqdm=False)
    want = head(torch.tensor([output.outputs.embedding for output in outputs]))
    llm = make(folder)
    assert llm.core.facts["task"] == ("classify" if count > 1 else "score")
    probs = torch.tensor([output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)])
    assert (probs - (want.softmax(-1) if count > 1 else want)).abs().max() <= 1e-5
    save_file(tensors | {"score.0.weight": one.weight}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor score\.0\.bias and 2 more"):
        make(folder)


def test_a_head_is_not_loaded_where_it_is_not_needed(checkpoints):
    core = EngineCore(EngineConfig(str(checkpoints / "labels-3"), task="embed", dtype="float32", device="cpu"))
    assert core.executor.worker.model.score is None and core.facts["task"] == "embed"
    assert math.prod(core.facts["labels"] and (3,)) == core.facts["num_labels"] == 3


def test_vectors_that_are_not_finite_are_told() -> None:
    brought = torch.tensor([[1.0, 2.0], [torch.nan, 2.0], [0.0, torch.inf]])
    step = Launched(StepResult(1, []), brought=brought, finish=lambda vectors: [x.tobytes() for x in vectors])
    result = step.result()
    assert result.not_finite == [1, 2] and len(result.pooled) == 3
    step.finish = lambda vectors: [np.array([1.0, np.nan], np.float32).tobytes()] * 3  # as of tokens
    assert step.result().not_finite == [0, 1, 2]
