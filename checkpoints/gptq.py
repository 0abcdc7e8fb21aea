"""GPTQ: codes of few bits that keep a matrix's products with the inputs of a text.

Each number is rounded to the nearest, one input after the other, and the numbers of the inputs that follow make up for
the error, as far as their inputs resemble this one. See Frantar et al., "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", 2022.
"""

from __future__ import annotations

import math

import torch

from checkpoints.rounding import nearest, scales_of

DAMPING = 0.01  # so much of the mean of the diagonal is added to it: `damp_percent` of other tools
BLOCK = 128  # inputs whose errors go to the rest of the matrix in one product


def gptq(
    numbers: torch.Tensor, gram: torch.Tensor, kind: str, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of codes [n, inputs], and scales [n, ceil(inputs / group)] that are numbers of `dtype`; both float32.

    With H = X^T X + damping and U the upper Cholesky factor of H^-1, for each input j:

        q_j = nearest(w_j);  w_k -= (w_j - q_j) U_jk / U_jj for all k > j

    A group's scales are found when it begins, from what its numbers have become. An input that was 0 in all of the text
    is rounded without regard to others.

    Args:
        numbers: [n, inputs] float32 of the matrix.
        gram: [inputs, inputs] float32: X^T X of the inputs X [tokens, inputs].
        kind: int8, int4 or fp8.
    """
    rest, inputs = numbers.clone(), numbers.shape[1]
    values, scales = torch.empty_like(rest), rest.new_empty(len(rest), -(-inputs // group))
    gram = gram.double()
    gram = gram + torch.diag((gram.diagonal() == 0) + DAMPING * gram.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    factor = torch.linalg.cholesky(inverse, upper=True).to(rest.dtype)
    block = BLOCK if group >= inputs else math.gcd(BLOCK, group)  # so that groups begin where blocks do
    for begin in range(0, inputs, block):
        end = min(begin + block, inputs)
        if begin % group == 0:
            scale = scales_of(rest[:, begin : begin + group], kind, dtype)
            scales[:, begin // group] = scale[:, 0]
        errors = rest.new_empty(len(rest), end - begin)
        for j in range(begin, end):
            values[:, j] = nearest(rest[:, j, None], scale, kind)[:, 0]
            errors[:, j - begin] = (rest[:, j] - values[:, j] * scale[:, 0]) / factor[j, j]
            rest[:, j + 1 : end] -= errors[:, j - begin, None] * factor[j, j + 1 : end]
        rest[:, end:] -= errors @ factor[begin:end, end:]
    return values, scales
