"""Which blocks of the paged KV cache hold what: who owns them, what can be found again, and what is reused first.

Blocks are integers here; the tensors behind them live in the worker. `BlockManager` keeps the books of one pool, the
device's or the host's; `BlockSpaceManager` lets the two work together for the tables of sequences: sharing, copy on
write, swapping, and host memory as the prefix cache's second tier.

A block is in one of three states:

    used     ref_count > 0: it stands in the tables of that many sequences
    cached   ref_count = 0, but its hash can still be found: it is reused last, the least recently freed first
    free     ref_count = 0 and no hash

A block table holds -1 where a sliding window has passed and the block was given back.

Every operation is O(1) a block. The idea of paging is vLLM's (Kwon et al., 2023); finding shared prefixes by chained
hashes of full blocks is vLLM's automatic prefix caching.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Ints
from itertools import islice

from config import EngineConfig
from plan import StepPlan
from sequence import Sequence


class AllocStatus(enum.Enum):
    """Whether blocks can be had: now, once others finish, or never."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


def chain(hashes: list[bytes], tokens: Ints[int], size: int, salt: str = "") -> None:
    """Extend `hashes`, one 128-bit hash a full block of `size` tokens; each covers everything before it too."""
    for start in range(len(hashes) * size, len(tokens) - size + 1, size):
        parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        data = array("q", tokens[start : start + size]).tobytes()
        hashes.append(hashlib.blake2b(parent + data, digest_size=16).digest())


class BlockManager:
    """Hands out the blocks of one pool: the device's, or the host's for what the device has no room for.

    Args:
        num_blocks: size of the pool.
        block_size: tokens in a block.
        enable_prefix_caching: let freed blocks be found again by the hash of what they hold.
        watermark: share of the pool that admission leaves free, so that those admitted can grow for a while before
            one of them must be preempted.
        num_lookahead_slots: slots that a sequence owns ahead of its tokens.
        keep_evicted: note in `evicted` which cached blocks are about to be overwritten, for a second tier to keep.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        num_lookahead_slots: int = 0,
        keep_evicted: bool = False,
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching, self.num_lookahead_slots = enable_prefix_caching, num_lookahead_slots
        self.keep_evicted = keep_evicted
        self.evicted: list[tuple[int, bytes]] = []  # (block, hash of what it held); who reads it empties it
        self.freed: list[tuple[int, bool]] = []  # (block, whether it can be found): for `WatchedBlockManager`
        self.watermark_blocks = int(watermark * num_blocks)
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks  # of each block that can be found
        self.block_of: dict[bytes, int] = {}  # the inverse
        self.idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # ref_count 0, next to reuse first

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can take (cached ones among them)."""
        return len(self.idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens and the look-ahead slots after them."""
        return -(-(num_tokens + self.num_lookahead_slots) // self.block_size)

    def can_allocate(self, num_blocks: int, kept: int | None = None) -> AllocStatus:
        """Whether `num_blocks` can be taken, with at least `kept` (by default the watermark) left free."""
        if num_blocks > self.num_blocks:
            return AllocStatus.NEVER
        kept = self.watermark_blocks if kept is None else kept
        return AllocStatus.OK if num_blocks <= self.num_free - kept else AllocStatus.LATER

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks of undefined content, each with one reference."""
        assert num_blocks <= self.num_free
        taken = []
        for _ in range(num_blocks):
            block, _ = self.idle.popitem(last=False)
            if (old := self.hashes[block]) is not None:  # its content is about to be overwritten: forget it
                if self.keep_evicted:
                    self.evicted.append((block, old))
                del self.block_of[old]
                self.hashes[block] = None
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`, which are used or cached."""
        for block in blocks:
            if block >= 0:
                if self.ref_counts[block] == 0:
                    del self.idle[block]
                self.ref_counts[block] += 1

    def free(self, blocks: Ints[int]) -> None:
        """Drop a reference to each of `blocks`, one sequence's table in order."""
        # Backwards, so that the tail of a prefix is reused before its head: a head without its tail is still a hit.
        for block in reversed(blocks):
            if block < 0:
                continue
            assert self.ref_counts[block] > 0
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.idle[block] = None
                if self.hashes[block] is None:
                    self.idle.move_to_end(block, last=False)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest cached beginning of the chain `hashes`."""
        found: list[int] = []
        for digest in hashes:
            if (block := self.block_of.get(digest)) is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: bytes) -> None:
        """Let `block`, whose tokens have all been computed, be found by `digest`, unless another block already is."""
        if self.enable_prefix_caching and self.hashes[block] is None and digest not in self.block_of:
            self.hashes[block] = digest
            self.block_of[digest] = block

    def reset_prefix_cache(self) -> None:
        """Forget every hash; blocks in use stay where they are."""
        self.block_of.clear()
        self.hashes = [None] * self.num_blocks

    def check_integrity(self, tables: Iterable[Ints[int]]) -> None:
        """Assert that the books agree with `tables`, the block tables of all that own blocks."""
        owners = Counter(block for table in tables for block in table if block >= 0)
        for block, count in enumerate(self.ref_counts):
            assert count == owners[block], f"block {block} has {count} references but stands in {owners[block]} tables"
            assert (count == 0) == (block in self.idle), f"block {block} has {count} references and the wrong state"
        assert len(self.idle) + sum(count > 0 for count in self.ref_counts) == self.num_blocks
        for digest, block in self.block_of.items():
            assert self.hashes[block] == digest, f"block {block} is found by a hash that is not its own"
        assert len(self.block_of) == sum(digest is not None for digest in self.hashes)


class WatchedBlockManager(BlockManager):
    """Notes in `freed`, for the KV sanitizer, which blocks lose their last reference or what they hold."""

    def allocate(self, num_blocks: int) -> list[int]:
        """As `BlockManager.allocate`; cached blocks that it takes lose what they hold."""
        self._drop(islice(self.idle, num_blocks))
        return super().allocate(num_blocks)

    def free(self, blocks: Ints[int]) -> None:
        """As `BlockManager.free`."""
        super().free(blocks)
        idle = (block for block in blocks if block >= 0 and self.ref_counts[block] == 0)
        self.freed += [(block, self.hashes[block] is not None) for block in idle]

    def reset_prefix_cache(self) -> None:
        """As `BlockManager.reset_prefix_cache`; all cached blocks lose what they hold."""
        self._drop(self.idle)
        super().reset_prefix_cache()

    def _drop(self, blocks: Iterable[int]) -> None:
        self.freed += [(block, False) for block in blocks if self.hashes[block] is not None]


class BlockSpaceManager:
    """The device's blocks, the host's, and the tables of all sequences.

    Every move of a block's content goes into the step's plan. The workers make the moves in this order: out to the
    host, in from it, copies on the device, and then the step's tokens. So within one plan a block may be filled by a
    later kind of move than the one that read it, and by no earlier one: what must not be overwritten yet stays pinned
    until the plan is made. Plans run one after the other, so a block that is given up while a step reads it may be
    handed out at once: the next plan comes later.

    Args:
        config: block size, prefix caching, look-ahead, and whether plans name freed blocks for a KV sanitizer.
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
        self, seq: Sequence, prompt_blocks: list[int], extra: int, kept: int, plan: StepPlan
    ) -> tuple[int, int] | None:
        """Give a sequence blocks for all its tokens, if they can be had with `extra` and `kept` more left free.

        What has been computed before is shared by reference: blocks of the prefix cache, which may come back from host
        memory, or `prompt_blocks`, in which another sample has computed their prompt, if these hold more. The prompt's
        tokens that have yet to be scored are computed again, because the cache has no hidden states.

        Returns:
            How many of its tokens are computed already, and how many of the blocks were fetched from the host; None if
            there is no room.
        """
        device, size = self.device, self.block_size
        found, fetched = self._find(seq)
        last = len(seq.tokens) - 1  # must be computed in any case: its hidden state yields the next token
        if seq.group.request.score is not None:
            last = min(last, seq.group.request.num_scored - 1)
        cached = min(len(found) * size, last)
        if prompt_blocks and (shared := min(seq.group.request.num_prompt, last)) > cached:
            found, fetched, cached = prompt_blocks, {}, shared
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

    def _find(self, seq: Sequence) -> tuple[list[int], dict[int, int]]:
        """The device blocks of the longest cached beginning, -1 for those in host memory, and these by their place."""
        found: list[int] = []
        fetched: dict[int, int] = {}
        if self.device.enable_prefix_caching:
            chain(seq.hashes, seq.tokens, self.block_size, seq.group.request.salt)
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

    def can_branch(self, prompt_blocks: list[int], length: int) -> bool:
        """Whether a window has passed no block that the last of `length` tokens in `prompt_blocks` sees."""
        return not self.window or -1 not in prompt_blocks[max(0, length - self.window) // self.block_size :]

    def pass_window(self, seq: Sequence) -> None:
        """Give back the blocks that no layer sees any more."""
        passed = i = (seq.num_computed - self.window) // self.block_size
        while i > 0 and seq.blocks[i - 1] >= 0:
            i -= 1
        if i < passed:
            self.device.free(seq.blocks[i:passed])
            seq.blocks[i:passed] = [-1] * (passed - i)

    def publish(self, seq: Sequence, computed: int) -> None:
        """Offer the blocks that `computed` tokens have filled to the prefix cache; planned ones do not count."""
        if self.device.enable_prefix_caching:
            full = computed // self.block_size
            if len(seq.hashes) < full:
                chain(seq.hashes, seq.tokens, self.block_size, seq.group.request.salt)
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
