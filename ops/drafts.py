"""Drafts of coming tokens, found in the tokens that are known: written as kernels.py says, which passes it on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KNOWN = 2048  # tokens that a program looks at together


@triton.jit(do_not_specialize=["ids_stride"], do_not_specialize_on_alignment=["slots"])
def look_up_kernel(
    token_ids, num_known, num_drafts, slots, drafts, ids_stride,
    WIDTH: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """draft j = t[e + j % (n - e)], where e < n is the end of the latest of the longest matches with t's own end.

    t are a row's n known tokens, token_ids [S, WIDTH], drafts [B, MOST]. One program per row walks over t. Each of its
    BLOCK lanes keeps its best end, and later ones take the place of equal ones.
    """
    i_b = tl.program_id(0)
    i_slot = tl.load(slots + i_b).to(tl.int64)
    n = tl.load(num_known + i_slot, mask=i_slot >= 0, other=0)
    p_t = token_ids + i_slot * ids_stride
    b_most = tl.zeros([BLOCK], tl.int32)
    b_last = tl.zeros([BLOCK], tl.int32)
    for i_e in range(1, n, BLOCK):
        o_e = i_e + tl.arange(0, BLOCK)
        m_e = o_e < n
        b_length = tl.zeros([BLOCK], tl.int32)
        for i_l in range(1, LONGEST + 1):
            m_l = m_e & (o_e >= i_l)  # no load waits for another
            b_t = tl.load(p_t + o_e - i_l, mask=m_l, other=-1)
            m_l = m_l & (b_t == tl.load(p_t + n - i_l, mask=n >= i_l, other=-2)) & (b_length == i_l - 1)
            b_length += m_l.to(tl.int32)
        m_best = m_e & (b_length >= b_most)
        b_most = tl.where(m_best, b_length, b_most)
        b_last = tl.where(m_best, o_e, b_last)
    i_length = tl.max(b_most, 0)
    i_end = tl.max(tl.where(b_most == i_length, b_last, 0), 0)
    i_count = tl.where(i_length >= SHORTEST, tl.minimum(WIDTH - n, MOST), 0)
    o_j = tl.arange(0, BLOCK_J)
    b_draft = tl.load(p_t + i_end + o_j % tl.maximum(n - i_end, 1), mask=o_j < i_count, other=-1)
    tl.store(p_t + n + o_j, b_draft, mask=o_j < i_count)
    tl.store(drafts + i_b * MOST + o_j, b_draft, mask=o_j < MOST)
    tl.store(num_drafts + i_slot, i_count, mask=i_slot >= 0)


def look_up(
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_drafts: torch.Tensor,
    slots: torch.Tensor,
    shortest: int,
    longest: int,
    most: int,
) -> torch.Tensor:
    """Find drafts: what followed the last tokens where they came before (`reference.look_up`)."""
    assert 1 <= shortest <= longest and most >= 1 and token_ids.stride(1) == 1

    drafts = torch.empty(len(slots), most, dtype=torch.int32, device=slots.device)

    look_up_kernel[(len(slots),)](
        token_ids, num_known, num_drafts, slots, drafts, token_ids.stride(0),
        token_ids.shape[1], shortest, longest, most, KNOWN, triton.next_power_of_2(most), num_warps=8,
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
