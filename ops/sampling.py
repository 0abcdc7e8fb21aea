"""Sampling and log-probabilities: Triton kernels and launchers, as kernels.py says, which passes them on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.matmul import FLOAT_MAX, LOG2E, NO_ID
from reference import Adjust

TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(i) for i in range(4))  # as in `reference.SamplingColumns`
MAX_BIASES = tl.constexpr(1024)  # entries of logit_bias that a slot holds

SAMPLE_CHUNK = 4096  # logits that sampling holds at a time
SAMPLE_GATHER = 1024  # logits that it holds while it gathers candidates
SAMPLE_SEARCH = 1024  # logits that it holds while it searches for the threshold, with 8 pivots for each of them
SAMPLE_REGISTERS = 128  # lets two programs of 8 warps share a processor, so 256 rows are one wave
SAMPLE_GROUP = 64  # logits that share one entry of the row's summary: a cache line of bfloat16
SAMPLE_SUMMARY = 8192  # values in a row's summary, which is held all at once: with a larger vocabulary groups grow
SAMPLE_BUFFER = 16384  # candidates of a row for which sampling has room in a buffer


@triton.jit
def _num_drafts(drafts, i_r, DRAFTS: tl.constexpr):
    """How many drafts the token of row i_r comes after: those of drafts [R, DRAFTS] that are not -1."""
    n = 0
    for i in tl.static_range(DRAFTS):
        n += (tl.load(drafts + i_r * DRAFTS + i) >= 0).to(tl.int32)
    return n


@triton.jit
def _row(
    i_r, i_slot, logits, adjustments, penalties, token_counts, bias_ids, biases, bitmask, drafts,
    V: tl.constexpr, MASKS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """The pointers and values that `_logits` needs to read row i_r."""
    p_logits = logits + i_r.to(tl.int64) * V
    if adjustments is None:
        return (p_logits,)
    elif drafts is None:  # Triton 3.6 has no tuple with None in it
        i_slot = i_slot.to(tl.int64)
        return (
            p_logits, tl.load(adjustments + i_slot), penalties + i_slot * 3, token_counts + i_slot * V,
            bias_ids + i_slot * MAX_BIASES, biases + i_slot * MAX_BIASES, bitmask + i_slot * MASKS * ((V + 31) // 32),
        )  # fmt: skip
    else:
        i_slot = i_slot.to(tl.int64)
        n = _num_drafts(drafts, i_r, DRAFTS)
        return (
            p_logits, tl.load(adjustments + i_slot), penalties + i_slot * 3, token_counts + i_slot * V,
            bias_ids + i_slot * MAX_BIASES, biases + i_slot * MAX_BIASES,
            bitmask + (i_slot * MASKS + n) * ((V + 31) // 32), drafts + i_r * DRAFTS, n,
        )  # fmt: skip


@triton.jit
def _logits(row, o_v, m_v):
    """x [..] float32: the row's logits at o_v, changed as `Adjust` says; -inf outside of m_v, and +inf only for NaN."""
    b_x = tl.load(row[0] + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
    if len(row) > 1:
        adjustments, p_penalties, p_counts = row[1], row[2], row[3]
        p_bias_ids, p_biases, p_bitmask = row[4], row[5], row[6]
        if adjustments & 4 != 0:  # MASK
            b_word = tl.load(p_bitmask + o_v // 32, mask=m_v, other=0)
            b_x = tl.where((b_word >> (o_v % 32)) & 1 != 0, b_x, float("-inf"))
        if adjustments & 2 != 0:  # BIAS: its ids ascend, so only those from the first to the last of o_v are read
            b_id = tl.load(p_bias_ids + tl.arange(0, MAX_BIASES))
            i_begin = tl.sum((b_id < tl.min(tl.where(m_v, o_v, NO_ID))).to(tl.int32), 0)
            i_end = tl.sum((b_id <= tl.max(tl.where(m_v, o_v, -1))).to(tl.int32), 0)
            for i in range(i_begin, i_end):
                b_x += tl.where(o_v == tl.load(p_bias_ids + i), tl.load(p_biases + i), 0.0)
        if adjustments & 1 != 0:  # PENALTIES
            b_count = tl.load(p_counts + o_v, mask=m_v, other=0)
            if len(row) > 7:
                for i in range(0, row[8]):
                    b_count += tl.where(o_v == tl.load(row[7] + i), 2, 0)
            repetition = tl.load(p_penalties)
            b_fair = tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition)
            b_x = tl.where(b_count != 0, b_fair, b_x) - (b_count >> 1).to(tl.float32) * tl.load(p_penalties + 1)
            b_x -= tl.where(b_count > 1, tl.load(p_penalties + 2), 0.0)
    return tl.where(b_x == b_x, tl.minimum(b_x, FLOAT_MAX), float("inf"))  # a maximum may pass over NaN


@triton.jit
def _candidates(row, p_values, o_v, n, held):
    """x [..] float32: the n values at p_values if `held`, otherwise the n logits of the row; -inf from n on."""
    m_v = o_v < n
    return tl.load(p_values + o_v, mask=m_v, other=float("-inf")) if held else _logits(row, o_v, m_v)


@triton.jit
def _keys(b_x):
    """int32 keys that sort as the float32 b_x do. The two zeros have the same key."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def _key(x):
    """The key of one float32, int64."""
    return tl.max(_keys(tl.zeros([1], tl.float32) + x), 0).to(tl.int64)


@triton.jit
def _values(keys):
    """The float32 that have these `_keys`; the keys must be from -inf's to inf's."""
    b_bits = keys.to(tl.int32)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.float32, bitcast=True)


@triton.jit
def _scale(heat):
    """log2(e) / temperature, by which exp(x / temperature) = exp2(x scale). It is kept finite: 0 times inf is NaN."""
    return tl.minimum(LOG2E / heat, FLOAT_MAX)


@triton.jit
def _filters(p_columns, heat, peak, V: tl.constexpr):
    """(top_k, or 0 where it is off; top_p; the least logit that the other filters keep; whether any filter is on)."""
    k, share, least = tl.load(p_columns + TOP_K), tl.load(p_columns + TOP_P), tl.load(p_columns + MIN_P)
    k = tl.where((k > 0) & (k < V), k, 0.0).to(tl.int32)
    on = (k > 0) | (share < 1.0) | (least > 0.0)
    bottom = tl.where(least > 0.0, peak + heat * tl.log(tl.where(least > 0.0, least, 1.0)), float("-inf"))
    return k, share, bottom, on


@triton.jit
def sample_chunks_kernel(
    logits, slots, columns, adjustments, penalties, token_counts, bias_ids, biases, bitmask, drafts,
    chunk_max, chunk_sum, chunk_id, summary, V: tl.constexpr, COLUMNS: tl.constexpr, MASKS: tl.constexpr,
    DRAFTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """max, its lowest id and sum(exp((x - max) / temperature)) of each chunk of each row of adjusted logits x [R, V].

    chunk_max, chunk_sum float32 and chunk_id int32, [R, CHUNKS]. One program per row and chunk. A row that is filtered
    also gets its summary [R, 3 GROUPS] float32: first the max of each group of GROUP logits, then two samples from each
    group (-inf where the sample is the max itself, which has been told already).
    """
    i_r, i_c = tl.program_id(0), tl.program_id(1)
    i_slot = tl.load(slots + i_r)
    if i_slot < 0:
        return
    p_columns = columns + i_slot * COLUMNS
    heat = tl.load(p_columns + TEMPERATURE)
    o_g = i_c * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    o_l = tl.arange(0, GROUP)
    o_v = (o_g * GROUP)[:, None] + o_l[None, :]
    row = _row(
        i_r, i_slot, logits, adjustments, penalties, token_counts, bias_ids, biases, bitmask, drafts, V, MASKS, DRAFTS
    )
    b_x = _logits(row, o_v, o_v < V)
    b_top = tl.max(b_x, 1)
    b_at = tl.min(tl.where(b_x == b_top[:, None], o_l[None, :], GROUP), 1)
    peak = tl.max(b_top, 0)
    tl.store(chunk_max + i_r * CHUNKS + i_c, peak)
    tl.store(chunk_id + i_r * CHUNKS + i_c, tl.min(tl.where(b_top == peak, o_g * GROUP + b_at, NO_ID), 0))
    if heat > 0:
        b_p = tl.exp2((b_x - tl.maximum(peak, -FLOAT_MAX)) * _scale(heat))
        tl.store(chunk_sum + i_r * CHUNKS + i_c, tl.sum(tl.sum(b_p, 1), 0))
        _, _, _, filtered = _filters(p_columns, heat, peak, V)
        if filtered:
            p_summary = summary + i_r.to(tl.int64) * (3 * GROUPS)
            tl.store(p_summary + o_g, b_top, mask=o_g < GROUPS)
            o_s = (GROUPS + o_g * 2)[:, None] + (o_l // (GROUP // 2))[None, :]
            m_s = (o_g < GROUPS)[:, None] & (o_l % (GROUP // 2) == 0)[None, :]
            tl.store(p_summary + o_s, tl.where(o_l[None, :] == b_at[:, None], float("-inf"), b_x), mask=m_s)


@triton.jit
def _cut(b_x, b_w, goal, low, high):
    """max {t in [low, high): sum of b_w where key(b_x) >= t reaches `goal`}, or `low` if there is no such key t."""
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(b_x >= _values(middle), b_w, 0.0), 0) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _search(row, p_values, n, held, scale, peak, low, high, goal, CHUNK: tl.constexpr, MASS: tl.constexpr):
    """max {t in [low, high): the measure of the candidates with key >= t reaches `goal`}, or `low` if there is none.

    The measure is the count of the n `_candidates`, or with MASS the sum of exp((x - peak) / temperature). Each pass
    tests 8 pivots, so at most 11 passes are needed. The search ends on the key of a candidate, so equal logits are
    never parted.
    """
    o_p = tl.arange(0, 8)
    while high - low > 1:
        b_pivot = low + (high - low) * (o_p + 1) // 9
        b_sum = tl.zeros([8, CHUNK], tl.float32)
        for i_v in range(0, n, CHUNK):
            o_v = i_v + tl.arange(0, CHUNK)
            b_x = _candidates(row, p_values, o_v, n, held)
            b_w = tl.where(o_v < n, 1.0, 0.0)
            if MASS:
                b_w = tl.exp2((b_x - peak) * scale)
            b_sum += tl.where(b_x[None, :] >= _values(b_pivot)[:, None], b_w[None, :], 0.0)
        b_measure = tl.sum(b_sum, 1)
        low = tl.max(tl.where(b_measure >= goal, b_pivot, low), 0)
        high = tl.min(tl.where(b_measure >= goal, high, b_pivot), 0)
    return low


@triton.jit
def _masses(row, p_values, n, held, scale, peak, floor, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """sum(exp((x - peak) / temperature)) of keys from `floor` on, for each chunk of the n `_candidates`: [BLOCK_C]."""
    o_c = tl.arange(0, BLOCK_C)
    b_mass = tl.zeros([BLOCK_C], tl.float32)
    for i_c in range(0, tl.cdiv(n, CHUNK)):
        b_x = _candidates(row, p_values, i_c * CHUNK + tl.arange(0, CHUNK), n, held)
        b_p = tl.where(b_x >= _values(floor), tl.exp2((b_x - peak) * scale), 0.0)
        b_mass = tl.where(o_c == i_c, tl.sum(b_p, 0), b_mass)
    return b_mass


@triton.jit
def _gather(
    row, b_a, p_groups, scale, peak, low, high, p_values, p_ids,
    V: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_A: tl.constexpr,
    BUFFER: tl.constexpr,
):  # fmt: skip
    """(n, inside, above): how many logits have keys in [low, high), their mass, and the mass of the keys from high on.

    The n logits are written to p_values in order of their ids, and the ids to p_ids, as far as BUFFER has room. Only
    groups whose largest logit is at least `low` are read; b_a [BLOCK_A] is the row's summary.
    """
    o_a = tl.arange(0, BLOCK_A)
    m_a = (o_a < GROUPS) & (b_a >= _values(low))
    tl.store(p_groups + tl.cumsum(m_a.to(tl.int32), 0) - 1, o_a, mask=m_a)
    tl.debug_barrier()  # other threads read what was stored
    num_groups = tl.sum(m_a.to(tl.int32), 0)
    n = 0
    b_inside = tl.zeros([CHUNK // GROUP, GROUP], tl.float32)
    b_above = tl.zeros([CHUNK // GROUP, GROUP], tl.float32)
    for i_g in tl.range(0, num_groups, CHUNK // GROUP, num_stages=3):
        o_g = i_g + tl.arange(0, CHUNK // GROUP)
        b_g = tl.load(p_groups + o_g, mask=o_g < num_groups, other=V)
        o_v = (b_g * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        b_x = _logits(row, o_v, o_v < V)
        b_p = tl.exp2((b_x - peak) * scale)
        m_above = b_x >= _values(high)
        m_in = (o_v < V) & (b_x >= _values(low)) & ~m_above
        b_above += tl.where(m_above, b_p, 0.0)
        b_inside += tl.where(m_in, b_p, 0.0)
        o_n = tl.cumsum(tl.reshape(m_in.to(tl.int32), [CHUNK]), 0) - 1
        o_n = n + tl.reshape(o_n, [CHUNK // GROUP, GROUP])
        tl.store(p_values + o_n, b_x, mask=m_in & (o_n < BUFFER))
        tl.store(p_ids + o_n, o_v, mask=m_in & (o_n < BUFFER))
        n += tl.sum(tl.sum(m_in.to(tl.int32), 1), 0)
    tl.debug_barrier()
    return n, tl.sum(tl.sum(b_inside, 1), 0), tl.sum(tl.sum(b_above, 1), 0)


@triton.jit
def _bounds(b_a, k, share, total, peak, scale, bottom, top, GROUPS: tl.constexpr, BLOCK_A: tl.constexpr):
    """(low, high, goal, guessed): the threshold t of top_k, or else of top_p, has its key in [low, high).

    What is at least t reaches `goal`, which is a count for top_k and a mass for top_p. If `guessed`, the bounds are
    only likely, and the caller checks them. b_a [BLOCK_A] is the row's summary, `total` is the row's mass.
    """
    o_a = tl.arange(0, BLOCK_A)
    # t is at least the k-th largest of the groups' largest logits. For top_p it is at least the key from which on their
    # mass alone reaches the goal.
    b_w = tl.exp2((b_a - peak) * scale)
    goal = share * total
    if k > 0:
        b_w = tl.where(b_a > float("-inf"), 1.0, 0.0)
        goal = k.to(tl.float32)
    low, high = _cut(b_a, tl.where(o_a < GROUPS, b_w, 0.0), goal * 1.00001, bottom, top), top
    guessed = (low == bottom) & (k == 0)
    if guessed:
        # The groups' largest have too little mass. The samples tell how much mass the other logits are likely to have
        # above each key. The bounds are 4 standard errors to both sides of that guess (Floyd and Rivest, "Expected time
        # bounds for selection", 1975).
        m_s = o_a >= GROUPS
        sampled = tl.maximum(tl.sum(tl.where(m_s, b_w, 0.0), 0), 1e-30)
        rest = tl.maximum(total - tl.sum(tl.where(m_s, 0.0, b_w), 0), 1e-30)
        b_w *= tl.where(m_s, rest / sampled, 1.0)
        guess = _cut(b_a, b_w, goal, bottom, top)
        m_above = b_a >= _values(guess)
        part = tl.sum(tl.where(m_s & m_above, b_w, 0.0), 0) / rest
        b_error = tl.where(m_s, b_w * tl.where(m_above, 1.0 - part, part), 0.0)
        error = 4.0 * tl.sqrt(tl.sum(b_error * b_error, 0))
        low = _cut(b_a, b_w, goal + error, bottom, guess + 1)
        high = _cut(b_a, b_w, goal - error, guess, top) + 1
    return low, high, goal, guessed


@triton.jit
def _draw(row, p_values, n, held, b_mass, u, scale, peak, floor, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """min {i: sum_{j <= i} p_j > u sum_j p_j}, over the n `_candidates` with keys from `floor` on.

    b_mass [BLOCK_C] is the mass of each chunk of them. The chunk in which the running sum passes u times the whole is
    found first, then the place within it. Where rounding hides the crossing, the last chunk (or place) that has any
    mass is taken.
    """
    o_c = tl.arange(0, BLOCK_C)
    b_sum = tl.cumsum(b_mass, 0)
    goal = u * tl.max(b_sum, 0)
    i_c = tl.min(tl.where((b_sum > goal) & (b_mass > 0), o_c, NO_ID), 0)
    i_c = tl.where(i_c < BLOCK_C, i_c, tl.max(tl.where(b_mass > 0, o_c, 0), 0))
    before = tl.sum(tl.where(o_c < i_c, b_mass, 0.0), 0)
    o_v = i_c * CHUNK + tl.arange(0, CHUNK)
    b_x = _candidates(row, p_values, o_v, n, held)
    b_p = tl.where(b_x >= _values(floor), tl.exp2((b_x - peak) * scale), 0.0)
    i_v = tl.min(tl.where((before + tl.cumsum(b_p, 0) > goal) & (b_p > 0), o_v, NO_ID), 0)
    return tl.where(i_v < n, i_v, tl.max(tl.where(b_p > 0, o_v, 0), 0))


@triton.jit
def sample_pick_kernel(
    logits, slots, columns, seeds, num_known, adjustments, penalties, token_counts, bias_ids, biases, bitmask, drafts,
    chunk_max, chunk_sum, chunk_id, summary, groups, values, value_ids, ids,
    V: tl.constexpr, COLUMNS: tl.constexpr, MASKS: tl.constexpr, DRAFTS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_A: tl.constexpr,
    BUFFER: tl.constexpr, GATHER: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """id = min {i: sum_{j <= i, x_j >= t} p_j > u sum_{x_j >= t} p_j}, t = max(t_k, t_p, t_m); one program per row.

    The results of sample_chunks_kernel, with the shapes given there, spare a greedy row every look at its logits, and
    an unfiltered row all but one chunk. For a filtered row they give bounds of t. Only the groups whose largest logit
    reaches the lower bound are read, and the logits between the bounds go into the buffer: values float32 and value_ids
    int32, [R, BUFFER], in order of id. The search for t goes on there. It goes over the whole row instead where the
    buffer is too small, or where the bounds were guessed and turn out wrong. groups [R, GROUPS] int32; ids [R] int64.
    """
    i_r = tl.program_id(0)
    i_slot = tl.load(slots + i_r)
    if i_slot < 0:
        tl.store(ids + i_r, tl.zeros([], tl.int64))
        return
    p_columns = columns + i_slot * COLUMNS
    heat = tl.load(p_columns + TEMPERATURE)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < CHUNKS
    b_max = tl.load(chunk_max + i_r * CHUNKS + o_c, mask=m_c, other=float("-inf"))
    peak = tl.max(b_max, 0)
    lost = tl.abs(peak) == float("inf")  # some logit is NaN, or none is above -inf
    if lost | (heat <= 0):
        b_id = tl.load(chunk_id + i_r * CHUNKS + o_c, mask=m_c & (b_max == peak), other=NO_ID)
        tl.store(ids + i_r, tl.where(lost, -1, tl.min(b_id, 0)).to(tl.int64))
        return
    row = _row(
        i_r, i_slot, logits, adjustments, penalties, token_counts, bias_ids, biases, bitmask, drafts, V, MASKS, DRAFTS
    )
    scale = _scale(heat)
    b_mass = tl.load(chunk_sum + i_r * CHUNKS + o_c, mask=m_c, other=0.0)
    b_mass *= tl.exp2((tl.maximum(b_max, -FLOAT_MAX) - peak) * scale)
    k, share, least, filtered = _filters(p_columns, heat, peak, V)
    p_values, p_ids = values + i_r.to(tl.int64) * BUFFER, value_ids + i_r.to(tl.int64) * BUFFER
    no = heat <= 0  # False as a value, so that an `if` may change it
    floor, n, held = _key(float("-inf")), V, no
    if filtered:
        total = tl.sum(b_mass, 0)
        bottom, top = floor, _key(peak) + 1
        floor = _key(least)
        low, high, goal, guessed = floor, top, total * 0.0, no
        o_a = tl.arange(0, BLOCK_A)
        b_a = tl.load(summary + i_r.to(tl.int64) * (3 * GROUPS) + o_a, mask=o_a < 3 * GROUPS, other=float("-inf"))
        if (k > 0) | (share < 1.0):
            low, high, goal, guessed = _bounds(b_a, k, share, total, peak, scale, bottom, top, GROUPS, BLOCK_A)
        n, inside, above = _gather(
            row, b_a, groups + i_r * GROUPS, scale, peak, low, high, p_values, p_ids,
            V, GROUPS, GROUP, GATHER, BLOCK_A, BUFFER,
        )  # fmt: skip
        right = (guessed == 0) | ((above < goal) & (above + inside >= goal))
        held = right & (n <= BUFFER)
        if not held:
            low, high = tl.where(right, low, bottom), tl.where(right, high, top)
            n, above = V, total * 0.0
        if k > 0:
            low = _search(row, p_values, n, held, scale, peak, low, high, k.to(tl.float32), SEARCH, False)
            total = tl.sum(_masses(row, p_values, n, held, scale, peak, low, CHUNK, BLOCK_C), 0)
        if share < 1.0:
            low = _search(row, p_values, n, held, scale, peak, low, high, share * total - above, SEARCH, True)
        floor = tl.maximum(low, floor)
        if guessed:  # the buffer lacks the logits above the upper bound
            n, held = V, no
        b_mass = _masses(row, p_values, n, held, scale, peak, floor, CHUNK, BLOCK_C)
    u = tl.rand(tl.load(seeds + i_slot), tl.load(num_known + i_slot) + _num_drafts(drafts, i_r, DRAFTS))
    i_v = _draw(row, p_values, n, held, b_mass, u, scale, peak, floor, CHUNK, BLOCK_C)
    if held:
        i_v = tl.load(p_ids + i_v, mask=n > 0, other=0)
    tl.store(ids + i_r, i_v.to(tl.int64))


@triton.jit(do_not_specialize=["ids_stride", "bits_stride"], do_not_specialize_on_alignment=["slots"])
def mask_words_kernel(
    slots, token_ids, num_known, num_prompt, bad_words, adjustments, bitmask, drafts, ids_stride, bits_stride,
    MASKS: tl.constexpr, DRAFTS: tl.constexpr, WORDS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bit v of bitmask[slot, a] = 0 if the output ends with w_1 .. w_(n-1) for a bad word w with w_n = v; else 1.

    One program per row that samples, after a drafts, which are part of the output; bitmask [S, MASKS, bits_stride];
    bad_words [S, WORDS, LENGTH]. Several words may end in v. Each finds out whether one of them bars it, so all write
    the same bit, and their order does not matter.
    """
    i_slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if i_slot < 0:
        return
    if tl.load(adjustments + i_slot) & 8 == 0:  # no BAD_WORDS
        return
    o_w, o_l, n = tl.arange(0, WORDS), tl.arange(0, LENGTH), _num_drafts(drafts, tl.program_id(0), DRAFTS)
    i_known = tl.load(num_known + i_slot) + n
    p_words = bad_words + i_slot * (WORDS * LENGTH)
    o_at = i_known + 1 - LENGTH + o_l  # the last one is the place of the token to come
    m_at = (o_at >= tl.load(num_prompt + i_slot)) & (o_at < i_known)
    b_token = tl.load(token_ids + i_slot * ids_stride + o_at, mask=m_at, other=-2)
    b_end = tl.load(p_words + o_w * LENGTH + LENGTH - 1)
    b_barred = tl.zeros([WORDS], dtype=tl.int32)
    for i_w in range(0, WORDS, BLOCK):
        o_b = i_w + tl.arange(0, BLOCK)
        b_word = tl.load(p_words + o_b[:, None] * LENGTH + o_l[None, :])
        b_same = (b_word == b_token[None, :]) | (b_word < 0) | (o_l == LENGTH - 1)[None, :]
        b_last = tl.load(p_words + o_b * LENGTH + LENGTH - 1)
        b_last = tl.where(tl.min(b_same.to(tl.int32), 1) != 0, b_last, -2)
        b_barred |= tl.max((b_end[:, None] == b_last[None, :]).to(tl.int32), 1)
    m_w, b_bit = b_end >= 0, tl.full([WORDS], 1, dtype=tl.int32) << (b_end & 31)
    p_bits = bitmask + (i_slot * MASKS + n) * bits_stride + b_end // 32
    tl.atomic_and(p_bits, ~b_bit, mask=m_w & (b_barred != 0))
    tl.atomic_or(p_bits, b_bit, mask=m_w & (b_barred == 0))


def mask_words(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_prompt: torch.Tensor,
    bad_words: torch.Tensor,
    adjust: Adjust,
    drafts: torch.Tensor | None = None,
) -> None:
    """Clear the mask bits of tokens that would complete a bad word (`reference.mask_words`)."""
    rows, (_, words, length), (_, masks, bits) = len(slots), bad_words.shape, adjust.bitmask.shape
    width = 0 if drafts is None else drafts.shape[1]
    assert bad_words.is_contiguous() and token_ids.stride(1) == 1 and adjust.bitmask.is_contiguous()
    assert drafts is None or (drafts.is_contiguous() and drafts.dtype == torch.int32 and width < masks)
    assert words & (words - 1) == 0 and length & (length - 1) == 0

    mask_words_kernel[(rows,)](
        slots, token_ids, num_known, num_prompt, bad_words, adjust.adjustments, adjust.bitmask, drafts,
        token_ids.stride(0), bits, masks, width, words, length, min(words, 32),
    )  # fmt: skip


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    params: torch.Tensor,
    seeds: torch.Tensor,
    num_known: torch.Tensor,
    adjust: Adjust | None = None,
    drafts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for each row (`reference.sample`)."""
    rows, vocab = logits.shape
    assert logits.is_contiguous() and params.is_contiguous() and vocab < NO_ID.value and seeds.dtype == torch.int64
    assert adjust is None or (all(x.is_contiguous() for x in adjust) and adjust.token_counts.shape[1] == vocab)
    assert adjust is None or adjust.bias_ids.shape[1] == adjust.biases.shape[1] == MAX_BIASES.value
    masks, width = 1 if adjust is None else adjust.bitmask.shape[1], 0 if drafts is None else drafts.shape[1]
    assert drafts is None or (drafts.is_contiguous() and drafts.dtype == torch.int32)
    assert adjust is None or width < masks

    chunk = min(SAMPLE_CHUNK, max(16, triton.next_power_of_2(vocab)))
    chunks = triton.cdiv(vocab, chunk)
    group = min(chunk, max(SAMPLE_GROUP, triton.next_power_of_2(triton.cdiv(3 * vocab, SAMPLE_SUMMARY))))
    groups = triton.cdiv(vocab, group)
    room = min(SAMPLE_BUFFER, chunks * chunk)
    chunk_max = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    # A tensor of its own: as half of another one, only some numbers of rows would leave it aligned.
    chunk_sum = torch.empty_like(chunk_max)
    chunk_id = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    summary = torch.empty(rows, 3 * groups, dtype=torch.float32, device=logits.device)
    group_ids = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, room, dtype=torch.float32, device=logits.device)
    value_ids = torch.empty(rows, room, dtype=torch.int32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)

    state = adjust or (None,) * len(Adjust._fields)
    sample_chunks_kernel[(rows, chunks)](
        logits, slots, params, *state, drafts, chunk_max, chunk_sum, chunk_id, summary, vocab, params.shape[1], masks,
        width, chunks, chunk, groups, group, num_warps=4,
    )  # fmt: skip
    sample_pick_kernel[(rows,)](
        logits, slots, params, seeds, num_known, *state, drafts, chunk_max, chunk_sum, chunk_id, summary, group_ids,
        values, value_ids, ids, vocab, params.shape[1], masks, width, chunks, chunk, triton.next_power_of_2(chunks),
        groups, group, triton.next_power_of_2(3 * groups), room, min(chunk, SAMPLE_GATHER),
        min(chunk, SAMPLE_SEARCH), num_warps=8, maxnreg=SAMPLE_REGISTERS if adjust is None else 255,
    )  # fmt: skip
    return ids


@triton.jit(do_not_specialize_on_alignment=["ids"])
def logprobs_kernel(
    logits, ids, values, ranks, lse, keys,
    V: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HAS_KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values = x[id] - lse, lse = max x + log(sum(exp(x - max x))), x a row of logits [R, V]; one program per row.

    One pass is enough, because the sum is kept relative to the largest x so far. keys [R, GROUPS] int64 sort a row's
    groups of GROUP logits by their largest logit, and equal ones by their place, so a group is -key mod GROUPS.
    values, lse [R] float32; ranks [R] int32, 1 + the number of logits above x[id].
    """
    i_r = tl.program_id(0).to(tl.int64)
    p_logits = logits + i_r * V
    x = tl.load(p_logits + tl.load(ids + i_r)).to(tl.float32)
    x = tl.where(x > FLOAT_MAX, FLOAT_MAX, x)
    peak = tl.full([], -FLOAT_MAX, tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    b_above = tl.zeros([BLOCK], tl.int32)
    for i_v in range(0, V, BLOCK):
        o_v = i_v + tl.arange(0, BLOCK)
        b_x = tl.load(p_logits + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        b_x = tl.where(b_x > FLOAT_MAX, FLOAT_MAX, b_x)  # with +inf, x - peak would be NaN
        b_above += (b_x > x).to(tl.int32)
        higher = tl.maximum(peak, tl.max(b_x, 0))
        fall = tl.maximum(peak - higher, -128.0)  # exp(-128) is 0 too, and fall * LOG2E stays finite
        b_sum = b_sum * tl.exp2(fall * LOG2E) + tl.exp2((b_x - higher) * LOG2E)
        peak = higher
        if HAS_KEYS:
            o_g = i_v // GROUP + tl.arange(0, BLOCK // GROUP)
            b_key = _keys(tl.max(tl.reshape(b_x, [BLOCK // GROUP, GROUP]), 1))
            tl.store(keys + i_r * GROUPS + o_g, b_key.to(tl.int64) * GROUPS - o_g, mask=o_g < GROUPS)
    total = tl.sum(b_sum, 0)
    b_lse = tl.where(total == 0, -FLOAT_MAX, peak + tl.log(total))  # without a finite logit: -inf and not NaN
    tl.store(values + i_r, x - b_lse)
    tl.store(ranks + i_r, 1 + tl.sum(b_above, 0))
    tl.store(lse + i_r, b_lse)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of each row's token, and of the k likeliest (`reference.logprobs`)."""
    rows, vocab = logits.shape
    assert logits.is_contiguous() and vocab < NO_ID.value and ids.dtype == torch.int64 and 0 <= k <= vocab

    block = min(SAMPLE_CHUNK, max(16, triton.next_power_of_2(vocab)))
    group = min(block, SAMPLE_GROUP)
    groups = triton.cdiv(vocab, group)
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(values)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    keys = torch.empty(rows, groups, dtype=torch.int64, device=logits.device) if k else None

    logprobs_kernel[(rows,)](logits, ids, values, ranks, lse, keys, vocab, groups, group, k > 0, block, num_warps=8)
    if keys is None:
        return values, ranks, ids.new_empty(rows, 0), lse.new_empty(rows, 0)
    # The k likeliest lie in the first k groups: each of these has a logit that comes before all of the other groups'.
    # torch sorts keys and not logits, because it leaves open which of two equal logits comes first.
    first = -keys.topk(min(k, groups)).values % groups
    at = (first[:, :, None] * group + torch.arange(group, device=logits.device)).flatten(1)
    x = logits.gather(1, at.clamp(max=vocab - 1)).float().clamp_(max=FLOAT_MAX.value)
    order = (x + 0.0).view(torch.int32)  # makes the two zeros one
    keys = (order ^ ((order >> 31) & 0x7FFFFFFF)).long().mul_(vocab).sub_(at).masked_fill_(at >= vocab, -(2**63))
    chosen = keys.topk(k).indices
    return values, ranks, at.gather(1, chosen), x.gather(1, chosen) - lse[:, None]
