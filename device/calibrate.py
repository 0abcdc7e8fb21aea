"""GPTQ over a whole model, in one step of an engine that all tokens of a calibration text go through.

A `Learner` stands in the place of each matrix. When the step comes to it, it chooses its codes for the inputs that it
gets, and answers with the product of these codes. So each matrix learns behind those that are in few bits already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from checkpoints.dequantize import CodedRows
from checkpoints.gptq import gptq
from checkpoints.rounding import codes_of
from config import EngineConfig
from core import EngineCore
from device.coded import PLAIN, key
from device.startup import pick_device
from models.shares import Parts, TensorPart
from plan import EngineCoreRequest, EngineOutput
from sampling_params import SamplingParams


class Learner:
    """A matrix whose codes are chosen at its first product.

    Args:
        weight: [n, inputs], which becomes the numbers of these codes.
        kind: int8, int4 or fp8.
        group: neighbouring inputs that share a scale; -1: all of them.
        dtype: of the scales.
    """

    def __init__(self, weight: torch.Tensor, kind: str, group: int, dtype: torch.dtype):
        self.weight, self.kind, self.dtype = weight, kind, dtype
        self.group = group if group > 0 else weight.shape[1]
        self.codes: CodedRows | None = None  # [n, inputs] int8 or e4m3, and scales [n, groups]
        self.tokens = 0  # that it has learned from

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [.., inputs] W^T + bias, where W has its codes."""
        if self.codes is None:
            self.learn(x.flatten(0, -2).float())
        return F.linear(x, self.weight, bias)

    def learn(self, inputs: torch.Tensor) -> None:
        """Choose the codes for inputs [tokens, inputs] float32."""
        values, scales = gptq(self.weight.float(), inputs.T @ inputs, self.kind, self.group, self.dtype)
        wide = scales.repeat_interleave(self.group, 1)[:, : values.shape[1]]
        self.weight.copy_(values * wide)
        codes = codes_of(values, self.kind).cpu()
        self.codes, self.tokens = CodedRows(codes, scales.to(self.dtype).cpu()), len(inputs)


def calibrate(
    config: EngineConfig, chunks: list[list[int]], kind: str, group: int, dtype: torch.dtype
) -> dict[str, CodedRows]:
    """The codes of a model's matrices, by our names of the tensors of its checkpoint. Experts are not among them, nor
    is a matrix that no token came to. Each chunk of token ids is a prompt; the other arguments are those of `Learner`.
    A ValueError if a step has no room for all tokens."""
    tokens, parts, learners = sum(map(len, chunks)), Parts(), dict[int, Learner]()
    config = replace(config, max_num_seqs=len(chunks), max_num_batched_tokens=tokens)
    if pick_device(config.device) == "cpu":  # whose own ops would pack the matrices
        config = replace(config, backend="reference", dtype="float32")

    def put_learners(core: EngineCore) -> None:
        (model,) = core.executor.collective_rpc(lambda worker: worker.model)
        parts.update(model.parameters())
        for owner in model.owners():
            for name in owner.matrices:
                weight = getattr(owner, name)
                if name not in PLAIN and isinstance(weight, torch.Tensor):
                    learner = learners.setdefault(key(weight), Learner(weight, kind, group, dtype))
                    setattr(owner, name, learner)

    run_chunks(config, chunks, SamplingParams(temperature=0.0, max_tokens=1), put_learners)
    assert learners, "a model without a matrix"
    if (most := max(learner.tokens for learner in learners.values())) < tokens:
        raise ValueError(f"the calibration has {tokens} tokens, and a step has room for {most}; give a shorter text")
    return {name: codes for name, part in parts.items() if (codes := gathered(part, learners))}


def run_chunks(
    config: EngineConfig, chunks: list[list[int]], params: SamplingParams,
    before: Callable[[EngineCore], None] = lambda core: None,
) -> list[EngineOutput]:  # fmt: skip
    """Run each chunk of token ids as a prompt, in an engine of its own, which `before` may change."""
    config = replace(
        config, max_model_len=max(map(len, chunks)) + 1, enforce_eager=True, enable_prefix_caching=False,
        swap_space=0.0, disable_log_stats=True,
    )  # fmt: skip
    core, outputs = EngineCore(config), list[EngineOutput]()
    try:
        before(core)
        for i, chunk in enumerate(chunks):
            core.add(EngineCoreRequest(str(i), chunk, params))
        while core.has_work():
            outputs += core.step()
        return outputs
    finally:
        core.close()


def gathered(part: TensorPart, learners: dict[int, Learner]) -> CodedRows | None:
    """The codes of a tensor of the checkpoint, whose rows may lie in several of the model's matrices; None if one of
    them has not learned."""
    pieces = [(learners.get(key(piece.target)), piece) for piece in part.pieces]
    learned = [(learner.codes[:2], piece) for learner, piece in pieces if learner and learner.codes]
    if not pieces or len(learned) < len(pieces):
        return None
    shape = part.view or part.shape
    wholes = [x.new_empty(*shape[:-1], x.shape[1]) for x in learned[0][0]]
    for tables, (target, at) in learned:
        size = shape[-1]
        strides = [stride // size for stride in target.stride()[:-1]]
        rows = torch.arange(len(tables[0])).as_strided(target.shape[:-1], strides, target.storage_offset() // size)
        for whole, rows_of in zip(wholes, tables, strict=True):
            bits = torch.uint8 if whole.itemsize == 1 else whole.dtype  # torch moves no 8-bit floats by index
            whole.view(bits)[at] = rows_of.view(bits)[rows]
    return CodedRows(*(x.flatten(0, -2) for x in wholes))
