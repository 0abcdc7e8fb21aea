"""Multi-head latent attention (DeepSeek-V2, 2024), whose cache holds one latent for each token.

`reference.latent_store` tells what a latent is. A row of one token attends to the latents as they are, which is the
absorbed form: all heads share the keys, so each latent is read once. For longer rows this would be three times the
work, so keys and values are made of the latents again, which is the plain form. They go into pages of a workspace, and
`attention_prefill` reads them there.

The workspace is bounded: some heads at a time have their keys and values of the whole context in it. So no sum has to
be merged with another one, and how many heads there are changes no bit. But a token's bits differ between a prompt and
a row of its own, so `batch_invariant` is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from batch_state import to_device
from layers import Attention, New, Step, Weight, linear
from model_config import ModelConfig
from models.shares import Parts, Shares, TensorPart, TensorPiece

NORM_EPS = 1e-6  # of the two latents' norms, whatever config.json says of the others
WORKSPACE = 2**29  # bytes for keys and values in the plain form, unless those of one head take more
CONTEXT_TOKENS = 8192  # tokens whose keys and values are made together, or one sequence if it has more


class RowGroup(NamedTuple):
    """Neighbouring rows of many tokens whose keys and values are made together, n blocks of them."""

    tokens: slice  # of those of all such rows
    rows: slice
    blocks: torch.Tensor  # [n] int64: where in the pool their blocks are
    tables: torch.Tensor  # [rows, M] int32: where in the workspace each row's blocks are
    slots: torch.Tensor  # [rows] int32: 0, 1, 2, ..
    starts: torch.Tensor  # [rows + 1] int32: where each row's tokens begin, counted from the first one's
    longest: int  # the most tokens of a row


def heads_at_once(heads: int, c: ModelConfig, max_model_len: int, itemsize: int) -> int:
    """How many heads have their keys and values in the workspace at a time. Kernels are compiled for this number."""
    assert c.latent
    numbers = 2 * c.head_dim + c.latent.nope_dim + c.latent.v_dim  # of a token: key and value, and the product's result
    most = WORKSPACE // (numbers * itemsize * max(CONTEXT_TOKENS, max_model_len))
    return max(i for i in range(1, heads + 1) if heads % i == 0 and i <= max(1, most))


class LatentAttention(Attention):
    """Latent attention of some layer, with the heads of this rank. Every rank has the latents of all tokens.

    R is the latents' rank, P and N are the rotated elements of a query and the others, D = N + P. The cache has R + P
    numbers for each token.
    """

    matrices = ("q_a", "q_b", "kv_a", "o")
    factors = ("q_a_norm", "kv_a_norm")

    def __init__(self, c: ModelConfig, ops: ModuleType, i: int, place: int, heads: int, max_model_len: int, new: New):
        latent, row = c.latent, c.row
        assert latent and latent.v_dim <= c.head_dim
        self.config, self.ops, self.place, self.row, self.heads, self.latent = c, ops, place, row, heads, latent
        self.rope = c.layer_ropes[i]
        q_size, inputs = heads * c.head_dim, c.hidden_size
        self.q_a: Weight | None = None
        self.q_a_norm = self.q_a_bias = None
        if latent.q_rank:
            inputs = latent.q_rank
            self.q_a, self.q_a_norm = new(inputs, c.hidden_size), new(inputs)
            self.q_a_bias = new(inputs) if row.qkv_bias else None
        self.q_b = new(q_size, inputs)  # of the queries' latent, or of the hidden state
        self.kv_a, self.kv_a_norm = new(latent.width, c.hidden_size), new(latent.kv_rank)
        self.kv_a_bias = new(latent.width) if row.qkv_bias else None
        self.kv_b = new(heads, latent.nope_dim + latent.v_dim, latent.kv_rank)  # (W_UK | W_UV) of each head
        self.o = new(c.hidden_size, heads * latent.v_dim)
        self.o_bias = new(c.hidden_size) if row.o_bias else None
        self.width = heads * latent.v_dim
        self.at_once = heads_at_once(heads, c, max_model_len, self.o.itemsize)

    def parts(self, shares: Shares) -> Parts:
        root, split = self.row.name("o").rpartition(".")[0], self.row.latent == "split"
        names = {
            "q_a_proj.weight": (self.q_a, "all"),
            "q_a_proj.bias": (self.q_a_bias, "all"),
            "q_a_layernorm.weight": (self.q_a_norm, "all"),
            "q_b_proj.weight" if self.latent.q_rank else "q_proj.weight": (self.q_b, "col"),
            "kv_a_proj_with_mqa.weight": (self.kv_a, "all"),
            "kv_a_proj_with_mqa.bias": (self.kv_a_bias, "all"),
            "kv_a_layernorm.weight": (self.kv_a_norm, "all"),
            "kv_b_proj.weight": (None if split else self.kv_b.flatten(0, 1), "col"),
            "o_proj.weight": (self.o, "row"),
            "o_proj.bias": (self.o_bias, "first"),
        }
        parts = shares.parts({f"{root}.{name}": weight for name, weight in names.items()})
        if split:  # in GGUF files; k's matrix is transposed there
            rank, nope, v_dim = self.latent.kv_rank, self.latent.nope_dim, self.latent.v_dim
            heads, first, _ = shares.share("col", self.heads)
            k = tuple(TensorPiece(head[:nope], (first + i,)) for i, head in enumerate(self.kv_b))
            v = tuple(TensorPiece(head[nope:], (first + i,)) for i, head in enumerate(self.kv_b))
            parts[f"{root}.k_b_proj.weight"] = TensorPart((heads, rank, nope), k, transposed=True)
            parts[f"{root}.v_b_proj.weight"] = TensorPart((heads, v_dim, rank), v)
        return parts

    def store(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The queries [T, heads, D] of hidden states x, not rotated yet. The latents of x go into the pool."""
        rotation, kv, q = step.rotations[self.rope], step.pool[0][self.place], x
        latent = linear(x, self.kv_a, self.kv_a_bias)
        self.ops.latent_store(
            latent, self.kv_a_norm, NORM_EPS, rotation, step.batch.slot_mapping[0], kv, bool(self.row.interleaved)
        )
        if self.q_a is not None:
            q = self.ops.rms_norm(linear(x, self.q_a, self.q_a_bias), self.q_a_norm, NORM_EPS)
        return linear(q, self.q_b).view(len(x), self.heads, -1)

    def attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """The heads' results [T, heads * v_dim] of queries q [T, heads, D], which are rotated in place."""
        batch, kv = step.batch, step.pool[0][self.place]
        n, first = batch.num_decodes * batch.queries, batch.decodes[0]  # decode tokens; the first longer row
        rotation = step.rotations[self.rope]
        out = q.new_empty(len(q), self.heads, self.latent.v_dim)
        if n > 0:
            absorbed = self.absorb(q[:n], rotation[:n])
            sums = self.ops.latent_decode(absorbed, kv, step.plans[0], self.config.scale, self.latent.kv_rank)
            # out = W_UV sums
            torch.bmm(sums.transpose(0, 1), self.kv_b[:, self.latent.nope_dim :].mT, out=out[:n].transpose(0, 1))
        if n < len(q):
            self.ops.rope_last(q[n:], rotation[n:], bool(self.row.interleaved))
            if step.rows is None:
                step.rows = list(self.rows_of(step))
            for rows in step.rows:
                self.plain(q[n:][rows.tokens], batch.seq_lens[first:][rows.rows], kv, rows, out[n:][rows.tokens])
        return out.flatten(1)

    def absorb(self, q: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """(W_UK^T q | rope(q')) [T, heads, R + P] of the queries q [T, heads, D]."""
        nope = self.latent.nope_dim
        absorbed = q.new_empty(*q.shape[:2], self.latent.width)
        target = absorbed[..., : self.latent.kv_rank]
        torch.bmm(q[..., :nope].transpose(0, 1), self.kv_b[:, :nope], out=target.transpose(0, 1))
        return self.ops.rope_last(q, rotation, bool(self.row.interleaved), absorbed)

    def rows_of(self, step: Step) -> Iterator[RowGroup]:
        """A step's rows of many tokens, in groups whose keys and values are made together."""
        batch, n, size = step.batch, step.batch.decodes[0], step.pool[0][self.place].shape[3]
        device, counts = batch.slots.device, batch.longer
        tokens = [0, *accumulate(count for count, _ in counts)]
        begin = 0
        while begin < len(counts):
            end = begin + 1
            while end < len(counts) and sum(held for _, held in counts[begin : end + 1]) * size <= CONTEXT_TOKENS:
                end += 1
            held = [held for _, held in counts[begin:end]]
            firsts = np.cumsum(held) - held
            rows, columns = np.repeat(np.arange(begin + n, end + n), held), np.concatenate([*map(np.arange, held)])
            indices = to_device(np.stack((rows, columns)), device.type)
            tables = (firsts[:, None] + np.arange(max(held))).astype(np.int32)
            starts = batch.query_starts[begin : end + 1]
            yield RowGroup(
                slice(tokens[begin], tokens[end]),
                slice(begin, end),
                batch.block_tables[0][batch.slots[indices[0]].long(), indices[1]].long(),
                to_device(tables, device.type),
                torch.arange(end - begin, dtype=torch.int32, device=device),
                starts - starts[0],
                max(count for count, _ in counts[begin:end]),
            )
            begin = end

    def plain(
        self, q: torch.Tensor, seq_lens: torch.Tensor, kv: torch.Tensor, rows: RowGroup, out: torch.Tensor
    ) -> None:
        """Attention of some rows' rotated queries q [T, heads, D] in the plain form, into out [T, heads, v_dim]."""
        c, nope, rank, size = self.config, self.latent.nope_dim, self.latent.kv_rank, kv.shape[3]
        latents = kv[rows.blocks, 0, 0].to(q.dtype)  # [blocks, block_size, R + P]
        for begin in range(0, self.heads, self.at_once):
            heads = slice(begin, begin + self.at_once)
            made = F.linear(latents.view(-1, self.latent.width)[:, :rank], self.kv_b[heads].flatten(0, 1))
            made = made.view(len(latents), size, self.at_once, -1).transpose(1, 2)
            pages = made.new_empty(len(latents), 2, self.at_once, size, c.head_dim)
            keys = self.ops.keys_of(pages)
            keys[..., :nope] = made[..., :nope]
            keys[..., nope:] = latents[:, None, :, rank:]
            pages[:, 1, ..., : self.latent.v_dim] = made[..., nope:]  # what is beside a value is never looked at
            prefill = rows.tables, rows.slots, seq_lens, rows.starts, rows.longest
            results = self.ops.attention_prefill(q[:, heads].contiguous(), pages, prefill, c.scale, 0)
            out[:, heads] = results[..., : self.latent.v_dim]
            del made, pages, keys, results
