"""What an adapter changes beside its low-rank products: rows of the table and the head, outputs' factors, and experts.

Few adapters have such tensors, and they are of many sizes, so they have no place in an adapter's row of a pool. They
lie on the host beside it, and on the device while a slot has the adapter. A step with such an adapter finds its tokens'
numbers on the host, so it runs without CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from checkpoints.dequantize import Stored

ROWS = 64  # of a weight that are read at a time
Tokens = torch.Tensor | slice  # of a step: their places


class Change(dict[str, torch.Tensor]):
    """What an adapter does to one product y = x W^T + bias, in this order:

        y[rows] = x weight^T + bias            a head that was trained whole, or some tokens of it
        y += scale B (A x)                     by `ops`; for experts by their own A and B, which are here
        y = factor (y - bias) + bias + shift   DoRA (Liu et al., 2024): factor = m / ||W + scale B A||; and B's bias

    Of a table of embeddings x is a token's id, and the `weight` has embeddings of the tokens `rows`. It has those of
    these tensors that it needs:

        rows [n] int64 ascending, weight [n, in], bias [n] of the head's own if it is not the model's
        factor, shift [out] float32
        a [E, G R, in], b [E, out, R]
    """

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
        """The same with what a function makes of each tensor."""
        return Change({name: function(x) for name, x in self.items()})

    def replace(self, y: torch.Tensor, x: torch.Tensor, tokens: Tokens, bias: torch.Tensor | None) -> None:
        """Replace the outputs `rows` of some tokens' y [T, out], for x [T, in], in place."""
        if "rows" in self:
            bias = self.get("bias", bias if bias is None else bias[self["rows"]])
            y[tokens] = y[tokens].index_copy(1, self["rows"], F.linear(x[tokens], self["weight"], bias))

    def look_up(self, x: torch.Tensor, ids: torch.Tensor, tokens: Tokens) -> None:
        """Replace some tokens' embeddings x [T, hidden] by their ids [T], in place."""
        if "rows" in self:
            place = torch.searchsorted(self["rows"], ids[tokens]).clamp_(max=len(self["rows"]) - 1)
            hit = self["rows"][place] == ids[tokens]
            x[tokens] = torch.where(hit[:, None], self["weight"][place], x[tokens])

    def rescale(self, y: torch.Tensor, tokens: Tokens, bias: torch.Tensor | float | None = None) -> None:
        """Multiply some tokens' outputs y [T, out], and add to them, in place."""
        if "factor" in self or "shift" in self:
            part, bias = y[tokens].float(), 0.0 if bias is None else bias
            part = (part - bias) * self["factor"] + bias if "factor" in self else part
            y[tokens] = (part + self.get("shift", 0.0)).to(y.dtype)


Changes = dict[int, Change]  # of an adapter, by `TargetProduct.number`


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
