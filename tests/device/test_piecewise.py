"""Graphs of what lies between attentions, recorded by a stand-in for CUDA's."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference
from config import EngineConfig
from device import memory
from device.compile_guard import CompileGuard
from device.exchanges import make_up
from device.piecewise import PiecewiseGraphs
from model import Transformer
from model_config import ModelConfig
from models.packing import be_batch_invariant
from parallel import Group
from plan import StepPlan
from worker_steps import ONE_LAYER, SHAPE, WINDOWS, row, worker_in

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 0, "routed_scaling_factor": 1.0,
}  # fmt: skip
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def make(tmp_path: Path):
    return partial(worker_in, tmp_path)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}  # fmt: skip
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
FEW = EXPERTS | LARGE | {"num_experts": 8, "moe_intermediate_size": 14336}


@pytest.mark.parametrize(
    ("shape", "fields", "last", "before"),
    [
        (SMALL, {}, 8192, 7168),
        (SMALL, {"max_num_batched_tokens": 2000}, 1792, 1536),
        (SMALL, {"batch_invariant": True}, 8192, 7168),
        (LARGE, {}, 1024, 896),
        (LARGE, {"max_num_batched_tokens": 512}, 512, 448),
        (LARGE | {"num_attention_heads": 64, "intermediate_size": 25600}, {}, 512, 448),
        (FEW, {}, 512, 448),  # a token meets two of eight experts
    ],
)
def test_steps_are_cut_as_long_as_the_gpu_waits_for_python(tmp_path, shape, fields, last, before):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | QWEN3 | shape))
    config = EngineConfig(str(tmp_path), **{"max_num_batched_tokens": 16384} | fields)
    model = Transformer(ModelConfig.from_folder(config.model), reference, "meta", torch.bfloat16, 2, Group())
    if config.batch_invariant:
        be_batch_invariant(model)
    sizes = memory.piece_sizes(config, model)
    assert sizes == [size for size in memory.PIECE_SIZES if size <= last] and sizes[-2] == before


def test_a_token_is_multiplied_by_the_elements_that_it_meets(tmp_path):
    flops = []
    for shape in (SMALL, EXPERTS | {"num_attention_heads": 8}):
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | QWEN3 | shape))
        config = ModelConfig.from_folder(str(tmp_path))
        flops.append(memory.layer_flops(Transformer(config, reference, "meta", torch.bfloat16, 2, Group())))
    elements = 1024 * (16 + 2 * 8 + 16) * 128 + 3 * 1024 * 3072
    dense, experts = 32 * (8 + 2 * 8 + 8) * 128 + 4 * 32, 4 * 3 * 32 * 16  # a token meets 2 of 4 experts
    assert flops == [2 * elements, 2 * (dense + experts / 2)]


class RecordedGraph(TorchDispatchMode):
    """Stands in for a CUDA graph: notes each operator and each kernel with its tensors, and `replay` runs them again.

    What a capture has computed is overwritten by NaN, because a capture on a GPU computes nothing.
    """

    KERNELS: ClassVar[list] = []
    replays = 0  # of all

    def capture_begin(self, pool: str) -> None:
        assert pool == "memory"
        self.notes, self.noting = [], True
        for kernel in self.KERNELS:
            kernel.run = partial(self.launch, kernel.run)
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for kernel in self.KERNELS:
            del kernel.run
        for _, args, kwargs, made in self.notes:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.is_mkldnn]
            ours = {tensor.untyped_storage()._cdata for tensor in given}
            for tensor in tree_leaves(made) if made is not None else ():
                if torch.is_floating_point(tensor) and tensor.untyped_storage()._cdata not in ours:
                    tensor.fill_(torch.nan)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if self.noting:
            self.notes.append((operator, args, kwargs or {}, made))
        return made

    def launch(self, run, *args, **kwargs) -> None:
        self.noting = False  # the interpreter runs operators, too
        run(*args, **kwargs)
        self.noting = True
        self.notes.append((run, args, kwargs, None))

    def replay(self) -> None:
        RecordedGraph.replays += 1
        for run, args, kwargs, made in self.notes:
            for old, new in zip(tree_leaves(made), tree_leaves(run(*args, **kwargs)), strict=True):
                if old is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:All-NaN")  # which the capture leaves between its graphs
@pytest.mark.parametrize(
    ("shape", "adapters"),
    [
        (ONE_LAYER, 0),
        pytest.param(ONE_LAYER, 2, marks=pytest.mark.full),
        *(pytest.param(shape, 0, marks=pytest.mark.long) for shape in ({}, EXPERTS | ONE_LAYER, WINDOWS, LATENT)),
    ],
    ids=["one layer", "adapters", "plain", "experts", "windows", "latents"],
)
def test_small_steps_with_prompts_replay_what_is_between_attentions(make, few_programs, monkeypatch, shape, adapters):
    """Tokens and what is stored are those of a worker that launches everything. Larger steps have no graphs.

    What the ranks have exchanged is known in both cases. A rank that has failed pads as the others do. With adapters
    some steps have a row with one, and some have none.
    """
    fields = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} if adapters else {}
    worker = make(shape, backend="triton", max_num_batched_tokens=32, swap_space=0.0, **fields)
    told, pools, exchanged = [], [], []
    if adapters:
        worker.adapters.pool.normal_()
    group = worker.group
    group.all_reduce = lambda x: group.exchanged.append((x.shape[1:], x.dtype)) or x
    model, kinds = worker.model, range(len(worker.model.layout.windows))
    steps = [[(0, 12)], [(0, 1), (1, 5)], [(0, 1), (1, 1), (2, 3), (3, 12)], [(0, 1), (3, 1), (2, 5)]]
    entering, large, usual = [[0], [1], [2, 3], []], [], model.forward
    for graphs in (False, True):
        worker.pool.zero_()
        if graphs:
            fakes = {"CUDAGraph": RecordedGraph, "Stream": object, "synchronize": lambda: None}
            fakes["stream"] = lambda stream: contextlib.nullcontext()
            monkeypatch.setattr(RecordedGraph, "replays", 0)
            monkeypatch.setattr(RecordedGraph, "KERNELS", [*CompileGuard(worker.ops).kernels.values()])
            with torch.inference_mode(), monkeypatch.context() as patch:
                for name, fake in fakes.items():
                    patch.setattr(torch.cuda, name, fake)
                worker.pieces = PiecewiseGraphs(model, worker.pool, [8, 16], "memory", worker.adapters)
            model.forward = lambda batch, *more: large.append(len(batch.slots)) or usual(batch, *more)
        for step, rows in enumerate(steps):
            new = [row(i, [3 + i, 4, 5 * i] * 4, num_logprobs=2, temperature=i / 4) for i in entering[step]]
            for one in new:
                one.blocks = [[8 * one.slot + 4 * kind, 8 * one.slot + 4 * kind + 1] for kind in kinds]
                one.adapter = min(one.slot, adapters)
            told.append(worker.step(StepPlan(step, rows=rows, new=new)))
            exchanged.append([*group.exchanged])
        pools.append(worker.pool.clone())
    assert large == [4] and RecordedGraph.replays == 3 * (model.config.num_layers + 1)
    assert exchanged[:4] == exchanged[4:] and all(len(found) == 2 * model.config.num_layers for found in exchanged)
    for one, other in zip(told[:4], told[4:], strict=True):
        assert one.token_ids == other.token_ids and not one.error
        for i, scores in one.logprobs.items():
            assert scores.ids == other.logprobs[i].ids
            assert scores.values == pytest.approx(other.logprobs[i].values, abs=1e-4)
    assert torch.allclose(*pools, atol=1e-5) and torch.equal(pools[0] == 0, pools[1] == 0) and pools[0].any()
    group.exchanged, sent = [], []
    group.all_reduce = group.all_gather = lambda x, *_: sent.append(len(x))
    make_up(worker, worker.rows)  # of the last step, which has 7 tokens
    assert sent == [8] * 2 * model.config.num_layers + [worker.rows.shape.samples]
