"""Pooled vectors, and what becomes of them: dimensions, scale, probabilities."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from config import EngineConfig
from model_config import ModelConfig
from models.dequantize import opened
from models.pooling import DENSE_FILES, Dense, dense_layers
from sampling_params import PoolingParams

if TYPE_CHECKING:
    from model import Transformer


class Pooler:
    """Makes one vector of each prompt's hidden states.

    Args:
        ops: the backend. config: of the model. kind: see `ops.pool`. layers: what follows the pooling.
    """

    def __init__(self, ops: ModuleType, config: ModelConfig, kind: str, layers: Sequence[torch.nn.Module] = ()):
        self.ops, self.config, self.kind, self.layers = ops, config, kind, layers

    @classmethod
    def of(cls, config: EngineConfig, model: Transformer) -> Pooler | None:
        """That of an engine with these options; None where prompts are not pooled."""
        if not config.makes_vectors:
            return None
        dense = dense_layers(config.folder, model.config.hidden_size) if config.task == "embed" else []
        dummy = config.load_format == "dummy" or model.device == "meta"
        layers = [load_dense(each, "" if dummy else config.folder, model.device) for each in dense]
        return cls(model.ops, model.config, config.pooling_type, layers)

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor, head: torch.Tensor | None) -> torch.Tensor:
        """A vector for each prompt [B, size or labels] float32 of hidden states [T, hidden].

        Where a model has a classification `head` [labels, hidden], it is the head's outputs.
        """
        pooled = self.ops.pool(hidden, starts, self.kind)
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled if head is None else F.linear(pooled, head)

    def finish(self, wanted: list[PoolingParams | None], vectors: np.ndarray) -> list[bytes]:
        """What requests get of their `vectors` [B, size or labels] float32, as float32.

        An embedding is cut to its first `dimensions` and divided by its length. The outputs of a classification head
        become probabilities. Each of these is done where the request asks for it, or where it leaves the choice to the
        model and that does it.
        """
        config, found = self.config, []
        labelled = config.head == "labels"
        own = config.label_activation if labelled else "normalize" if config.normalize else "identity"
        asked = own if labelled else "normalize"
        for params, x in zip(wanted, vectors, strict=True):
            assert params is not None
            x = x[: params.dimensions]
            activation = own if params.use_activation is None else asked if params.use_activation else "identity"
            if activation == "normalize":
                x = x / max(np.linalg.norm(x), np.float32(1e-12))
            elif activation == "softmax":
                x = np.exp(x - x.max())
                x /= x.sum()
            elif activation == "sigmoid":
                x = 0.5 * (1 + np.tanh(0.5 * x))  # 1 / (1 + exp(-x)), which cannot overflow
            found.append(x.astype(np.float32).tobytes())
        return found


def load_dense(dense: Dense, folder: str, device: str) -> torch.nn.Module:
    """A layer after the pooling, in float32; with weights that are made up where there is no `folder` of the model.

    Raises:
        ValueError: its weights are missing, damaged or misshapen.
    """
    linear = torch.nn.Linear(dense.inputs, dense.outputs, dense.bias, device=device, dtype=torch.float32)
    if folder:
        path = os.path.join(folder, dense.folder, DENSE_FILES[1])
        try:
            with opened(path) as file:
                linear.load_state_dict({name.removeprefix("linear."): file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} does not fill {dense}: {' '.join(str(error).split())}") from None
    return torch.nn.Sequential(linear, getattr(torch.nn, dense.activation)()).requires_grad_(False)
