"""A matrix that stays in codes of few bits."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def operand(stack: Any) -> Any:
    """A stack of experts' weights as the ops take it: a tensor, or a `Quantized`."""
    return stack.coded if isinstance(stack, QuantizedWeight) else stack


class QuantizedWeight:
    """A matrix in codes: a `Weight`, to be called in the place of the plain one.

    Args:
        ops: the backend.
        weight: the matrix as it would be, on the device `meta`. Parts of a checkpoint refer to it.
        coded: its codes, see `reference.Quantized`.
        order: [in] int64, the input of each column of the codes; None: they are in the order of the inputs.
    """

    def __init__(self, ops: ModuleType, weight: torch.Tensor, coded: Any, order: torch.Tensor | None):
        self.ops, self.weight, self.coded, self.order = ops, weight, coded, order

    @property
    def shape(self) -> torch.Size:
        """[out, in] of the matrix that it stands for."""
        return self.weight.shape

    def part(self, begin: int, count: int) -> QuantizedWeight:
        """Some of its rows [count, in], counted over all experts; they have their memory in this weight."""
        last = len(self.shape) - 2
        flat = (x.flatten(0, last) if isinstance(x, torch.Tensor) and x.ndim else x for x in self.coded)
        rows = slice(begin, begin + count)
        coded = self.ops.Quantized(*flat).at(rows)
        return QuantizedWeight(self.ops, self.weight.flatten(0, last)[rows], coded, self.order)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that take memory."""
        return [x for x in (*self.coded, self.order) if isinstance(x, torch.Tensor)]

    def on_meta(self, ops: ModuleType) -> QuantizedWeight:
        """One of the same shape without memory."""
        fields = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in self.coded)
        order = None if self.order is None else self.order.to("meta")
        return QuantizedWeight(ops, self.weight, ops.Quantized(*fields), order)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows [T, in] of ids [T], as a table of embeddings has them."""
        return self.ops.quantized_rows(self.coded, ids, self.weight.dtype)

    def packed(self, pack: Callable[[Any], Any]) -> Any:
        """The codes in the layout that `pack` makes, to be called in the place of this weight."""
        product, order = pack(self.coded), self.order
        return product if order is None else lambda x, bias=None: product(x[:, order], bias)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        return self.ops.quantized_linear(x if self.order is None else x[:, self.order], self.coded, bias)
