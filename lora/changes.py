"""What an adapter changes beside its low-rank products: rows of the table and the head, outputs' factors, and experts.

Few adapters have such tensors, and they are of many sizes, so they have no place in an adapter's row of a pool. They
lie on the host beside it, and on the device while a slot has the adapter. A step with such an adapter finds its tokens'
numbers on the host, so it runs without CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from checkpoints.dequantize import Stored

ROWS = 512  # of a weight that are read at a time
Tokens = torch.Tensor | slice  # of a step: their places


@dataclass
class Change:
    """What an adapter does to one product y = x W^T + bias, in this order:

        y[rows] = x weight^T + bias            a head that was trained whole, or some tokens of it
        y += scale B (A x)                     by `ops`; for experts by their own A and B, which are here
        y = factor (y - bias) + bias + shift   DoRA (Liu et al., 2024), see `factors_of`; and B's bias

    Of a table of embeddings x is a token's id, and the `weight` has embeddings of the tokens `rows`.
    """

    rows: torch.Tensor | None = None  # [n] int64, ascending
    weight: torch.Tensor | None = None  # [n, in]
    bias: torch.Tensor | None = None  # [n] of the head's own; None: the model's
    factor: torch.Tensor | None = None  # [out] float32, and
    shift: torch.Tensor | None = None  # [out] float32, if there is a factor
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

    def rescale(self, y: torch.Tensor, tokens: Tokens, bias: torch.Tensor | None = None) -> None:
        """Multiply some tokens' outputs y [T, out], and add to them, in place."""
        if self.factor is not None and self.shift is not None:
            shift = self.shift if bias is None else self.shift + (1 - self.factor) * bias
            y[tokens] = (y[tokens].float() * self.factor + shift).to(y.dtype)


Changes = dict[int, Change]  # of an adapter, by `TargetProduct.number`
StepChanges = list[tuple[Tokens, Changes]]  # and the tokens of a step that have it


def factors_of(name: str, magnitude: torch.Tensor, weight: Stored, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """m / ||W + B A|| of each output [out] float32, where m is the `magnitude` of DoRA, and B includes the scale.

    W is the `weight` [out, in], A [r, in], B [out, r]. A ValueError with the module's name, if a norm is 0.
    """
    a, b = a.float(), b.float()
    pairs = zip(weight.split(ROWS), b.split(ROWS), strict=True)
    norms = torch.cat([(part.float() + rows @ a).norm(dim=1) for part, rows in pairs])
    if not (factors := magnitude / norms).isfinite().all():
        raise ValueError(f"{name} has outputs whose weights are all 0, which no magnitude of DoRA can scale")
    return factors
