"""What an adapter changes beside its low-rank products: rows of the table and the head, and experts.

Few adapters have such tensors, and they are of many sizes, so they have no place in an adapter's row of a pool. They
lie on the host beside it, and on the device while a slot has the adapter. A step with such an adapter finds its tokens'
numbers on the host, so it runs without CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tokens = torch.Tensor | slice  # of a step: their places


@dataclass
class Change:
    """What an adapter does to one product y = x W^T + bias, in this order:

        y[rows] = x weight^T + bias            a head that was trained whole, or some tokens of it
        y += scale B (A x)                     by `ops`; for experts by their own A and B, which are here

    Of a table of embeddings x is a token's id, and the `weight` has embeddings of the tokens `rows`.
    """

    rows: torch.Tensor | None = None  # [n] int64, ascending
    weight: torch.Tensor | None = None  # [n, in]
    bias: torch.Tensor | None = None  # [n] of the head's own; None: the model's
    a: torch.Tensor | None = None  # [E, G R, in]
    b: torch.Tensor | None = None  # [E, out, R]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Change:
        """The same on a device, in the dtype of the model."""
        kinds = dict.fromkeys(("weight", "bias", "a", "b"), dtype)
        return Change(**{name: x.to(device, kinds.get(name, x.dtype)) for name, x in self.tensors().items()})

    def pinned(self) -> Change:
        """The same in pinned memory of the host."""
        return Change(**{name: x.pin_memory() for name, x in self.tensors().items()})

    def replace(self, y: torch.Tensor, x: torch.Tensor, tokens: Tokens, bias: torch.Tensor | None) -> None:
        """Replace the outputs `rows` of some tokens' y [T, out], for x [T, in], in place."""
        if self.weight is None or self.rows is None:
            return
        bias = bias[self.rows] if self.bias is None and bias is not None else self.bias
        y[tokens] = y[tokens].index_copy(1, self.rows, F.linear(x[tokens], self.weight, bias))

    def look_up(self, x: torch.Tensor, ids: torch.Tensor, tokens: Tokens) -> None:
        """Replace some tokens' embeddings x [T, hidden] by their ids [T], in place."""
        if self.weight is None or self.rows is None:
            return
        place = torch.searchsorted(self.rows, ids[tokens]).clamp_(max=len(self.rows) - 1)
        hit = self.rows[place] == ids[tokens]
        x[tokens] = torch.where(hit[:, None], self.weight[place], x[tokens])


Changes = dict[int, Change]  # of an adapter, by `TargetProduct.number`
StepChanges = list[tuple[Tokens, Changes]]  # and the tokens of a step that have it
