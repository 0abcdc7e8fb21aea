"""Drafts of coming tokens, found in the tokens that are known: written as kernels.py says, which passes it on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS, MATCHES = 2048, 256  # that a program looks at together


@triton.jit(do_not_specialize=["ids_stride"], do_not_specialize_on_alignment=["slots"])
def match_kernel(
    token_ids, num_known, slots, clients, matches, ids_stride, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """matches [B, U] int64: the longest match of a row's last tokens in slot u, and the latest of equals.

    l, e = max over e of (max l : u[e - l : e] = t[n - l : n], e), with l <= LONGEST and e below u's length; t are the
    row's n known tokens, u those of slot u, token_ids [S, WIDTH]. An element has l, whether u is t, the slot, and e, in
    8, 8, 16 and 32 bits, so that the largest one is the best. 0: no match, another client, or padding. One program per
    row and slot walks over u. Each of its BLOCK lanes keeps its best end, and later ones take the place of equal ones.
    Without clients, U is 1 and u is t.
    """
    i_b, i_u = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_slot = tl.load(slots + i_b).to(tl.int64)
    n = tl.load(num_known + i_slot, mask=i_slot >= 0, other=0)
    if clients is None:
        i_u = i_slot
        size = n
    else:
        same = tl.load(clients + i_u) == tl.load(clients + i_slot, mask=i_slot >= 0, other=0)
        size = tl.load(num_known + i_u, mask=same & (i_slot >= 0), other=0)
    p_t, p_u = token_ids + i_slot * ids_stride, token_ids + i_u * ids_stride
    b_most = tl.zeros([BLOCK], tl.int32)
    b_last = tl.zeros([BLOCK], tl.int32)
    for i_e in range(1, size, BLOCK):
        o_e = i_e + tl.arange(0, BLOCK)
        m_e = o_e < size
        b_length = tl.zeros([BLOCK], tl.int32)
        for i_l in range(1, LONGEST + 1):
            m_l = m_e & (o_e >= i_l)  # no load waits for another
            b_t = tl.load(p_u + o_e - i_l, mask=m_l, other=-1)
            m_l = m_l & (b_t == tl.load(p_t + n - i_l, mask=n >= i_l, other=-2)) & (b_length == i_l - 1)
            b_length += m_l.to(tl.int32)
        m_best = m_e & (b_length >= b_most)
        b_most = tl.where(m_best, b_length, b_most)
        b_last = tl.where(m_best, o_e, b_last)
    i_length = tl.max(b_most, 0)
    i_end = tl.max(tl.where(b_most == i_length, b_last, 0), 0)
    place = ((i_u == i_slot).to(tl.int64) << 48) | (tl.maximum(i_u, 0) << 32) | i_end.to(tl.int64)
    packed = tl.where(i_length > 0, (i_length.to(tl.int64) << 56) | place, 0)
    tl.store(matches + i_b * tl.num_programs(1) + tl.program_id(1), packed)


@triton.jit(do_not_specialize=["ids_stride", "num_matches", "factor"], do_not_specialize_on_alignment=["slots"])
def follow_kernel(
    token_ids, num_known, num_drafts, slots, matches, drafts, ids_stride, num_matches, factor,
    WIDTH: tl.constexpr, SHORTEST: tl.constexpr, MOST: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """draft j = u[e + j], or t[e + j % (n - e)] where u is t, for the best match (l, u, e) of `match_kernel`.

    There are min(MOST, factor l, what is left of u and of the row) drafts [B, MOST], and none where l < SHORTEST. They
    go behind the known tokens, too. One program per row.
    """
    i_b = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(slots + i_b).to(tl.int64)
    n = tl.load(num_known + i_slot, mask=i_slot >= 0, other=0)
    packed = tl.zeros([], tl.int64)
    for i_u in range(0, num_matches, BLOCK_U):
        o_u = i_u + tl.arange(0, BLOCK_U)
        b_packed = tl.load(matches + i_b * num_matches + o_u, mask=o_u < num_matches, other=0)
        packed = tl.maximum(packed, tl.max(b_packed, 0))
    i_length, is_own = (packed >> 56).to(tl.int32), (packed >> 48) & 1
    i_u, i_end = (packed >> 32) & 0xFFFF, (packed & 0xFFFFFFFF).to(tl.int32)
    period = tl.maximum(tl.where(is_own > 0, n - i_end, MOST), 1)
    left = tl.where(is_own > 0, MOST, tl.load(num_known + i_u) - i_end)
    i_count = tl.minimum(tl.minimum(WIDTH - n, left), tl.minimum(i_length * factor, MOST).to(tl.int32))
    i_count = tl.where(i_length >= SHORTEST, i_count, 0)
    o_j = tl.arange(0, BLOCK_J)
    b_draft = tl.load(token_ids + i_u * ids_stride + i_end + o_j % period, mask=o_j < i_count, other=-1)
    tl.store(token_ids + i_slot * ids_stride + n + o_j, b_draft, mask=o_j < i_count)
    tl.store(drafts + i_b * MOST + o_j, b_draft, mask=o_j < MOST)
    tl.store(num_drafts + i_slot, i_count, mask=i_slot >= 0)


def look_up(
    token_ids: torch.Tensor, num_known: torch.Tensor, num_drafts: torch.Tensor, slots: torch.Tensor,
    shortest: int, longest: int, most: int, clients: torch.Tensor | None = None, factor: float = 1e9,
) -> torch.Tensor:  # fmt: skip
    """Find drafts: what followed the last tokens where they came before (`reference.look_up`)."""
    assert 1 <= shortest <= longest < 128 and most >= 1 and token_ids.stride(1) == 1 and len(token_ids) <= 65536

    rows, size = len(slots), 1 if clients is None else len(token_ids)
    matches = torch.empty(rows, size, dtype=torch.int64, device=slots.device)
    drafts = torch.empty(rows, most, dtype=torch.int32, device=slots.device)

    match_kernel[(rows, size)](
        token_ids, num_known, slots, clients, matches, token_ids.stride(0), longest, TOKENS, num_warps=8,
    )  # fmt: skip
    follow_kernel[(rows,)](
        token_ids, num_known, num_drafts, slots, matches, drafts, token_ids.stride(0), size, factor,
        token_ids.shape[1], shortest, most, MATCHES, triton.next_power_of_2(most), num_warps=1,
    )  # fmt: skip
    return drafts


@triton.jit(do_not_specialize=["ids_stride"], do_not_specialize_on_alignment=["slots"])
def put_drafts_kernel(
    token_ids, num_known, num_drafts, slots, drafts, ids_stride, WIDTH: tl.constexpr, MOST: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """token_ids[slot, num_known[slot] + j] = drafts[row, j], up to the first that is -1. One program a row.

    drafts [B, MOST], token_ids [S, WIDTH].
    """
    i_b = tl.program_id(0)
    i_slot = tl.load(slots + i_b).to(tl.int64)
    n = tl.load(num_known + i_slot, mask=i_slot >= 0, other=0)
    o_j = tl.arange(0, BLOCK_J)
    b_draft = tl.load(drafts + i_b * MOST + o_j, mask=o_j < MOST, other=-1)
    i_count = tl.minimum(tl.min(tl.where((b_draft >= 0) & (i_slot >= 0), BLOCK_J, o_j), 0), WIDTH - n)
    tl.store(token_ids + i_slot * ids_stride + n + o_j, b_draft, mask=o_j < i_count)
    tl.store(num_drafts + i_slot, i_count, mask=i_slot >= 0)


def put_drafts(
    token_ids: torch.Tensor, num_known: torch.Tensor, num_drafts: torch.Tensor, slots: torch.Tensor,
    drafts: torch.Tensor,
) -> None:  # fmt: skip
    """Put drafts behind the known tokens (`reference.put_drafts`)."""
    assert drafts.is_contiguous() and drafts.dtype == torch.int32 and token_ids.stride(1) == 1

    rows, most = drafts.shape

    put_drafts_kernel[(rows,)](
        token_ids, num_known, num_drafts, slots, drafts, token_ids.stride(0),
        token_ids.shape[1], most, triton.next_power_of_2(most), num_warps=1,
    )  # fmt: skip
