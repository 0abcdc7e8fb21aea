"""Which blocks hold a sequence's tokens: sharing, copy on write, swapping, and host memory as the cache's second tier.

`BlockManager` keeps the books of one pool. Here the device's and the host's work together, and every move of a block's
content goes into the step's plan. The workers make the moves in this order: out to the host, in from it, copies on the
device, and then the step's tokens. So within one plan a block may be filled by a later kind of move than the one that
read it, and by no earlier one: what must not be overwritten yet stays pinned until the plan is made. Plans run one
after the other, so a block that is given up while a step reads it may be handed out at once: the next plan comes later.
"""

from __future__ import annotations

from collections.abc import Sequence as Ints

from config import EngineConfig
from kv_cache import AllocStatus, BlockManager, WatchedBlockManager, chain
from plan import StepPlan
from sequence import Sequence


class BlockSpaceManager:
    """The device's blocks, the host's, and the tables of all sequences.

    Args:
        config: block size, prefix caching, look-ahead, and whether plans tell a KV sanitizer which blocks are freed.
        num_blocks: size of the KV pool.
        num_host_blocks: size of the host pool, for swapped sequences and cached prefixes that the device drops.
        window: where attention sees no more than this many tokens in every layer, blocks behind them are given back.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, num_host_blocks: int, window: int):
        self.block_size, self.window, caching = config.block_size, window, config.enable_prefix_caching
        ahead = config.num_lookahead_slots
        self.device = (WatchedBlockManager if config.sanitize_kv else BlockManager)(
            num_blocks, config.block_size, caching, num_lookahead_slots=ahead, keep_evicted=num_host_blocks > 0
        )
        self.host = BlockManager(num_host_blocks, config.block_size, caching)
        self.pinned: list[int] = []  # device blocks to free once the plan is made
        self.host_pinned: list[int] = []  # and host blocks

    # --- a sequence's way in ----------------------------------------------------------------------------------------

    def admit(
        self, seq: Sequence, salt: str, trunk: list[int], shared: int, extra: int, kept: int, plan: StepPlan
    ) -> tuple[int, int] | None:
        """Give a sequence blocks for all its tokens, if they can be had with `extra` and `kept` more left free.

        What has been computed before is shared by reference: blocks of the prefix cache, which may come back from host
        memory, or the first `shared` tokens of `trunk`, a relative's table, if these are more.

        Returns:
            How many of its tokens are computed already, and how many of the blocks were fetched from the host; None if
            there is no room.
        """
        device, size = self.device, self.block_size
        found, fetched = self._find(seq, salt)
        last = len(seq.tokens) - 1  # must be computed in any case: its hidden state yields the next token
        cached = min(len(found) * size, last)
        if trunk and min(shared, last) > cached:
            found, fetched, cached = trunk, {}, min(shared, last)
        found = found[: -(-cached // size)]
        # The block that it goes on in is copied if somebody else has it, too.
        source = found[-1] if cached % size and found[-1] >= 0 and device.ref_counts[found[-1]] > 0 else -1
        table = found[:-1] if source >= 0 else found
        fetched = {place: block for place, block in fetched.items() if place < len(table)}
        revived = sum(block >= 0 and device.ref_counts[block] == 0 for block in table)  # free now, but not for long
        needed = device.blocks_for(len(seq.tokens)) - len(table) + len(fetched)
        if device.can_allocate(needed + revived + extra, kept) is not AllocStatus.OK:
            return None
        device.share(table)
        self.host.share(fetched.values())
        self.host_pinned += fetched.values()
        own = device.allocate(needed)
        for block, (place, host_block) in zip(own, fetched.items(), strict=False):
            plan.swap_in.append((host_block, block))
            device.publish(block, seq.hashes[place])
            table[place] = block
        own = own[len(fetched) :]
        if source >= 0:
            plan.copies.append((source, own[0]))
        seq.blocks, seq.num_computed, seq.num_published = table + own, cached, len(table)
        return cached, len(fetched)

    def _find(self, seq: Sequence, salt: str) -> tuple[list[int], dict[int, int]]:
        """The device blocks of the longest cached beginning, -1 for those in host memory, and these by their place."""
        found: list[int] = []
        fetched: dict[int, int] = {}
        if self.device.enable_prefix_caching:
            chain(seq.hashes, seq.tokens, self.block_size, salt)
            found = self.device.lookup(seq.hashes)
            while hosts := self.host.lookup(seq.hashes[len(found) :]):
                fetched |= dict(enumerate(hosts, len(found)))
                found += [-1] * len(hosts)
                found += self.device.lookup(seq.hashes[len(found) :])
        return found, fetched

    def fork(self, child: Sequence, parent: Sequence, shared: int, plan: StepPlan) -> None:
        """Give `child` its parent's first `shared` tokens by reference; the block that it goes on in is copied."""
        full = shared // self.block_size
        child.blocks, child.hashes = parent.blocks[:full], parent.hashes[:full]
        self.device.share(child.blocks)
        own = self.device.allocate(self.blocks_to_fork(child, shared))
        if shared % self.block_size:
            plan.copies.append((parent.blocks[full], own[0]))
        child.blocks += own
        child.num_computed, child.num_published = shared, full

    def blocks_to_fork(self, child: Sequence, shared: int) -> int:
        """Blocks that `fork` will take."""
        return self.device.blocks_for(len(child.tokens)) - shared // self.block_size

    def can_branch(self, trunk: list[int], length: int) -> bool:
        """Whether a window has passed nothing that the last of `length` tokens in `trunk` sees."""
        return not self.window or -1 not in trunk[max(0, length - self.window) // self.block_size :]

    def pass_window(self, seq: Sequence) -> None:
        """Give back the blocks that no layer sees any more."""
        passed = i = (seq.num_computed - self.window) // self.block_size
        while i > 0 and seq.blocks[i - 1] >= 0:
            i -= 1
        if i < passed:
            self.device.free(seq.blocks[i:passed])
            seq.blocks[i:passed] = [-1] * (passed - i)

    def publish(self, seq: Sequence, computed: int, salt: str) -> None:
        """Offer the blocks that `computed` tokens have filled to the prefix cache; planned ones do not count."""
        if self.device.enable_prefix_caching:
            full = computed // self.block_size
            if len(seq.hashes) < full:
                chain(seq.hashes, seq.tokens, self.block_size, salt)
            for i in range(seq.num_published, full):
                if seq.blocks[i] >= 0:
                    self.device.publish(seq.blocks[i], seq.hashes[i])
            seq.num_published = full

    # --- and its way out --------------------------------------------------------------------------------------------

    def held(self, seqs: Ints[Sequence]) -> list[int]:
        """The blocks of what `seqs` have computed, each once."""
        tables = (seq.blocks[: self.host.blocks_for(seq.num_computed)] for seq in seqs)
        return list(dict.fromkeys(block for table in tables for block in table if block >= 0))

    def swap_out(self, seqs: Ints[Sequence], plan: StepPlan) -> None:
        """Copy what `seqs` have computed to host memory, where the prefix cache can find it, too."""
        held = self.held(seqs)
        moved = dict(zip(held, self.host.allocate(len(held)), strict=True))
        plan.swap_out += moved.items()
        for seq in seqs:
            seq.host_blocks = [moved.get(block, -1) for block in seq.blocks[: self.host.blocks_for(seq.num_computed)]]
        self._share_again(self.host, [seq.host_blocks for seq in seqs])
        for block, host_block in moved.items():
            if (digest := self.device.hashes[block]) is not None:
                self.host.publish(host_block, digest)

    def swap_in(self, seqs: Ints[Sequence], kept: int, plan: StepPlan) -> bool:
        """Bring back what `seqs` had computed, if blocks for all their tokens can be had with `kept` more left free."""
        moved = dict.fromkeys(block for seq in seqs for block in seq.host_blocks if block >= 0)
        grown = [self.device.blocks_for(len(seq.tokens)) - len(seq.host_blocks) for seq in seqs]
        if self.device.can_allocate(len(moved) + sum(grown), kept) is not AllocStatus.OK:
            return False
        device = dict(zip(moved, self.device.allocate(len(moved)), strict=True))
        plan.swap_in += device.items()
        for seq in seqs:
            seq.blocks = [device.get(block, -1) for block in seq.host_blocks]
            self.host_pinned += seq.host_blocks
            seq.host_blocks = []
        self._share_again(self.device, [seq.blocks for seq in seqs])
        for seq, count in zip(seqs, grown, strict=True):
            seq.blocks += self.device.allocate(count)
        return True

    def _share_again(self, pool: BlockManager, tables: Ints[list[int]]) -> None:
        """Add the references of blocks that stand in several tables and were allocated once."""
        seen: set[int] = set()
        for table in tables:
            pool.share(block for block in table if block in seen)
            seen.update(table)

    # --- steps ------------------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """The plan is made: keep what it is about to overwrite of the cache in host memory, as far as there is room."""
        kept: list[int] = []
        for block, digest in self.device.evicted:
            if digest not in self.host.block_of and self.host.num_free:
                kept += self.host.allocate(1)
                self.host.publish(kept[-1], digest)
                plan.swap_out.append((block, kept[-1]))
        self.device.evicted.clear()
        if self.device.freed:  # before what is pinned is freed: this plan's copies still read it
            plan.freed, self.device.freed = self.device.freed, []
        self.host.free(kept + self.host_pinned)
        self.device.free(self.pinned)
        self.pinned, self.host_pinned = [], []

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, on the device and in host memory."""
        self.device.reset_prefix_cache()
        self.host.reset_prefix_cache()

    def check_integrity(self, tables: list[list[int]], host_tables: list[list[int]]) -> None:
        """Assert that the books of both pools agree with the tables of all that own blocks."""
        self.device.check_integrity(tables)
        self.host.check_integrity(host_tables)
