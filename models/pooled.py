"""Pooled vectors, and what becomes of them: dimensions, scale, probabilities."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from batch_state import to_host
from checkpoints.storage import opened
from config import EngineConfig
from layers import New, Owner
from model_config import ModelConfig
from models.family_row import LABEL_HEADS
from models.pooling import MODULE_WEIGHTS, Dense, dense_layers
from models.shares import Parts, Shares, TensorPart, TensorPiece
from sampling_params import PoolingParams

if TYPE_CHECKING:
    from model import Transformer


class LabelHead(Owner):
    """A classification head in float32, the same on each rank, as its row of `LABEL_HEADS` says.

    The last matrix may be rows of a language model's head, for `ModelConfig.label_tokens`.
    """

    def __init__(self, c: ModelConfig, new: New):
        size, count, row = c.hidden_size, len(c.label_tokens or c.labels), LABEL_HEADS[c.row.label_head]
        self.tokens, self.vocab_size = c.label_tokens, c.vocab_size
        self.table = f"{c.row.name('embed' if c.tie_word_embeddings else 'head')}.weight"
        new = partial(new, dtype=torch.float32)
        self.row, self.eps = row, c.norm_eps
        self.out, self.out_bias = new(count, size), new(count) if row.bias else None
        self.dense = new(size, size) if row.dense else None
        self.dense_bias = new(size) if row.dense and c.row.label_bias else None
        self.norm = new(size) if row.norm else None
        self.norm_bias = new(size) if row.norm and c.row.norm_bias else None

    def parts(self, shares: Shares) -> Parts:
        if self.tokens:
            rows = zip(self.out.split(1), self.tokens, strict=True)
            pieces = tuple(TensorPiece(row, (slice(token, token + 1), slice(None))) for row, token in rows)
            return {self.table: TensorPart((self.vocab_size, self.out.shape[1]), pieces)}
        row = self.row
        weights = {row.out: (self.out, self.out_bias), row.dense: (self.dense, self.dense_bias)}
        weights[row.norm] = self.norm, self.norm_bias  # nothing of a name that is empty
        names = {f"{name}.weight": (weight, "all") for name, (weight, _) in weights.items()}
        return shares.parts(names | {f"{name}.bias": (bias, "all") for name, (_, bias) in weights.items()})

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """The outputs [B, labels] for pooled hidden states [B, hidden]."""
        if self.dense is not None:
            pooled = getattr(F, self.row.activation)(F.linear(pooled, self.dense, self.dense_bias))
        if self.norm is not None:
            pooled = F.layer_norm(pooled, self.norm.shape, self.norm, self.norm_bias, self.eps)
        outputs = F.linear(pooled, self.out, self.out_bias)
        return outputs[..., 1:] - outputs[..., :1] if len(self.tokens) == 2 else outputs


class Pooler:
    """Makes one vector of each prompt's hidden states.

    Args:
        ops: the backend. config: of the model. layers: what follows the pooling.
    """

    def __init__(self, ops: ModuleType, config: ModelConfig, layers: Sequence[torch.nn.Module] = ()):
        self.ops, self.config, self.layers = ops, config, layers

    @classmethod
    def of(cls, config: EngineConfig, model: Transformer) -> Pooler | None:
        """The pooler of an engine with these options; None where prompts are not pooled."""
        if not config.makes_vectors:
            return None
        size = model.config.hidden_size * len(model.config.poolings)
        dense = dense_layers(config.folder, size) if config.task == "embed" else []
        dummy = config.load_format == "dummy" or model.device == "meta"
        layers = [load_dense(layer, "" if dummy else config.folder, model.device) for layer in dense]
        return cls(model.ops, model.config, layers)

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor, head: LabelHead | None) -> torch.Tensor:
        """A vector for each prompt [B, size or labels] float32 of hidden states [T, hidden].

        Where a model has a classification `head`, it is the head's outputs.
        """
        pooled = torch.cat([self.ops.pool(hidden, starts, kind) for kind in self.config.poolings], 1)
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled if head is None else head(pooled)

    def of_tokens(
        self, hidden: torch.Tensor, counts: list[int], wanted: list[PoolingParams | None], head: LabelHead | None
    ) -> dict[int, torch.Tensor]:
        """A vector of each token [count, size or labels] of the prompts that ask for it, by their place, on the host.

        They are made of hidden states [T, hidden] of prompts of `counts` tokens as a vector of the prompt would be.
        """
        layers: list[Callable[[torch.Tensor], torch.Tensor]] = [*self.layers, *([] if head is None else [head])]
        made, end = {}, 0
        for i, (count, params) in enumerate(zip(counts, wanted, strict=True)):
            begin, end = end, end + count
            if params is not None and params.by_token:
                vectors = hidden[begin:end].clone()  # the next step may write there
                for layer in layers:
                    vectors = layer(vectors.float())
                made[i] = to_host(vectors)
        return made

    def finish(
        self, wanted: list[PoolingParams | None], by_token: dict[int, torch.Tensor], pooled: np.ndarray
    ) -> list[bytes]:
        """Finish the vectors `pooled` [B, size or labels] float32, or those that `of_tokens` has made, as each request
        asks; returns their bytes, as float32.

        An embedding is cut to its first `dimensions` and divided by its length. The outputs of a classification head
        become probabilities. Each of these is done where the request asks for it, or where it leaves the choice to the
        model and that does it.
        """
        config, results = self.config, []
        labelled = config.head == "labels"
        usual = config.label_activation if labelled else "normalize" if config.normalize else "identity"
        kind = usual if labelled else "normalize"
        for i, params in enumerate(wanted):
            assert params is not None
            x = by_token[i].float().numpy() if i in by_token else pooled[i]
            x = x[..., : params.dimensions]
            activation = usual if params.use_activation is None else kind if params.use_activation else "identity"
            if activation == "normalize":
                x = x / np.linalg.norm(x, axis=-1, keepdims=True).clip(1e-12)
            elif activation == "softmax":
                x = np.exp(x - x.max(-1, keepdims=True))
                x /= x.sum(-1, keepdims=True)
            elif activation == "sigmoid":
                x = 0.5 * (1 + np.tanh(0.5 * x))  # 1 / (1 + exp(-x)), which cannot overflow
            results.append(x.astype(np.float32).tobytes())
        return results


class DenseLayer(torch.nn.Module):
    """The layer of a `Dense`. Its parts are called as in sentence-transformers' files."""

    def __init__(self, dense: Dense):
        super().__init__()
        self.linear = torch.nn.Linear(dense.inputs, dense.outputs, dense.bias)
        self.activation = getattr(torch.nn, dense.activation)()
        self.residual: torch.nn.Module | None = torch.nn.Identity() if dense.residual else None
        if dense.residual and dense.inputs != dense.outputs:
            self.residual = torch.nn.Linear(dense.inputs, dense.outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.linear(x))
        return y if self.residual is None else y + self.residual(x)


def load_dense(dense: Dense, folder: str, device: str) -> torch.nn.Module:
    """A layer after the pooling, in float32; with weights that are made up where there is no `folder` of the model. A
    ValueError if its weights are missing, damaged or misshapen."""
    norm = dense.kind == "LayerNorm"
    layer = torch.nn.Sequential(OrderedDict(norm=torch.nn.LayerNorm(dense.inputs))) if norm else DenseLayer(dense)
    if folder:
        paths = [os.path.join(folder, dense.folder, name) for name in MODULE_WEIGHTS]
        path = next(filter(os.path.isfile, paths), paths[0])
        try:
            if path == paths[0]:
                with opened(path) as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True)  # runs nothing that is in it
            layer.load_state_dict(tensors)
        except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} does not fill {dense}: {' '.join(str(error).split()):.300}") from None
    return layer.float().to(device).requires_grad_(False)
