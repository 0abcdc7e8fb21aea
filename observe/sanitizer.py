"""A sanitizer for the paged KV cache: what attention is about to read must be the sequence's own, and nobody else's.

The idea is AddressSanitizer's (Serebryany et al., 2012): memory has a shadow that tells what each place holds, and what
is freed is poisoned. Each KV slot has a hash of the tokens up to and including the one whose key it holds, and of the
kind of layers that it is for. Before the model runs a step, the context of each of its rows must hash to the sequence's
own tokens. Each row of recurrent states has the hash of the tokens that it has seen.

The hash of t_0 .. t_i is sum_j mix(t_j, j) mod 2^64, so each token just adds to it (AdHash: Bellare and Micciancio,
"Incrementality at reduced cost", 1997). Freed blocks and states are also filled with NaN. If a kernel reads where no
table points, the NaN shows in the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from plan import StepPlan

if TYPE_CHECKING:
    from batch_state import BatchState

POISON = -0x5A5A5A5A5A5A5A5B  # a sequence hashes to it with a chance of one in 2^64
FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # splitmix64's, odd, without the sign bit


class SanitizerError(AssertionError):
    """A sequence's context holds what is not its own, so an invariant of the engine is broken."""


def mix(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A hash of tokens and positions, int64 [same shape]. It is nearly splitmix64's finalizer (Steele et al., 2014)."""
    x = (token_ids.long() + 1) * FACTORS[0] + positions.long() * FACTORS[1]
    x = (x ^ (x >> 30)) * FACTORS[1]
    x = (x ^ (x >> 27)) * FACTORS[2]
    return x ^ (x >> 31)


def new_shadow(num_blocks: int, block_size: int, device: str) -> torch.Tensor:
    """The hashes of a pool's slots. There is one block more, which -1 means and nobody reads."""
    return torch.full((num_blocks + 1, block_size), POISON, dtype=torch.int64, device=device)


def move(pairs: list[tuple[int, int]], source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy blocks of shadows for each (from, to), as `copy_blocks` and `swap_blocks` do with the pools."""
    if pairs:
        source_ids, target_ids = torch.tensor(pairs, device=source.device).unbind(1)
        target[target_ids.to(target.device)] = source[source_ids].to(target.device)


class KVSanitizer:
    """Follows a worker's plans and checks each of them. It must be made before any plan, while the pools are empty.

    Args:
        pool: the KV pool, [num_blocks, ..], which is filled with NaN here.
        state: has the worker's own tokens of each sequence, and the tables that attention reads.
        windows: of each kind of layers, the most tokens that its attention sees; 0 for all.
        states: the pool of recurrent states [rows, size or 0], which is filled with NaN here, too.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        num_host_blocks: int,
        state: BatchState,
        windows: Sequence[int],
        states: torch.Tensor,
        num_host_states: int,
    ):
        (_, slots, columns), device = state.block_tables.shape, str(pool.device)
        self.pool, self.states = pool, states
        self.token_ids, self.block_tables = state.token_ids, state.block_tables
        self.block_size, self.windows = block_size, windows = state.block_size, tuple(windows)
        self.shadow = new_shadow(len(pool), block_size, device)
        self.host_shadow = new_shadow(num_host_blocks, block_size, "cpu")  # which `device/kv_disk.py` reads and fills
        self.step = -1  # of the latest plan
        self.names = [""] * slots  # of the requests and samples
        # [slot, i] is the hash of the sequence's first i tokens. The last row is for padding.
        self.hashes = torch.zeros(slots + 1, columns * block_size + 1, dtype=torch.int64, device=device)
        # A state is like a block of one place, which holds the hash of all tokens so far.
        self.state_shadow = new_shadow(len(states), 1, device)
        self.host_state_shadow = new_shadow(num_host_states, 1, device)
        for poisoned in (pool, states):
            poisoned.fill_(torch.nan)

    def follow(self, plan: StepPlan, adapters: Sequence[int] = ()) -> None:
        """Apply a plan's differences, after the worker has moved its blocks, and poison what the plan has freed.

        `adapters` has a number for the adapter in each slot, because with it the same tokens have other keys.
        """
        self.step = plan.step
        move(plan.swap_out, self.shadow, self.host_shadow)
        # A freed block may have been moved to the host just now, and another move may have filled it again already.
        if dropped := set(plan.freed):
            self.shadow[list(dropped)] = POISON
            if empty := dropped.difference(block for _, block in (*plan.swap_in, *plan.copies)):
                self.pool[list(empty)] = torch.nan
        move(plan.swap_in, self.host_shadow, self.shadow)
        move(plan.copies, self.shadow, self.shadow)
        move(plan.state_out, self.state_shadow, self.host_state_shadow)
        move(plan.state_in, self.host_state_shadow, self.state_shadow)
        move(plan.state_copies, self.state_shadow, self.state_shadow)
        if self.states.numel():  # but for slots that others come into at once
            left = [*set(plan.released).difference(row.slot for row in plan.new)]
            self.states[left], self.state_shadow[left] = torch.nan, POISON
        for row in plan.new:
            self.names[row.slot] = row.name
            token_ids = self.token_ids[row.slot, : len(row.token_ids)]
            mixed = mix(token_ids, torch.arange(len(token_ids), device=token_ids.device))
            self.hashes[row.slot] = 0
            self.hashes[row.slot, 0] = first = adapters[row.adapter - 1] if row.adapter else 0
            self.hashes[row.slot, 1 : len(token_ids) + 1] = first + mixed.cumsum(0)

    # --- what a step reads and writes -------------------------------------------------------------------------------

    def check(
        self,
        plan: StepPlan,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Check all that the plan's rows are about to read and write, from what `prepare_inputs` has made of the plan.

        Raises:
            SanitizerError: names the request, the block and the step.
        """
        slots, counts = torch.tensor(plan.rows, device=self.pool.device).unbind(1)  # [B]
        owners, firsts = slots.repeat_interleave(counts), counts.cumsum(0) - counts
        # The device may have sampled the last of these tokens, or made drafts, and no plan has told them.
        places = positions.long()
        mixed = mix(self.token_ids[owners, places], places)
        sums = mixed.cumsum(0)
        before = self.hashes[slots, places[firsts]] - (sums - mixed)[firsts]
        self.hashes[owners, places + 1] = sums + before.repeat_interleave(counts)
        if self.states.numel():
            self._check_states(slots, seq_lens.long(), counts)
        hashes = self.hashes[owners, places] + mix(input_ids, positions)
        for kind, written in enumerate(slot_mapping):  # a slot of -1 stores nothing; here it is where nobody reads
            self.shadow.view(-1)[written] = hashes + kind * FACTORS[2]
        for kind, window in enumerate(self.windows):
            first = seq_lens - counts - window + 1 if window else 0 * seq_lens  # that attention sees
            tables = self.block_tables[kind, slots, : -(-int(seq_lens.max()) // self.block_size)].long()
            held = self.shadow[tables].flatten(1) - kind * FACTORS[2]  # [B, positions]
            position = torch.arange(held.shape[1], device=held.device)
            differs = held != self.hashes[slots, 1 : held.shape[1] + 1]
            differs &= (position < seq_lens[:, None]) & (position >= first[:, None])
            if differs.any():
                row, place = differs.nonzero()[0].tolist()
                block, offset = int(tables[row, place // self.block_size]), place % self.block_size
                what = f"block {block}, offset {offset} does not hold this sequence's token of position {place}"
                raise self._error(int(slots[row]), what)

    def _check_states(self, slots: torch.Tensor, seq_lens: torch.Tensor, counts: torch.Tensor) -> None:
        """Check that the state of each row [B] has seen the tokens before the step's, and note that it sees these."""
        begins = seq_lens - counts
        differs = (begins > 0) & (self.state_shadow[slots, 0] != self.hashes[slots, begins])
        if differs.any():
            row = int(differs.nonzero()[0])
            what = f"the recurrent state in row {slots[row]} has not seen this sequence's first {begins[row]} tokens"
            raise self._error(int(slots[row]), what)
        self.state_shadow[slots, 0] = self.hashes[slots, seq_lens]

    def settle(self, slots: torch.Tensor, computed: torch.Tensor) -> None:
        """Note that the states of `slots` [B] have seen so many tokens [B]: of a row's drafts those that were taken."""
        self.state_shadow[slots, 0] = self.hashes[slots, computed.long()]

    def check_hidden(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Check that the hidden states [T, hidden] of a step have no NaN, as poison makes; raises what `check` does."""
        has_nan = hidden.isnan().any(-1)
        if has_nan.any():
            slots = [slot for slot, count in plan.rows for _ in range(count)]  # of each token
            raise self._error(
                slots[int(has_nan.nonzero()[0])],
                "its hidden state is NaN, though its block table is right: attention has read a freed block or an "
                "unwritten slot, or the model itself makes NaN",
            )

    def _error(self, slot: int, what: str) -> SanitizerError:
        return SanitizerError(f"KV sanitizer: step {self.step}, request {self.names[slot]!r}: {what}")
