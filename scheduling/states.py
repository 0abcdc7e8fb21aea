"""Which snapshots of recurrent states are kept, for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence as Items

from config import EngineConfig
from kv_cache import BlockManager
from plan import StateRoom, StepPlan
from sequence import Sequence, chain


class StateManager:
    """The rows of the state pools, for models with recurrent layers.

    A running sequence's state lies in the row of its slot. It has seen all computed tokens, and none can be taken back.
    So the prefix cache keeps snapshots (Marconi, Pan et al., 2024) in the rows after those of the slots: states at
    borders between two blocks, found by the chained hash of the tokens that they have seen. A prompt's step ends at
    such a border if it can, as in vLLM, at the latest before the last token, so that the same prompt finds its state.

    No row may be both read and written by one plan's copies, which the workers make at once: so snapshots are found,
    and host rows reused, once the plan is made.
    """

    def __init__(self, config: EngineConfig, room: StateRoom):
        self.room, self.size = room, config.block_size
        self.num_slots = config.max_num_seqs
        self.snapshots = BlockManager(room.snapshots, config.block_size, config.enable_prefix_caching)
        self.host = BlockManager(room.host, config.block_size, False)
        self.keeps = config.enable_prefix_caching and room.snapshots > 0
        self.cuts = self.keeps and config.enable_chunked_prefill
        self.taken: list[tuple[int, bytes]] = []  # snapshots of the plan that is being made, and their hashes
        self.pinned: list[int] = []  # snapshots to free once the plan is made
        self.host_pinned: list[int] = []  # and host rows

    def longest(self, hashes: Items[bytes], most: int) -> int:
        """The longest beginning with a snapshot, of `most` blocks at most."""
        while most and hashes[most - 1] not in self.snapshots.block_of:
            most -= 1
        return most

    def cut(self, seq: Sequence, count: int) -> int:
        """Cut `count` tokens to end where a state is wanted: at the last border before the sequence's last token."""
        begin = seq.num_computed
        end = begin + count
        border = min(end, len(seq.tokens) - 1) // self.size * self.size
        return (border if self.cuts and begin < border and begin + 1 < end else end) - begin

    def keep(self, seq: Sequence, plan: StepPlan) -> None:
        """Take a snapshot of a sequence's state, if it is at a border and these tokens have none.

        Only the latest border in an output keeps one, so that a long output does not flush the cache.
        """
        count, pool = seq.num_computed, self.snapshots
        # With drafts or more than two steps in flight, the tokens that the state has seen may not be known yet.
        if not (self.keeps and count) or count % self.size or count > len(seq.tokens):
            return
        chain(seq.hashes, seq.tokens, self.size, seq.group.salt, seq.group.marks)
        digest = seq.hashes[count // self.size - 1]
        if digest in pool.block_of:
            return
        if count > seq.group.num_prompt:
            pool.forget(seq.kept_state)
            seq.kept_state = digest
        if pool.num_free:
            (row,) = pool.allocate(1)
            plan.state_copies.append((seq.slot, self.num_slots + row))
            self.taken.append((row, digest))

    def resume(self, seq: Sequence, plan: StepPlan) -> None:
        """Bring a state into the slot that `seq` has got: from host memory, or from a snapshot."""
        if seq.host_state >= 0:
            plan.state_in.append((seq.host_state, seq.slot))
            self.host_pinned.append(seq.host_state)
            seq.host_state = -1
        elif seq.num_computed:
            row = self.snapshots.block_of[seq.hashes[seq.num_computed // self.size - 1]]
            plan.state_copies.append((self.num_slots + row, seq.slot))
            self.snapshots.share([row])
            self.pinned.append(row)

    def swap_out(self, seq: Sequence, plan: StepPlan) -> None:
        """Copy the state of `seq` to host memory, which has room for it."""
        (seq.host_state,) = self.host.allocate(1)
        plan.state_out.append((seq.slot, seq.host_state))

    def drop(self, seq: Sequence) -> None:
        """Give up the state of a swapped sequence."""
        self.host.free([seq.host_state])
        seq.host_state = -1

    def planned(self) -> None:
        """The plan is made: let its snapshots be found."""
        for row, digest in self.taken:
            self.snapshots.publish(row, digest)
        self.snapshots.free([*self.pinned, *(row for row, _ in self.taken)])
        self.host.free(self.host_pinned)
        self.taken, self.pinned, self.host_pinned = [], [], []
