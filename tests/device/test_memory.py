"""The plan of memory: against the tensors themselves, against torch's count of a step, and as `--plan` prints it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import parallel
import reference
from batch_state import BatchState
from config import DEMO, EngineConfig
from core import EngineCore
from cpu import machine
from cpu import sampling as cpu_sampling
from device import dry_run, memory, pools, startup, warmup
from device.compile_guard import kernels_of, unlaunched
from device.memory import MIB, MemoryPlan, check_room, count_bytes, fit_pool, plan_memory, settle_tokens
from device.start import Start
from device.startup import print_plan, start_worker
from model import Transformer
from model_config import ModelConfig
from models import logprobs
from models.expert_ranks import ExpertGroup
from observe.logs import memory_note
from parallel import Group, Pipeline
from plan import NewRow, StepPlan
from worker import StepRun
from worker_steps import borrowed

ROOT = Path(__file__).parent.parent.parent
SHAPE = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "sliding_window": None,
}  # fmt: skip


class LiveBytes(dry_run.LiveBytes):
    """Collects garbage before a new peak is noted: a launch in the interpreter leaves cycles behind that hold its
    arguments, where a launch on a GPU frees them at once."""

    def __enter__(self):
        gc.collect()
        gc.freeze()
        return super().__enter__()

    def __exit__(self, *args):
        gc.unfreeze()
        return super().__exit__(*args)

    def count(self, storage: torch.UntypedStorage) -> None:
        if self.now + storage.nbytes() > self.peak:
            gc.collect()
        super().count(storage)

    @property
    def peak(self) -> int:
        return max(most for _, most in self.phases.values())


@pytest.fixture
def folder(tmp_path: Path):
    """Writes a tiny model's config.json, changed as told; returns its folder."""

    def write(**shape) -> str:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | shape))
        return str(tmp_path)

    return write


@pytest.fixture
def make(folder, monkeypatch):
    """Makes a worker on a tiny dummy with kernels.py, as the first of `size` ranks; the others are not there."""
    attention = pytest.importorskip("ops.attention")
    attention._programs.cache_clear()
    monkeypatch.setattr(attention, "PROCESSORS", 2)
    monkeypatch.setattr(warmup, "run_prompts", lambda start, worker: 1.0)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(parallel.dist, name, lambda *args, group=None: None)

    def make_startup(shape: dict | None = None, size: int = 1, **fields) -> Start:
        monkeypatch.setattr(Group, "connect", lambda *args: Group(0, size))
        monkeypatch.setattr(Group, "min", lambda self, value: value)
        options = {"model": folder(**shape or {}), "load_format": "dummy", "dtype": "float32", "device": "cpu"}
        options |= {"backend": "triton", "block_size": 16, "swap_space": 0.0, "preemption_mode": "recompute"}
        config = EngineConfig(**options | {"tensor_parallel_size": size} | fields)
        worker = start_worker(config, ModelConfig.from_folder(config.model))
        made, worker.start.worker = worker.start, worker
        made.guard, made.worker.watch = None, contextlib.nullcontext  # without a warm-up every kernel is late
        return made

    yield make_startup
    attention._programs.cache_clear()


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_key_value_heads": 2, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": None,
}  # fmt: skip
MOE = {"enable_moe_block": True, "top_k_experts": 4, "num_experts_per_tok": None}
DRAFTS, HEAD = ({"method": of, "num_speculative_tokens": n} for of, n in (("ngram", 3), ("mtp", 2)))
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "layer_types": ["full_attention", "linear_attention"], "head_dim": 8,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"head_dim": 8, "sliding_window": 16},
    "Gemma4ForCausalLM": GEMMA4 | EXPERTS | MOE,
    "GptOssForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 4},
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen3NextForCausalLM": EXPERTS | DELTA | {"shared_expert_intermediate_size": 32},
    "Qwen3_5ForCausalLM": DELTA,
    "DeepseekV3ForCausalLM": EXPERTS | {
        "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 24,
        "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_experts": None},
}  # fmt: skip


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("more", [{}, {"attention_bias": True, "tie_word_embeddings": True}], ids=["", "biases, tied"])
@pytest.mark.parametrize("family", SHAPES)
def test_weights_and_state_are_those_of_the_tensors(folder, family, more, size):
    """A rank's plan has the bytes that torch takes for a real model, and is the same on the meta device."""
    raw = {"architectures": [family], "vocab_size": 99, **SHAPES[family], **more}
    config = EngineConfig(folder(**raw), max_num_seqs=5, max_model_len=70)
    shape, plans = ModelConfig.from_folder(config.model), []
    for device in ("cpu", "meta"):
        with dry_run.LiveBytes() as live:
            model = Transformer(shape, reference, device, torch.bfloat16, 70, Group(size - 1, size))
        weights = live.now
        with dry_run.LiveBytes() as live:
            state = dry_run.new_state(config, model, 70, 5, device)
        plans.append(plan_memory(config, model, cuda=False))
        if device == "cpu":
            assert (plans[0].weights, plans[0].state) == (weights, live.now) and state.device == device
    assert plans[0] == plans[1]
    parts, heads, dim = shape.page(size, 0)
    layers = model.layout.layers[model.layout.places[0][0]]
    pool = torch.zeros(1, layers, parts, heads, 64, dim, dtype=torch.bfloat16)
    assert plans[0].block == pool.nbytes and plans[0].graphs == plans[0].context == 0
    matrices, inputs = torch.zeros(10, 8 // size, 16, 8), torch.zeros(10, 192 // size, 3)  # 5 sequences, 5 prefixes
    assert plans[0].states == (matrices.nbytes + inputs.nbytes if "linear_key_head_dim" in raw else 0)


@pytest.mark.parametrize("family", SHAPES)
def test_one_layer_of_each_kind_takes_what_all_layers_take(folder, family):
    kernels = pytest.importorskip("kernels")
    config = EngineConfig(folder(**{"architectures": [family], **SHAPES[family]}), max_num_seqs=4, max_model_len=70)
    shape = ModelConfig.from_folder(config.model)
    model = dry_run.dry_model(config, shape, kernels, torch.bfloat16, 70, Pipeline())
    dry, steps = dry_run.dry_worker(config, model, kernels), []
    for span in (model.span, dry_run.distinct_layers(model)):
        dry.model.span = span
        steps.append([dry_run.count_step(dry, counts) for counts in ([40], [1, 1, 30], [1] * 4)])
    assert steps[0] == steps[1] and all(begin < most for _, begin, most in steps[0])


@pytest.mark.parametrize("prompt", [0, 20])
def test_what_recurrent_layers_keep_of_drafts_is_planned(folder, prompt):
    """In a step of rows with drafts alone, and with a prompt behind them."""
    kernels = pytest.importorskip("kernels")
    raw, options = folder(**{"architectures": ["Qwen3_5ForCausalLM"], **DELTA}), json.dumps(DRAFTS)
    config = EngineConfig(raw, max_num_seqs=6, max_model_len=70, speculative_config=options)
    model = dry_run.dry_model(config, ModelConfig.from_folder(raw), kernels, torch.bfloat16, 70, Pipeline())
    dry = dry_run.dry_worker(config, model, kernels)
    run = StepRun()
    counts, drafts = np.array([4] * 5 + [prompt or 4]), np.array([3] * 5 + [0 if prompt else 3])
    run.shape = shape = dry.shape_of(counts, 1 + drafts, drafts)
    dry.forward_phases = dry.forward_phases[: dry.forward_phases.index(dry.score)]
    with torch.inference_mode(), torch.device("meta"), unlaunched(kernels_of(kernels)):
        for phase in dry.forward_phases:
            phase(run)
    kept = sum(see.args[0].untyped_storage().nbytes() for see in run.batch.drafts.later)
    assert kept == memory.kept_bytes(config, model) * shape.drafted // 6 and shape.drafted == 6 - (prompt > 0)
    plain, planned = (plan_memory(dataclasses.replace(config, speculative_config=fields), model, True)
                      for fields in (None, options))  # fmt: skip
    for name in ("activations", "graphs"):
        assert getattr(planned, name) >= getattr(plain, name) + kept > kept
    assert planned.states == plain.states


WIDE, HEADS, VOCAB = {"intermediate_size": 320}, {"num_attention_heads": 8, "head_dim": 32}, {"vocab_size": 9000}

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8,
    "kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 0, "routed_scaling_factor": 1.0, "max_position_embeddings": 48,
}  # fmt: skip


STATES = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **DELTA, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
GATED = STATES | {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "head_dim": 64}


STEPS = {
    "latents": (LATENT, [48], 1, "float32"),
    "latents in bfloat16": (LATENT, [48], 1, "bfloat16"),
    "mixed": (HEADS, [1, 1, 1, 45], 1, "float32"),
    "chunks": (HEADS, [20, 3, 9], 1, "bfloat16"),
    "mlp": (WIDE, [40], 1, "float32"),
    "mlp mixed": (WIDE, [1, 1, 30], 1, "bfloat16"),
    "decodes": (WIDE, [1] * 16, 1, "float32"),
    "windows": (
        {"architectures": ["MinistralForCausalLM"], "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention"]}, [1] * 8, 1, "float32"
    ),
    "vocabulary": (VOCAB, [1] * 8, 1, "float32"),
    "vocabulary of two": (VOCAB | {"vocab_size": 9001}, [5] * 2, 2, "float32"),
    "mlp of two": (WIDE | {"intermediate_size": 640}, [24], 2, "float32"),
    "experts": ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}, [40], 1, "float32"),
    "shared expert": (
        {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 640, **EXPERTS}, [24], 1,
        "bfloat16",
    ),
    "inputs of layers": ({"architectures": ["Gemma4ForCausalLM"], **GEMMA4}, [40], 1, "float32"),
    "experts beside": ({"architectures": ["Gemma4ForCausalLM"], **GEMMA4, **EXPERTS, **MOE}, [40], 1, "float32"),
    "states": (STATES, [40], 1, "float32"),
    "states in bfloat16": (STATES, [40], 1, "bfloat16"),
    "states of decodes": (STATES, [1] * 8, 1, "float32"),
    "gated": (GATED, [40], 1, "float32"),
}  # fmt: skip
# Those of the tier full: one of each kind of layer (latents come with experts), of prompts and of decodes.
BRIEF = ("latents", "windows", "mlp of two", "inputs of layers", "states")


def steps() -> list[Any]:
    """Cases of the tests, most of them of another tier."""
    tiers = {"vocabulary of two": [], **dict.fromkeys(BRIEF, pytest.mark.full)}
    return [pytest.param(*step, id=name, marks=tiers.get(name, pytest.mark.long)) for name, step in STEPS.items()]


@pytest.mark.interpreted
@pytest.mark.parametrize(("shape", "rows", "size", "dtype"), steps())
def test_a_step_takes_what_was_predicted(make, shape, rows, size, dtype):
    """It takes no more, and at least two thirds even in these shapes, in which small things count for much."""
    made = make(shape, size, dtype=dtype, max_num_seqs=len(rows), max_num_batched_tokens=sum(rows))
    plan, worker, kinds = made.memory, made.worker, len(made.model.layout.windows)
    new = [NewRow(slot=i, token_ids=[1] * n, blocks=[[*range(3 * i, 3 * i + 3)]] * kinds) for i, n in enumerate(rows)]
    with LiveBytes() as live:  # the second step begins while the first one's inputs are alive
        for step in range(2):
            plan_of_step = StepPlan(step, rows=list(enumerate(rows)), new=new, released=[*range(len(rows))] * step)
            assert worker.step(plan_of_step).error is None
    predicted = max(plan.activations, plan.logits + plan.sampling)
    assert live.peak <= predicted <= plan.step and predicted <= 1.5 * live.peak, (live.peak, plan)


@pytest.mark.interpreted
@pytest.mark.full
def test_a_graph_of_decodes_has_room_for_latents(make):
    """Its allowance is for rows of one token, which need no workspace for a whole context."""
    made = make(LATENT, max_num_seqs=8, max_num_batched_tokens=48)
    worker = made.worker
    pytest.importorskip("ops.matmul")._counters(torch.device("cpu"))  # made once, for all steps
    new = [NewRow(slot=i, token_ids=[1], blocks=[[i]]) for i in range(8)]
    with LiveBytes() as live:
        worker.step(StepPlan(0, rows=[(i, 1) for i in range(8)], new=new))
    predicted = max(dry_run.count_step(dry_run.dry_worker(made.config, made.model, made.ops), [1] * 8))
    assert live.peak <= predicted <= 2 * live.peak


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("layers", "drafts"),
    [
        pytest.param(None, 0, id="one stage", marks=pytest.mark.full),
        pytest.param(range(1), 0, id="first"),
        pytest.param(range(1), 3, id="first, with drafts", marks=pytest.mark.full),
        pytest.param(None, 2, id="with a head", marks=pytest.mark.full),
        pytest.param(range(1, 2), 0, id="last", marks=pytest.mark.full),
    ],
)
def test_captured_graphs_share_what_their_steps_take(make, monkeypatch, layers, drafts):
    """No graph but the largest needs memory of its own, and their pool is no larger than planned."""
    monkeypatch.setattr("device.startup.time_rows", lambda *args: [])  # without a warm-up it is late, too
    options = json.dumps(HEAD if drafts == 2 else DRAFTS) if drafts else None
    made = make(VOCAB, max_num_seqs=2, max_num_batched_tokens=15, speculative_config=options)
    worker, model, pipeline = made.worker, made.model, made.group.pipeline
    if layers:
        pipeline.stage, pipeline.stages, pipeline.layers, model.span = layers.start, 2, layers, layers
        pipeline.first, pipeline.last = layers.start == 0, layers.stop == 2
        worker.arrange()
    monkeypatch.setattr(BatchState, "sample", lambda self, ops, logits, *more: logits.argmax(-1))  # the sooner
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: contextlib.nullcontext())
    monkeypatch.setattr(warmup, "borrowed", borrowed)
    warmup.capture(made, worker)  # so that what kernels keep is there
    worker.graphs.clear(), getattr(worker.proposer, "graphs", {}).clear()
    with LiveBytes() as live:
        warmup.capture(made, worker)
        gc.collect()
    assert len(worker.graphs) == (16 if drafts and not layers else 8 if drafts else 4)
    assert not model.draft or [*worker.proposer.graphs] == [1, 2]
    passed, news = 2 * (1 + drafts) * 4 * sum(model.passed_sizes), 4 * 2 * 3 * (4 * (2 + drafts) if model.draft else 2)
    rows = 2 * (4 + 2 * 4 * model.config.hidden_size) if model.draft else 0  # where the head's passes read theirs
    assert live.now <= passed + news * pipeline.last + rows
    assert live.peak <= plan_memory(made.config, model, cuda=True).graphs - memory.GRAPHS + news


class EmptyGraph:
    """Stands in for a CUDA graph that nobody replays."""

    def __init__(self) -> None:
        self.capture_begin = self.capture_end = lambda **_: None


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(WIDE, marks=pytest.mark.long),
        pytest.param(LATENT, marks=pytest.mark.long),
        pytest.param({"architectures": ["Gemma4ForCausalLM"], **GEMMA4}, marks=pytest.mark.long),
    ],
    ids=["plain", "latents", "two kinds"],
)
def test_graphs_between_attentions_have_their_room(make, monkeypatch, shape):
    """The start captures them after those of decodes, and again after a sleep, and the plan has what they keep."""
    made = make(shape, max_num_seqs=2, max_num_batched_tokens=40)
    for name in ("Stream", "graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", EmptyGraph)
    monkeypatch.setattr(warmup, "borrowed", borrowed)
    worker = made.worker
    with LiveBytes() as live:
        warmup.capture(made, made.worker)
        gc.collect()
        kept, pieces = live.now, worker.pieces
    layers = made.model.config.num_layers
    assert pieces.sizes == [16, 32] and len(worker.graphs) == 4
    assert [len(cuts) for cuts in pieces.captured.values()] == [layers + 1] * 2
    tensors = [pieces.input_ids, pieces.positions, pieces.slots, pieces.slot_mapping, *pieces.buffers.values()]
    other = dry_run.dry_worker(made.config, made.model, made.ops)
    step, graphs = dry_run.count_step(other, [32])[0], 2 * (layers + 1) * memory.PIECE
    assert memory.piece_bytes(made.config, other) - step - graphs == sum(map(lambda x: x.nbytes, tensors)) <= kept
    planned = plan_memory(made.config, made.model, True).graphs - memory.GRAPHS - graphs
    assert live.peak <= planned
    worker.sleep(1)
    assert worker.pieces is None
    worker.wake_up(["weights", "kv_cache"], "")
    assert worker.pieces.pool is worker.pool


MIXED = {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}


@pytest.mark.parametrize(
    ("shape", "fields", "sizes"),
    [
        ({}, {"max_num_batched_tokens": 256}, [16, 32, 64, 128, 192, 256]),
        ({}, {"enforce_eager": True}, []),
        ({}, {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, []),
        ({"architectures": ["Qwen3_5ForCausalLM"], **DELTA}, {}, []),
        (MIXED, {"max_num_batched_tokens": 256}, [16, 32, 64, 128, 192, 256]),
        (MIXED, {"enable_expert_parallel": True, "data_parallel_size": 2, "distributed_executor_backend": "mp"}, []),
    ],
)
def test_which_models_are_cut_at_attention(folder, shape, fields, sizes):
    config = EngineConfig(folder(**shape), **fields)
    group = Group(0, 1, experts=ExpertGroup.of(config), pipeline=Pipeline(0, config.pipeline_parallel_size))
    model = Transformer(ModelConfig.from_folder(config.model), reference, "meta", torch.bfloat16, 70, group)
    assert memory.piece_sizes(config, model) == sizes


@pytest.mark.interpreted
@pytest.mark.full
def test_products_of_our_own_have_room_for_their_parts(make):
    made = make(WIDE, batch_invariant=True, max_num_seqs=3, max_num_batched_tokens=48)
    worker = made.worker
    with LiveBytes() as live:
        worker.step(StepPlan(0, rows=[(0, 48)], new=[NewRow(slot=0, token_ids=[1] * 48, blocks=[[0, 1, 2]])]))
    assert live.peak <= made.memory.activations


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("k", "rows"), [*(pytest.param(k, 9, marks=pytest.mark.full) for k in (0, 1, 700)), (20, 9), (9000, 3)]
)
def test_log_probabilities_stay_within_their_workspace(make, monkeypatch, k, rows):
    """They do so however many are asked for, and do not depend on how many rows go into a call."""
    monkeypatch.setattr(logprobs, "WORKSPACE", MIB)
    made = make(VOCAB, max_num_seqs=rows, max_num_batched_tokens=rows)
    assert made.memory.logprobs == MIB and (logprobs.rows_at_once(k, 9000) < rows) == (k >= 700)
    logits, sampled = torch.randn(rows, 9000), torch.arange(rows)
    with LiveBytes() as live:
        parts, gathered = [], made.worker.gatherer.gather(logits, sampled, torch.arange(rows), [k] * rows)
        for part in gathered.columns:  # a GPU's leave for the host at once
            parts.append([column.numpy().copy() for column in part])
            del part
    assert live.peak <= MIB
    whole = reference.logprobs(logits, sampled, k)
    for ours, want in zip(zip(*parts, strict=True), whole, strict=True):
        np.testing.assert_allclose(np.concatenate(ours), want.numpy(), atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.full)])
def test_a_prompt_that_is_scored_takes_no_more_than_a_step_may(make, monkeypatch, backend):
    """All of its tokens are scored in one step, in parts of as many rows as may sample."""
    monkeypatch.setattr(logprobs, "WORKSPACE", MIB)
    monkeypatch.setattr(cpu_sampling, "LOGPROB_LOGITS", 2**15)
    made = make(VOCAB, backend=backend, max_num_seqs=16, max_num_batched_tokens=50)
    new = [NewRow(slot=0, token_ids=[1] * 50, blocks=[[0, 1, 2, 3]], score=(20, 1, 50))]
    with LiveBytes() as live:
        result = made.worker.step(StepPlan(0, rows=[(0, 50)], new=new))
    made.model.ops = pytest.importorskip("kernels")  # whose steps are those that are planned
    assert len(result.scores[0]) == 49 and live.peak <= plan_memory(made.config, made.model, False).step


@pytest.mark.interpreted
def test_profile_runs_as_many_tokens_as_a_step_may_have(make, monkeypatch):
    """There are several rows where one cannot be so long. A count of CPU tensors stands in for what CUDA's allocator
    reserves."""
    made, seen = make(WIDE, max_model_len=12, max_num_seqs=6, max_num_batched_tokens=40, block_size=8), []
    forward = made.model.forward
    made.model.forward = lambda batch, *args: seen.append(len(batch.input_ids)) or forward(batch, *args)
    with LiveBytes() as live:
        fake = SimpleNamespace(memory_reserved=lambda: live.now, max_memory_reserved=lambda: live.peak)
        fake.reset_peak_memory_stats = lambda: live.mark("")
        monkeypatch.setattr(torch, "cuda", fake)
        took = pools.profile(made)
        gc.collect()
        assert live.now == 0 and seen == [36]
    assert 0.6 * made.memory.activations < took <= made.memory.step


def plan_of(**fields) -> MemoryPlan:
    zeros = dict.fromkeys(MemoryPlan.__slots__, 0)
    return MemoryPlan(**zeros | fields)


def test_room_is_what_is_left():
    plan = plan_of(weights=500, state=20, activations=90, logits=50, sampling=30, logprobs=41, graphs=7, context=60)
    assert plan.step == 91 and plan_of(activations=92, logits=50, sampling=42).step == 92
    assert plan.room(1000, 560) == 1000 - 560 - 91 - 20 - 7 == plan.room(1000, 560, 80)
    assert plan.room(1000, 560, 200) == 1000 - 560 - 200 - 20 - 7
    assert plan.room(600, 560) == 600 - 560 - 91 - 20 - 7  # so much is missing


@pytest.mark.parametrize("fields", [{}, {"quantization": "int4"}])
def test_weights_that_are_too_large(folder, fields):
    """The line says how much is missing, and what takes less."""
    config = EngineConfig(folder(**SHAPE), load_format="dummy", **fields)
    shape = ModelConfig.from_folder(config.model)
    model = memory.settled_model(config, shape, reference, torch.bfloat16, 64, Pipeline())
    plan = plan_of(weights=3 * 2**30, block=MIB)
    remedy = r"fewer bits \(--quantization\), more GPUs \(--tensor-parallel-size\), or lower max_num_batched_tokens"
    with pytest.raises(ValueError, match=rf"take 3\.00 GiB, 1\.50 more than there is room for: use {remedy} and max"):
        memory.check_pool(config, model, plan, MIB - 3 * 2**29)
    memory.check_pool(config, model, plan, MIB)


@pytest.mark.interpreted
def test_start_takes_the_larger_of_predicted_and_measured(make, monkeypatch):
    """A made-up GPU has 1,000 MB, of which 90% may be used and 120 are in use already."""
    made = make(max_num_seqs=2, max_num_batched_tokens=8)
    plan = plan_of(weights=70 * 10**6, state=5 * 10**6, activations=30 * 10**6, graphs=10**6, block=10**6)
    made.device, made.memory, reserved = "cuda", plan, []  # MB, with the cache; without it; both after the profile
    fake = SimpleNamespace(
        memory_reserved=lambda: reserved[0] * 10**6,
        empty_cache=lambda: reserved.pop(0),
        mem_get_info=lambda: (880 * 10**6, 1000 * 10**6),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    for peak, step in ((20, 30), (63, 60)):
        reserved[:] = [99, 80, 83]
        monkeypatch.setattr(pools, "profile", lambda start, peak=peak: peak * 10**6)
        assert pools.free_bytes(made) == (900 - 120 - step - 5 - 1) * 10**6
        assert made.measured == (peak - 3) * 10**6


def test_memory_that_a_closed_engine_left_to_torch_is_free(monkeypatch):
    """A made-up GPU of 80 GiB, of which torch keeps 72 for later."""
    kept = [72]
    fake = SimpleNamespace(empty_cache=kept.clear, mem_get_info=lambda: ((80 - sum(kept)) * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch, "cuda", fake)
    config = EngineConfig(load_format="dummy")
    model = dataclasses.replace(ModelConfig.from_folder(DEMO), vocab_size=2**22, hidden_size=2**10)  # 8 GiB and more
    check_room(config, model, reference, torch.bfloat16, 100, Pipeline(), "cuda")
    fake.mem_get_info = lambda: (7 * 2**30, 80 * 2**30)
    with pytest.raises(ValueError, match=r"take 8\.\d+ GiB, 6\.04 more than .*: use fewer bits"):
        check_room(config, model, reference, torch.bfloat16, 100, Pipeline(), "cuda")


@pytest.mark.parametrize("family", ["bloom", "deepseek-v3", "gemma3"])
def test_there_is_room_for_all_tables_of_rope(monkeypatch, family):
    """Of which a model may have none, one that is not as wide as a head, or two."""
    config = EngineConfig(load_format="dummy")
    shape = ModelConfig.from_folder(str(ROOT / "tests/data/families" / family))
    model = Transformer(shape, reference, "meta", torch.bfloat16, 64, Group(0, 1))
    free = [count_bytes(model.owners())]
    monkeypatch.setattr(machine, "available_bytes", lambda: free[0])
    check_room(config, shape, reference, torch.bfloat16, 64, Pipeline(), "cpu")
    free[0] -= 1
    with pytest.raises(ValueError, match="more than there is room for"):
        check_room(config, shape, reference, torch.bfloat16, 64, Pipeline(), "cpu")


def test_the_room_for_a_draft_and_for_few_bits(monkeypatch):
    """A draft that is a model of its own takes as much as the demo itself. int8 takes half of bfloat16."""
    shape, drafts = ModelConfig.from_folder(DEMO), {"method": "draft_model", "model": DEMO, "num_speculative_tokens": 2}
    size = count_bytes(Transformer(shape, reference, "meta", torch.bfloat16, 1, Group(0, 1)).owners())
    for fields, most in (({}, 1), ({"speculative_config": drafts}, 2), ({"quantization": "int8"}, 0.5)):
        config = EngineConfig(load_format="dummy", **fields)
        for free, fits in ((most * size + 4096, True), (most * size - 4096, False)):
            monkeypatch.setattr(machine, "available_bytes", lambda free=free: free)
            with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="the weights take"):
                check_room(config, shape, reference, torch.bfloat16, 1, Pipeline(), "cpu")


def test_blocks_of_a_pool():
    config = EngineConfig(block_size=16, max_num_seqs=8)
    assert fit_pool(config, (0,), 1000, 100) == (56, 100) and fit_pool(config, (0,), 40, 100) == (40, 100)
    assert fit_pool(config, (0,), 5, 100) == (5, 80)
    for held, fits, fields in ((0, 0, {}), (80, 5, {"max_model_len": 100})):
        with pytest.raises(ValueError, match=rf"max_model_len is 100; the KV pool of {fits} .* holds {held} tokens"):
            fit_pool(EngineConfig(block_size=16, **fields), (0,), fits, 100)


@pytest.mark.parametrize("measured", [0, 105, 106])
def test_the_start_log_warns_where_a_step_took_more_than_was_planned(measured):
    memory = dict.fromkeys(MemoryPlan.__slots__, 7 * MIB) | {"predicted": 100 * MIB, "measured": measured * MIB}
    note = memory_note(memory)
    size = f"{measured} MiB" if measured else "nothing"
    assert f"100 MiB predicted for a step, {size} measured" in note
    assert (f"warning   a step took {measured} MiB, and the plan was 100 MiB" in note) == (measured == 106)
    assert memory_note(memory | {"context": 0}) == ""


@pytest.mark.parametrize(
    ("total", "fields", "tokens"),
    [
        (0, {}, 2048),
        (24 * 2**30, {}, 8192),
        (79 * 2**30, {}, 16384),
        (24 * 2**30, {"max_num_seqs": 9000}, 9000),
        (79 * 2**30, {"max_num_batched_tokens": 300}, 300),
        (0, {"max_num_seqs": 3000}, 3000),
    ],
)
def test_a_larger_device_has_larger_steps(total, fields, tokens):
    assert settle_tokens(EngineConfig(**fields), total).token_budget == tokens


def test_the_scheduler_has_the_steps_that_the_worker_has_room_for(monkeypatch):
    """Only the worker knows its device."""
    facts = startup.facts
    monkeypatch.setattr(startup, "facts", lambda *args: facts(*args) | {"max_num_batched_tokens": 777})
    core = EngineCore(EngineConfig(device="cpu", max_num_seqs=2))
    assert core.config.token_budget == core.scheduler.config.token_budget == 777
    core.close()


def plan_lines(capsys, gib: float | None = None, **fields) -> dict[str, str]:
    config = EngineConfig(**fields)
    print_plan(config, ModelConfig.from_folder(config.model), gib)
    return {line[:22].strip(): line[22:] for line in capsys.readouterr().out.splitlines()}


def test_plan_of_a_gpu_adds_up(capsys, folder):
    """The plan is for a Llama 3.1 8B, whose figures are known, on one and on two GPUs of 80 GiB."""
    pytest.importorskip("triton")
    model = folder(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=4096,
        intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131072, torch_dtype="bfloat16",
    )  # fmt: skip
    plans = []
    for size in (1, 2):
        lines = plan_lines(capsys, 80.0, model=model, tensor_parallel_size=size, distributed_executor_backend="mp")
        assert lines["activations"].endswith("of 16,384 tokens")
        mib = {name: float(rest.split()[0].replace(",", "")) for name, rest in lines.items() if "MiB" in rest}
        taken = ("weights", "batch state", "largest step", "CUDA graphs", "CUDA and libraries", "KV pool")
        block = 32 * 2 * 8 * 64 * 128 * 2 / size / MIB
        assert 0 <= 72 * 1024 - sum(mib[name] for name in taken) < block + 1
        plans.append(mib)
    one, two = plans
    rotations = 131072 * 2 * 128 * 4 / MIB
    assert one["weights"] == pytest.approx(8_030_261_248 * 2 / MIB + rotations, abs=0.1)
    assert two["weights"] == pytest.approx((8_030_261_248 + 65 * 4096) / MIB + rotations, abs=0.1)  # norms on both
    assert two["batch state"] == one["batch state"]


def test_plan_on_a_cpu_is_what_a_worker_does(capsys, monkeypatch):
    lines = plan_lines(capsys, device="cpu", max_num_seqs=3)
    worker = start_worker(EngineConfig(device="cpu", max_num_seqs=3), ModelConfig.from_folder(DEMO))
    facts = worker.facts()
    assert f"{facts['num_blocks']:,} blocks of 64 =" in lines["KV pool"]
    assert lines["weights"].strip() == f"{facts['memory']['weights'] / MIB:,.1f} MiB"
    assert facts["memory"]["state"] == count_bytes([worker.state]) and facts["memory"]["measured"] == 0
    assert worker.state.bad_words.numel() == 3 * 128 * 16  # and they are a part of that
    assert worker.state.bad_words.untyped_storage().data_ptr() == worker.state.words.untyped_storage().data_ptr()
    assert "CUDA graphs" not in lines


def test_the_driver_is_asked_for_the_gpu(monkeypatch):
    commands, sizes = [], "143771\n81559\n[N/A]\n"
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: commands.append(command[3:]) or SimpleNamespace(stdout=sizes)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert memory.gpu_bytes() == 81559 * MIB and commands == [[]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert memory.gpu_bytes() == 81559 * MIB and commands[1] == ["--id=2,3"]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert memory.gpu_bytes() == 0


@pytest.mark.parametrize(
    ("gib", "fields", "message"),
    [
        (0.0, {}, "plan is 0.0; it must be above 0 and at most 1048576 GiB"),
        (float("nan"), {}, "plan is nan; it must be above 0"),
        (8.0, {"device": "cpu"}, "plan is 8.0, the GiB of a GPU; with device 'cpu' it must be left out"),
        (None, {"device": "cuda"}, "device is 'cuda'; this machine has none"),
        (8.0, {"block_size": 24}, r"block_size is 24; on cuda it must be one of \(16, 32, 64, 128\)"),
        (8.0, {"max_model_len": 2000}, "max_model_len is 2000; the model was made for at most 1024"),
        (8.0, {"tensor_parallel_size": 5}, "tensor_parallel_size is 5; it must divide"),
        (0.5, {"max_model_len": 100}, "the weights take 0.00 GiB, 0.57 more than there is room for: use fewer bits"),
    ],
)
def test_what_cannot_be_is_told_by_value_and_range(monkeypatch, gib, fields, message):
    pytest.importorskip("triton")
    monkeypatch.setattr(startup, "gpu_bytes", lambda: 0)
    with pytest.raises(ValueError, match=message):
        print_plan(EngineConfig(**fields), ModelConfig.from_folder(DEMO), gib)


def test_interpreted_kernels_take_blocks_of_a_power_of_two():
    model = ModelConfig.from_folder(DEMO)
    with pytest.raises(ValueError, match="block_size is 24; for backend 'triton' it must be a power of two"):
        startup.check_sizes(EngineConfig(backend="triton", block_size=24), model, "cpu")
    assert startup.check_sizes(EngineConfig(backend="triton", block_size=8), model, "cpu") == 1024


@pytest.mark.full
def test_the_server_prints_the_plan_and_ends():
    command = [sys.executable, "server.py", "--plan", "24", "--max-num-seqs", "16"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "KV pool" in done.stdout and not done.stderr
    assert "requests at the full length of 1,024 that fit: 16, of max_num_seqs 16" in done.stdout
