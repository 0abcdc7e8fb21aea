"""Pooled vectors, and what becomes of them: dimensions, scale, probabilities."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from config import EngineConfig
from model_config import ModelConfig
from sampling_params import PoolingParams

if TYPE_CHECKING:
    from model import Transformer


class Pooler:
    """Makes one vector of each prompt's hidden states.

    Args:
        ops: the backend. config: of the model. kind: see `ops.pool`.
    """

    def __init__(self, ops: ModuleType, config: ModelConfig, kind: str):
        self.ops, self.config, self.kind = ops, config, kind

    @classmethod
    def of(cls, config: EngineConfig, model: Transformer) -> Pooler | None:
        """That of an engine with these options; None where prompts are not pooled."""
        return cls(model.ops, model.config, config.pooling_type) if config.makes_vectors else None

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor, head: torch.Tensor | None) -> torch.Tensor:
        """A vector for each prompt [B, hidden or labels] float32 of hidden states [T, hidden].

        Where a model has a classification `head` [labels, hidden], it is the head's outputs.
        """
        pooled = self.ops.pool(hidden, starts, self.kind)
        return pooled if head is None else F.linear(pooled, head)

    def finish(self, wanted: list[PoolingParams | None], vectors: np.ndarray) -> list[bytes]:
        """What requests get of their `vectors` [B, hidden or labels] float32, as float32.

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
