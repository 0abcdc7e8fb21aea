"""Which blocks of the paged KV cache hold what: who owns them, what can be found again, and what is reused first.

Blocks are integers here; the tensors behind them live in the worker. `BlockManager` keeps the books of one pool, and
`BlockSpaceManager` those of all tables: sharing, and copies of shared blocks.

A block is in one of three states, and `num_free` counts the last two:

    used     ref_count > 0: it stands in the tables of that many sequences
    cached   ref_count = 0, but its hash can still be found: it is reused last, the least recently freed first
    free     ref_count = 0 and no hash

Layers that see different windows of the latest tokens are different kinds, and a sequence has a block table for each
kind (`models/kv_layout.py`). All kinds share one pool. Where a window has passed, the table holds -1.

A block is found by its chained hash together with its kind. A cached prefix of p tokens is a hit if every block that a
token at position p sees is found: all blocks of a kind without a window, the last window's blocks of one with a window.
In a model with recurrent layers, a state that has seen exactly this prefix must be found, too.

Every operation is O(1) a block. Paging and prefixes by chained hashes are vLLM's ideas (Kwon et al., 2023).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

from config import EngineConfig
from models.kv_layout import most_blocks
from plan import StepPlan
from sequence import Sequence, by_column, chain

if TYPE_CHECKING:
    from scheduling.states import StateManager

WATERMARK = 0.01  # share of a pool that admission leaves free, for running sequences to grow before one is preempted


class BlockManager:
    """Hands out the blocks of one pool, the device's or the host's.

    Args:
        num_blocks: size of the pool.
        block_size: tokens in a block.
        enable_prefix_caching: let freed blocks be found again by the hash of what they hold.
        num_lookahead_slots: room to keep after a sequence's tokens, in tokens; drafts lie there.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, num_lookahead_slots: int = 0
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching, self.num_lookahead_slots = enable_prefix_caching, num_lookahead_slots
        self.evicted: list[tuple[int, bytes]] | None = None  # cached blocks that were reused, if a second tier asks
        self.freed: list[int] = []  # for `WatchedBlockManager`
        self.watermark_blocks = int(WATERMARK * num_blocks)
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks  # of each block that can be found
        self.block_of: dict[bytes, int] = {}  # the inverse
        self.findable = bytearray(num_blocks)  # 1 for each block that has a hash, for `observe/live.py`: a cheap copy
        self.idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # ref_count 0, next to reuse first

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can take: the free and the cached ones."""
        return len(self.idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens and the look-ahead slots after them, in one table."""
        return -(-(num_tokens + self.num_lookahead_slots) // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks of undefined content, each with one reference."""
        assert num_blocks <= self.num_free
        taken = []
        for _ in range(num_blocks):
            block, _ = self.idle.popitem(last=False)
            if (old := self.hashes[block]) is not None:  # its content is about to be overwritten: forget it
                if self.evicted is not None:
                    self.evicted.append((block, old))
                del self.block_of[old]
                self.hashes[block], self.findable[block] = None, 0
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

    def free(self, blocks: Items[int]) -> None:
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

    def publish(self, block: int, digest: bytes) -> None:
        """Let `block`, whose tokens are all computed, be found by `digest`, unless another block has that digest."""
        if self.enable_prefix_caching and self.hashes[block] is None and digest not in self.block_of:
            self.hashes[block], self.findable[block] = digest, 1
            self.block_of[digest] = block

    def forget(self, digest: bytes) -> None:
        """Let no block be found by `digest` any more; the one that was is reused first once it is idle."""
        if (block := self.block_of.pop(digest, None)) is not None:
            self.hashes[block], self.findable[block] = None, 0
            if block in self.idle:
                self.idle.move_to_end(block, last=False)

    def reset_prefix_cache(self) -> None:
        """Forget every hash; blocks in use stay where they are."""
        self.block_of.clear()
        self.hashes, self.findable = [None] * self.num_blocks, bytearray(self.num_blocks)


class Entry(NamedTuple):
    """How a sequence can be let in: what of it is cached, and which blocks it needs."""

    cached: int  # how many of its tokens are computed already
    tables: list[list[int]]  # by kind, the blocks of these tokens; -1: a window has passed it
    sources: list[int]  # by kind, a block that it goes on in, but must copy first; -1: there is none
    missing: list[int]  # by kind, how many further blocks its table needs

    @property
    def shared(self) -> list[int]:
        """The device's blocks that it takes by reference."""
        return [block for block in by_column(self.tables) if block >= 0]


class BlockSpaceManager:
    """The device's blocks, and the tables of all sequences. `TieredSpaceManager` adds host memory to it.

    Every move of a block's content goes into the step's plan. The workers make the moves in this order: out to the
    host, in from it, copies on the device, and then the step's tokens. A block that a move reads may only be filled by
    a later kind of move. If another kind could fill it, it is pinned: not reused while this plan is made. Plans run in
    order, so a block that a step in flight still reads may be handed out at once: a later plan fills it.

    A kind that sees all tokens gets a whole prompt's blocks at once. One with a window gets them step by step.

    Args:
        config: block size, prefix caching, look-ahead, and tokens of a step.
        num_blocks, windows: see `Scheduler`.
        states: the recurrent states of sequences, if the model has some.
        manager: of the device's blocks.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        windows: Items[int],
        states: StateManager | None,
        manager: type[BlockManager],
    ):
        self.block_size = config.block_size
        # Tokens that a sequence computes in a step at most: without chunked prefill there is no limit to them.
        self.chunk = config.token_budget if config.enable_chunked_prefill else sys.maxsize
        self.windows, self.windowed = tuple(windows), any(windows)
        self.marks = [bytes((kind,)) if kind else b"" for kind in range(len(windows))]  # a kind's part of its keys
        self.device = manager(num_blocks, config.block_size, config.enable_prefix_caching, config.lookahead)
        self.states = states
        self.pinned: list[int] = []  # blocks to free once the plan is made

    # --- how many blocks --------------------------------------------------------------------------------------------

    def goals(self, tokens: int, reach: int) -> list[int]:
        """Blocks that each kind's table needs for `tokens` tokens; with a window, only for the first `reach` of them.

        `reach` is how many tokens are computed after the next step.
        """
        whole = self.device.blocks_for(tokens)
        part = whole if reach >= tokens else self.device.blocks_for(reach)
        return [part if window else whole for window in self.windows]

    def missing(self, tables: list[list[int]], tokens: int, reach: int) -> list[int]:
        """Blocks that each of these tables lacks of its goal."""
        return [max(0, goal - len(table)) for goal, table in zip(self.goals(tokens, reach), tables, strict=True)]

    def lacks(self, seq: Sequence, tokens: int, reach: int) -> int:
        """Blocks that a sequence's tables lack of their goals, in sum."""
        if self.device.blocks_for(tokens) <= len(seq.tables[0]) and not self.windowed:
            return 0
        return sum(self.missing(seq.tables, tokens, reach))

    def most(self, tokens: int) -> int:
        """Blocks that a sequence holds at most, until it has computed `tokens` tokens."""
        whole = self.device.blocks_for(tokens)
        kinds = most_blocks(self.windows, tokens, self.chunk, self.block_size, self.device.num_lookahead_slots)
        return sum(min(whole, most) for most in kinds)

    # --- a sequence's way in ----------------------------------------------------------------------------------------

    def find(self, seq: Sequence, prompt_tables: list[list[int]], most: int) -> Entry:
        """How a sequence could be let in, if its next step computes at most `most` tokens.

        It shares blocks of the prefix cache. If `prompt_tables`, in which another sample has computed the prompt, hold
        more, it shares these. Prompt tokens to be scored are recomputed.
        """
        last = len(seq.tokens) - 1  # must be computed in any case: its hidden state yields the next token
        if seq.group.score is not None:
            last = min(last, seq.group.num_scored - 1)
        cached, tables = self.find_prefix(seq, last)
        if prompt_tables and (shared := min(seq.group.num_prompt, last)) > cached:
            columns = -(-shared // self.block_size)
            cached, tables = shared, [table[:columns] for table in prompt_tables]
        # The block that it goes on in is copied if somebody else has it, too.
        sources = [-1] * len(tables)
        if cached % self.block_size:
            for kind, table in enumerate(tables):
                if table[-1] >= 0 and self.device.ref_counts[table[-1]] > 0:
                    sources[kind] = table.pop()
        return Entry(cached, tables, sources, self.missing(tables, len(seq.tokens), cached + most))

    def price(self, entry: Entry) -> int:
        """Free blocks that an entry takes: those to be allocated, and cached ones that nobody has now."""
        revived = sum(self.device.ref_counts[block] == 0 for block in entry.shared)
        return sum(entry.missing) + revived

    def admit(self, seq: Sequence, entry: Entry, kept: int, plan: StepPlan) -> bool:
        """Let a sequence in with `entry`, found just now, if `kept` more blocks stay free."""
        device, tables = self.device, entry.tables
        if self.price(entry) > device.num_free - kept:
            return False
        seq.num_computed = seq.num_reused = entry.cached
        seq.num_published = min(map(len, tables), default=0)
        device.share(entry.shared)
        self.bring_back(seq, tables, plan)
        for table, source, count in zip(tables, entry.sources, entry.missing, strict=True):
            blocks = device.allocate(count)
            if source >= 0:
                plan.copies.append((source, blocks[0]))
            table += blocks
        seq.tables = tables
        return True

    def look_up(self, key: bytes) -> int | None:
        """The block that `key` finds; None if there is none."""
        return self.device.block_of.get(key)

    def bring_back(self, seq: Sequence, tables: list[list[int]], plan: StepPlan) -> None:
        """Fill in blocks that were found, but not on the device; here there are none (`TieredSpaceManager`)."""

    def hashes_of(self, seq: Sequence, last: int) -> list[bytes]:
        """The hashes of the blocks of the first `last` tokens; of full blocks alone if a state must be found, too."""
        return seq.hashes[: last // self.block_size if self.states else -(-last // self.block_size)]

    def find_prefix(self, seq: Sequence, last: int) -> tuple[int, list[list[int]]]:
        """The longest cached prefix, of at most `last` tokens: `cached` and `tables` of an `Entry`."""
        tables: list[list[int]] = [[] for _ in self.windows]
        if not self.device.enable_prefix_caching:
            return 0, tables
        chain(seq.hashes, seq.tokens, self.block_size, seq.group.salt, seq.group.marks)
        size, states, look_up = self.block_size, self.states, self.look_up
        hashes = self.hashes_of(seq, last)
        most = len(hashes)
        for window, mark in zip(self.windows, self.marks, strict=True):
            if not window:
                most = next((i for i, digest in enumerate(hashes[:most]) if look_up(digest + mark) is None), most)
        if states:
            most = states.longest(hashes, most)
        # Only the last blocks of a window count. If one is missing, start over (kind = -1) with the shorter prefix.
        begins = [0] * len(tables)
        starts, kind = [most] * len(tables), 0  # by kind: from here up to `most` all blocks are found
        while kind < len(tables):
            if window := self.windows[kind]:
                begins[kind] = max(0, min(most * size, last) - window + 1) // size
                i = min(starts[kind], most)
                while i > begins[kind] and look_up(hashes[i - 1] + self.marks[kind]) is not None:
                    i -= 1
                starts[kind] = i
                if i > begins[kind]:
                    most, kind = states.longest(hashes, i - 1) if states else i - 1, -1
            kind += 1
        for kind, (begin, mark) in enumerate(zip(begins, self.marks, strict=True)):
            blocks = [block for digest in hashes[begin:most] if (block := look_up(digest + mark)) is not None]
            assert begin + len(blocks) == max(begin, most), "a block was found and then not"
            tables[kind] = [-1] * begin + blocks
        return min(most * size, last), tables

    def finds_prompt(self, seq: Sequence) -> bool:
        """In a model with states: whether the prefix cache has all of a sample's prompt that it can have."""
        if self.states is None:
            return False
        last = seq.group.num_prompt - 1
        return not self.states.keeps or self.find_prefix(seq, last)[0] == last // self.block_size * self.block_size

    def cut(self, seq: Sequence, count: int) -> int:
        """Cut a row where a state has to be kept (`StateManager.cut`)."""
        return self.states.cut(seq, count) if self.states else count

    def can_branch(self, prompt_tables: list[list[int]], length: int) -> bool:
        """Whether a sample can go on from the `length` tokens in `prompt_tables`: no window has passed what it sees.

        A recurrent state cannot go back, so in a model with states samples share only what the prefix cache has.
        """
        kinds = zip(self.windows, prompt_tables, strict=True)
        return not self.states and all(
            not w or -1 not in table[max(0, length - w) // self.block_size :] for w, table in kinds
        )

    def pass_windows(self, seq: Sequence) -> None:
        """Give back blocks that the sequence can no longer see."""
        computed = seq.num_computed - seq.num_unverified
        for window, table in zip(self.windows, seq.tables, strict=True):
            passed = i = (computed - window) // self.block_size if window else 0
            while i > 0 and table[i - 1] >= 0:
                i -= 1
            if i < passed:
                self.device.free(table[i:passed])
                table[i:passed] = [-1] * (passed - i)

    def grow(self, seq: Sequence, tokens: int, reach: int) -> list[list[int]]:
        """Give a sequence the blocks that it `lacks`; returns them by kind. So many must be free."""
        grown = [self.device.allocate(count) for count in self.missing(seq.tables, tokens, reach)]
        for table, blocks in zip(seq.tables, grown, strict=True):
            table += blocks
        return grown

    def publish(self, seq: Sequence, computed: int) -> None:
        """Offer the blocks that `computed` tokens have filled to the prefix cache; planned ones do not count."""
        if self.device.enable_prefix_caching:
            full = computed // self.block_size
            if len(seq.hashes) < full:
                chain(seq.hashes, seq.tokens, self.block_size, seq.group.salt, seq.group.marks)
            for table, mark in zip(seq.tables, self.marks, strict=True):
                for i in range(seq.num_published, full):
                    if table[i] >= 0:
                        self.device.publish(table[i], seq.hashes[i] + mark)
            seq.num_published = full

    # --- steps ------------------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """The plan is made: free what was pinned."""
        plan.freed, self.device.freed = self.device.freed, []  # what is pinned now comes with the next plan
        self.device.free(self.pinned)
        self.pinned = []
        if self.states:
            self.states.planned()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.device.reset_prefix_cache()
        if self.states:
            self.states.snapshots.reset_prefix_cache()
