"""A sanitizer for the paged KV cache: what attention is about to read must be the sequence's own, and nobody else's.

The idea is AddressSanitizer's (Serebryany et al., 2012): memory has a shadow that tells what each place holds, and what
is freed is poisoned. Every step is checked in two ways before the model runs:

    books   on the host. A block's generation goes up when its last reference goes, and an entry of a block table keeps
            the generation that it was made with (as a pointer keeps its tag in Arm's memory tagging). An entry of an
            old generation is a block that was freed too early.
    shadow  on the device. Each KV slot has a hash of the tokens up to and including the one whose key it holds, and of
            the kind of layers that it is for. A context that does not hash to the sequence's own tokens is a stale
            prefix, a wrong slot, another kind's block, or another sequence's overwrite. Each row of recurrent states
            has the hash of the tokens that it has seen.

The hash of t_0 .. t_i is sum_j mix(t_j, j) mod 2^64, so each token just adds to it (AdHash: Bellare and Micciancio,
"Incrementality at reduced cost", 1997). Freed blocks are also filled with NaN, and so are the states of slots that a
sequence has left. If a kernel reads where no table points, the NaN shows in the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from plan import StepPlan

POISON = -0x5A5A5A5A5A5A5A5B  # a sequence hashes to it with a chance of one in 2^64
FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # splitmix64's, odd, without the sign bit


class SanitizerError(AssertionError):
    """A sequence's context holds what is not its own, so an invariant of the engine is broken."""


def mix(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A hash of token and position, int64. It is nearly the finalizer of splitmix64 (Steele et al., 2014).

    All virtual tokens count as one, because their ids say in which slot their adapter is.

    Args:
        token_ids, positions: integers of one shape, which the result has, too.
    """
    x = (token_ids.long().clamp(min=-1) + 1) * FACTORS[0] + positions.long() * FACTORS[1]
    x = (x ^ (x >> 30)) * FACTORS[1]
    x = (x ^ (x >> 27)) * FACTORS[2]
    return x ^ (x >> 31)


class Shadow:
    """What the blocks of one pool hold, and who wrote it. It has one block more, which -1 means and nobody reads."""

    def __init__(self, num_blocks: int, block_size: int, device: str):
        self.hashes = torch.full((num_blocks + 1, block_size), POISON, dtype=torch.int64, device=device)
        self.writers = np.full(num_blocks + 1, "", dtype=object)  # the latest request that wrote to each block
        self.steps = np.full(num_blocks + 1, -1)  # the step in which it did

    def move(self, pairs: list[tuple[int, int]], target: Shadow) -> None:
        """Copy blocks to `target` for each (from, to), as `copy_blocks` and `swap_blocks` do with the pools."""
        if pairs:
            source_ids, target_ids = torch.tensor(pairs, device=self.hashes.device).unbind(1)
            target.hashes[target_ids] = self.hashes[source_ids]
            froms, to = np.array(pairs).T
            target.writers[to], target.steps[to] = self.writers[froms], self.steps[froms]


class KVSanitizer:
    """Follows a worker's plans and checks each of them. It must be made before any plan, while the pools are empty.

    Args:
        pool: the KV pool, [num_blocks, ..], which is filled with NaN here.
        num_host_blocks: blocks of the host pool.
        token_ids: [slots, max_model_len + 1] int32, the worker's own tokens of each sequence.
        block_tables: [kinds, slots, max_blocks] int32, the worker's own tables, which attention reads.
        block_size: tokens in a block.
        windows: of each kind of layers, the most tokens that its attention sees; 0 for all.
        states: the pool of recurrent states [rows, size], which is filled with NaN here, too; None: there are none.
        num_host_states: rows of the host's.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        num_host_blocks: int,
        token_ids: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
        windows: Sequence[int],
        states: torch.Tensor | None = None,
        num_host_states: int = 0,
    ):
        (kinds, slots, columns), device = block_tables.shape, str(pool.device)
        self.pool, self.token_ids, self.block_tables = pool, token_ids, block_tables
        self.block_size, self.windows = block_size, tuple(windows)
        self.shadow = Shadow(len(pool), block_size, device)
        self.host_shadow = Shadow(num_host_blocks, block_size, device)
        self.generations = np.zeros(len(pool) + 1, dtype=np.int64)
        self.step = -1  # of the latest plan
        self.freed_in = np.full(len(pool) + 1, -1)  # the step whose plan freed the block
        self.names = np.full(slots, "", dtype=object)
        self.computed = np.zeros(slots, dtype=np.int64)
        self.lengths = np.zeros((kinds, slots), dtype=np.int64)  # blocks in each slot's tables
        self.tables, self.tags = (np.full((kinds, slots, columns), -1, dtype=np.int64) for _ in range(2))
        # [slot, i] is the hash of the sequence's first i tokens. The last row is for padding.
        self.hashes = torch.zeros(slots + 1, columns * block_size + 1, dtype=torch.int64, device=device)
        # A state is like a block of one place, which holds the hash of all tokens so far.
        self.states = pool.new_empty(0, 0) if states is None else states
        self.state_shadow, self.host_state_shadow = (
            Shadow(rows, 1, device) for rows in (len(self.states), num_host_states)
        )
        for poisoned in (pool, self.states):
            poisoned.fill_(torch.nan)

    # --- what a plan changes ----------------------------------------------------------------------------------------

    def follow(self, plan: StepPlan, adapters: Sequence[int] = ()) -> None:
        """Apply a plan's differences, after the worker has moved its blocks, and poison what the plan has freed.

        `adapters` has a number for the adapter in each slot; with another one, the same tokens have other keys.
        """
        if plan.step > self.step + 1:  # steps that never began would have told who left; now all sequences enter anew
            self.tables[:] = self.tags[:] = -1
        self.step = plan.step
        freed = [block for block, _ in plan.freed]
        self.generations[freed] += 1
        self.freed_in[freed] = plan.step
        self.shadow.move(plan.swap_out, self.host_shadow)
        # A freed block may have been moved to the host just now, and another move may have filled it again already.
        if dropped := {block for block, kept in plan.freed if not kept}:
            self.shadow.hashes[list(dropped)] = POISON
            if empty := dropped.difference(block for _, block in (*plan.swap_in, *plan.copies)):
                self.pool[list(empty)] = torch.nan
        self.host_shadow.move(plan.swap_in, self.shadow)
        self.shadow.move(plan.copies, self.shadow)
        self.state_shadow.move(plan.state_out, self.host_state_shadow)
        self.host_state_shadow.move(plan.state_in, self.state_shadow)
        self.state_shadow.move(plan.state_copies, self.state_shadow)
        for slot in plan.released:
            self._clear(slot)
        if self.states.numel():  # but for slots that others come into at once
            left = [*set(plan.released).difference(row.slot for row in plan.new)]
            self.states[left], self.state_shadow.hashes[left] = torch.nan, POISON
        for row in plan.new:
            self._clear(row.slot)
            self.names[row.slot], self.computed[row.slot] = row.name, row.num_computed
            self.hashes[row.slot] = 0
            first = adapters[row.adapter - 1] if row.adapter else 0
            self._grow(row.slot, row.blocks)
            known = self.token_ids[row.slot, : len(row.token_ids)]
            mixed = mix(known, torch.arange(len(known), device=known.device))
            self.hashes[row.slot, 0] = first
            self.hashes[row.slot, 1 : len(known) + 1] = first + mixed.cumsum(0)
        for slot, blocks in plan.new_blocks:
            self._grow(slot, blocks)

    def _clear(self, slot: int) -> None:
        self.tables[:, slot] = self.tags[:, slot] = -1
        self.lengths[:, slot] = 0

    def _grow(self, slot: int, tables: list[list[int]]) -> None:
        for kind, blocks in enumerate(tables):
            begin, end = self.lengths[kind, slot], self.lengths[kind, slot] + len(blocks)
            self.tables[kind, slot, begin:end] = blocks
            self.tags[kind, slot, begin:end] = self.generations[blocks]
            self.lengths[kind, slot] = end

    # --- what a step reads and writes -------------------------------------------------------------------------------

    def check(
        self,
        plan: StepPlan,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Check all that the plan's rows are about to read and write.

        Args:
            plan: the plan that `follow` was given. The tensors are the results of `prepare_inputs` for it.

        Raises:
            SanitizerError: names the request, the block and the step.
        """
        slots, counts = np.array(plan.rows).T
        device = self.pool.device
        owners = torch.from_numpy(np.repeat(slots, counts)).to(device)
        rows = torch.from_numpy(slots).to(device)
        # The device may have sampled the last of these tokens, or made drafts, and no plan has told them.
        places, firsts = positions.long(), torch.from_numpy(counts.cumsum() - counts).to(device)
        mixed = mix(self.token_ids[owners, places], places)
        sums = mixed.cumsum(0)
        before = self.hashes[rows, places[firsts]] - (sums - mixed)[firsts]
        self.hashes[owners, places + 1] = sums + before.repeat_interleave(torch.from_numpy(counts).to(device))
        self.computed[slots] = places[firsts].cpu().numpy()
        if self.states.numel():
            self._check_states(slots, seq_lens.long(), torch.from_numpy(counts).to(device))
        hashes = self.hashes[owners, places] + mix(input_ids, positions)
        for kind in range(len(self.windows)):
            self._check_books(kind, slots, counts, (owners, positions, slot_mapping[kind], hashes))
        self.computed[slots] += counts
        for kind, window in enumerate(self.windows):
            first = seq_lens - torch.from_numpy(counts).to(device) - window + 1 if window else 0 * seq_lens
            self._check_reads(kind, slots, first, seq_lens, (owners, positions, slot_mapping[kind]))

    def _check_books(self, kind: int, slots: np.ndarray, counts: np.ndarray, tokens: tuple[torch.Tensor, ...]) -> None:
        """Check the blocks of one kind that a step's rows [B] read and write, and note what its `tokens` write."""
        window = self.windows[kind]
        begins, ends = self.computed[slots], self.computed[slots] + counts
        seen = np.maximum(begins - window + 1, 0) if window else np.zeros_like(begins)
        columns = np.arange(-(-int(ends.max()) // self.block_size))
        reached = columns < -(-ends // self.block_size)[:, None]
        self._check_generations(kind, slots, reached & (columns >= seen[:, None] // self.block_size))
        written = reached & (columns >= begins[:, None] // self.block_size)
        rows, at = written.nonzero()
        blocks = self.tables[kind, slots[rows], at]
        owners, positions, slot_mapping, hashes = tokens
        hashes = hashes + kind * FACTORS[2]
        if len(shared := self._shared(blocks)):
            self._check_writes((owners, positions, slot_mapping, hashes), shared)
        # A slot of -1 stores nothing; here it is in the block that nobody reads.
        self.shadow.hashes.view(-1)[slot_mapping] = hashes
        self.shadow.writers[blocks], self.shadow.steps[blocks] = self.names[slots[rows]], self.step

    def _check_reads(
        self,
        kind: int,
        slots: np.ndarray,
        first: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: tuple[torch.Tensor, ...],
    ) -> None:
        """Check that the blocks of one kind hold each row's own tokens from `first` [B] on and below `seq_lens` [B]."""
        rows = torch.from_numpy(slots).to(seq_lens.device)
        tables = self.block_tables[kind, rows, : -(-int(seq_lens.max()) // self.block_size)].long()
        held = self.shadow.hashes[tables].flatten(1) - kind * FACTORS[2]  # [B, positions]
        position = torch.arange(held.shape[1], device=held.device)
        wrong = held != self.hashes[rows, 1 : held.shape[1] + 1]
        wrong &= (position < seq_lens[:, None]) & (position >= first[:, None])
        if wrong.any():
            row, place = wrong.nonzero()[0].tolist()
            owners, positions, slot_mapping = tokens
            block = int(tables[row, place // self.block_size])
            mapped = slot_mapping[(owners == int(slots[row])) & (positions == place)].tolist()
            raise self._wrong_read(int(slots[row]), block, place, int(held[row, place]), mapped)

    def _check_states(self, slots: np.ndarray, seq_lens: torch.Tensor, counts: torch.Tensor) -> None:
        """Check that the state of each row [B] has seen the tokens before the step's, and note that it sees these."""
        rows = torch.from_numpy(slots).to(seq_lens.device)
        held, begins = self.state_shadow.hashes[rows, 0], seq_lens - counts
        wrong = (begins > 0) & (held != self.hashes[rows, begins])
        if wrong.any():
            row = int(wrong.nonzero()[0])
            slot, begin, writer = int(slots[row]), int(begins[row]), self.state_shadow.writers[slots[row]]
            found = (self.hashes == held[row]).nonzero().tolist()
            if held[row] == POISON:
                what = "holds nothing that was written since it was given back"
            elif found:
                what = f"has seen the first {found[0][1]} tokens of request {self.names[found[0][0]]!r}"
            else:
                what = f"holds what request {writer!r} wrote in step {self.state_shadow.steps[slot]}"
            raise self._error(slot, f"the recurrent state in row {slot} {what}, not this sequence's first {begin}")
        self.state_shadow.hashes[rows, 0] = self.hashes[rows, seq_lens]
        self.state_shadow.writers[slots], self.state_shadow.steps[slots] = self.names[slots], self.step

    def settle(self, slots: torch.Tensor, computed: torch.Tensor) -> None:
        """Note that the states of `slots` [B] have seen so many tokens [B]: of a row's drafts those that were taken."""
        self.state_shadow.hashes[slots, 0] = self.hashes[slots, computed.long()]

    def check_hidden(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Check that the hidden states [T, hidden] of a step have no NaN, which they would get from poison.

        Raises:
            SanitizerError: names the request and the step.
        """
        wrong = hidden.isnan().any(-1)
        if wrong.any():
            slots, counts = np.array(plan.rows).T
            raise self._error(
                np.repeat(slots, counts)[int(wrong.nonzero()[0])],
                "its hidden state is NaN, though its block table is right: attention has read a freed block or an "
                "unwritten slot, or the model itself makes NaN",
            )

    def _check_generations(self, kind: int, slots: np.ndarray, read: np.ndarray) -> None:
        """Check that no block of a kind that is read, [B, columns] bool, has been freed since it came into the table.

        An entry of -1 has no generation, so it is wrong wherever it is read.
        """
        tables, tags = (entries[kind, slots, : read.shape[1]] for entries in (self.tables, self.tags))
        wrong = read & ((tags != self.generations[tables]) | (tables < 0))
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0]
        block, tag = int(tables[row, column]), int(tags[row, column])
        first = column * self.block_size
        after = ""
        others = np.argwhere((self.tables == block) & (self.tags == self.generations[block]))
        if block >= 0 and len(others):
            after = f", and request {self.names[others[0, 1]]!r} has it now"
        raise self._error(
            slots[row],
            f"block {block} (positions {first} to {first + self.block_size - 1}) is in its table with generation "
            f"{tag}, but was freed in step {self.freed_in[block]}{after} (generation {self.generations[block]})",
        )

    def _shared(self, blocks: np.ndarray) -> np.ndarray:
        """Those of `blocks` that stand in several tables, in places that the tables' sequences can still read."""
        windows = np.array(self.windows)[:, None]
        seen = np.where(windows > 0, np.maximum(self.computed - windows + 1, 0), 0) // self.block_size
        valid = (self.tags == self.generations[self.tables]) & (np.arange(self.tables.shape[2]) >= seen[:, :, None])
        references = np.bincount(self.tables[valid & (self.tables >= 0)], minlength=len(self.generations))
        return blocks[references[blocks] > 1]

    def _check_writes(self, tokens: tuple[torch.Tensor, ...], shared: np.ndarray) -> None:
        """Check that those of a step's `tokens` which go into `shared` blocks change nothing there.

        A cached prompt's last token is computed again, which changes nothing, and others may share its block meanwhile.
        """
        owners, positions, slot_mapping, hashes = tokens
        inside = torch.isin(slot_mapping // self.block_size, torch.from_numpy(shared).to(slot_mapping.device))
        wrong = inside & (self.shadow.hashes.view(-1)[slot_mapping] != hashes)
        if wrong.any():
            token = int(wrong.nonzero()[0])
            slot, place = int(owners[token]), int(slot_mapping[token])
            block, offset = divmod(place, self.block_size)
            others = [self.names[other] for other in np.argwhere(self.tables == block)[:, 1] if other != slot]
            raise self._error(
                slot,
                f"block {block}, offset {offset} (position {int(positions[token])}) is written, but request "
                f"{others[0]!r} shares the block (generation {self.generations[block]}), and it was not copied first",
            )

    def _wrong_read(self, slot: int, block: int, place: int, held: int, mapped: list[int]) -> SanitizerError:
        """What a sequence would have read as its token at position `place`."""
        found = (self.hashes == held).nonzero().tolist()
        writer, written = self.shadow.writers[block], self.shadow.steps[block]
        if self.shadow.hashes[block, place % self.block_size] == POISON:
            what = "holds nothing that was written since it was freed"
        elif found:
            whose = self.names[found[0][0]]
            what = f"holds position {found[0][1] - 1} of request {whose!r}, written in step {written}"
        else:
            what = f"holds what request {writer!r} wrote in step {written}"
        offset, generation = place % self.block_size, self.generations[block]
        where = ""
        if mapped and mapped != [block * self.block_size + offset]:
            where = "; slot_mapping has the token at block {}, offset {}".format(*divmod(mapped[0], self.block_size))
        return self._error(
            slot,
            f"block {block}, offset {offset} (position {place}) {what} (generation {generation}), not this sequence's "
            f"token{where}",
        )

    def _error(self, slot: int, what: str) -> SanitizerError:
        return SanitizerError(f"KV sanitizer: step {self.step}, request {self.names[slot]!r}: {what}")
