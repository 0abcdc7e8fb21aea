"""KV blocks on disk: the third tier of the prefix cache, under host memory, by which prefixes outlive a restart.

    device  <--- swap_in ----  host  <--- disk_in ----  disk     a file for each block and rank, see `device/kv_disk.py`
            ---- swap_out --->       ---- disk_out -->

A cached block that was copied to the host is written to disk behind the steps. When a sequence comes to wait, blocks of
its prefix that only the disk has are read ahead into host blocks, and it is held until they are there. Then they are
found as others in host memory are.

Each move has a ticket, which every rank reports once it has made the move, see `StepResult.disk`. Until then the host
block is pinned. When moves are given up, the next plan says so (`disk_first`), and the workers end them before that
plan moves anything else, so the blocks are free at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from config import TENSORS, EngineConfig, stamp_of
from kv_cache import BlockManager, BlockSpaceManager
from plan import StepPlan, StepResult
from scheduling.host_memory import TieredSpaceManager
from scheduling.states import StateManager
from sequence import Sequence

ON_DISK = -3  # stands in a table for a block to read
WRITES = 32  # blocks that are on their way to the disk at once
WAIT = 0.005  # seconds that a plan without rows waits for the end of a move


def weights_mark(config: EngineConfig) -> bytes:
    """A hash of which weights the engine has now; of tensors, which nobody can name, another one at each call."""
    if config.weights == TENSORS:
        return os.urandom(16)
    stamp = stamp_of(config.checkpoint) if config.checkpoint else f"dummy {config.seed}"
    return hashlib.blake2b(stamp.encode(), digest_size=16).digest()


@dataclass(slots=True)
class Move:
    """A block on its way to or from the disk."""

    key: bytes
    block: int  # of the host
    reads: bool
    ranks: int  # that have yet to report
    status: int = 1  # the least that a rank has reported, see `StepResult.disk`


@dataclass(slots=True)
class Held:
    """What a sequence waits for."""

    tickets: set[int] = field(default_factory=set)
    blocks: list[int] = field(default_factory=list)  # of the host, pinned for it, in order of their tokens


class DiskSpaceManager(TieredSpaceManager):
    """The block tables, with host memory and disk; for most arguments see `Scheduler` and `BlockSpaceManager`.

    Args:
        disk: facts of the workers, see `KVDisk.facts`; None: there is no such tier. It is not used if it does not pay.
        counters: the scheduler's, by name.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int,
        windows: Items[int],
        swap_cost: float,
        states: StateManager | None,
        manager: type[BlockManager],
        disk: dict[str, Any] | None,
        counters: dict[str, float],
    ):
        super().__init__(config, num_blocks, num_host_blocks, windows, swap_cost, states, manager)
        self.disk, self.counters = disk if disk and disk["pays"] else None, counters
        self.ranks, self.stages = config.world_size, config.pipeline_parallel_size
        self.mark = self.weights = weights_mark(config) if self.disk else b""  # part of each file's name
        self.first = self.ticket = 0  # the first ticket that counts, and the latest one
        self.moves: dict[int, Move] = {}  # by ticket, those that have not ended
        self.num_writing = 0
        self.reading: dict[bytes, int] = {}  # the tickets of keys that are being read
        self.to_read: list[tuple[int, bytes, int]] = []  # for the next plan
        self.to_write: dict[bytes, None] = {}  # keys, the oldest first
        self.kept: dict[bytes, float] = {}  # for how many seconds a key's file is to be kept, if it is marked
        self.held: dict[Sequence, Held] = {}
        self.ready: list[Sequence] = []  # held ones that need not wait any longer
        self.arrived: dict[int, bytes] = {}  # host blocks that were read and not used yet
        self.fresh: dict[int, int] = {}  # host blocks that a step in flight fills, and which one
        self.last_rows = -self.stages  # the latest step with rows
        self.looking: dict[bytes, bool] | None = None  # during `read_ahead`: whether there are files of these keys

    def name(self, key: bytes) -> bytes:
        """The name of a key's file: 16 bytes, which say which weights it is of, too."""
        return hashlib.blake2b(key, digest_size=16, key=self.mark).digest()

    def has_moves(self) -> bool:
        return super().has_moves() or bool(self.moves or self.to_write)

    # --- reading ahead ------------------------------------------------------------------------------------------------

    def look_up(self, key: bytes) -> int | None:
        block = super().look_up(key)
        if block is not None or self.looking is None:
            return block
        if key not in self.looking:
            self.looking[key] = key in self.reading or self.has_file(self.name(key))
        return ON_DISK if self.looking[key] else None

    def has_file(self, name: bytes) -> bool:
        """Whether rank 0 has a file of this name."""
        assert self.disk
        return os.path.exists(os.path.join(self.disk["folder"], "0", name.hex()))

    def read_ahead(self, seq: Sequence) -> bool:
        """Begin to read what only the disk has of a sequence's prefix, as far as the host has room.

        Returns whether there is something to wait for; then the sequence is among `take_ready` later.
        """
        if not self.disk or seq.group.beam or seq.group.score:  # prompts to be scored are computed
            return False
        self.looking = {}
        _, tables = BlockSpaceManager.find_prefix(self, seq, len(seq.tokens) - 1)
        self.looking = None
        columns = max(map(len, tables))
        places = [(i, kind) for i in range(columns) for kind, table in enumerate(tables) if table[i] < -1]
        keys = [seq.hashes[i] + self.marks[kind] for i, kind in places]
        present = {key: self.host.block_of[key] for key in keys if key in self.host.block_of}
        self.host.share(present.values())  # first, so that no read takes their place
        held = Held()
        for key in keys:
            if (block := present.pop(key, None)) is None:
                if (ticket := self.reading.get(key)) is None:
                    if not self.host.num_free:
                        break
                    ticket = self.reading[key] = self._begin(key, self.host.allocate(1)[0], reads=True)
                    self.to_read.append((ticket, self.name(key), self.moves[ticket].block))
                block = self.moves[ticket].block
                self.host.share([block])
                held.tickets.add(ticket)
            held.blocks.append(block)
        held.blocks += present.values()  # those behind a block that the host has no room for
        if held.tickets:
            self.held[seq] = held
        else:
            self.host.free(held.blocks)
        return bool(held.tickets)

    def take_ready(self) -> list[Sequence]:
        """The sequences that were held, are not aborted, and need not wait any longer."""
        ready, self.ready = self.ready, []
        return [seq for seq in ready if not seq.finish_reason]

    def tier_of(self, key: bytes) -> str:
        """A block that was read counts once as the disk's, and as the host's from then on."""
        return "disk" if self.arrived.pop(self.host.block_of[key], None) == key else "host"

    # --- steps --------------------------------------------------------------------------------------------------------

    def _begin(self, key: bytes, block: int, reads: bool) -> int:
        """Begin a move, for which the caller has a reference to the host block; returns its ticket."""
        self.ticket += 1
        self.moves[self.ticket] = Move(key, block, reads, self.ranks)
        return self.ticket

    def lower(self, seq: Sequence) -> None:
        super().lower(seq)
        if self.disk and seq.group.retention:
            keys = [digest + mark for digest in seq.hashes for mark in self.marks]
            self.to_write |= dict.fromkeys(keys)  # of those that are on the host already
            self.kept |= dict.fromkeys(keys, seq.group.retention)
            while len(self.kept) > self.device.num_blocks + self.host.num_blocks:
                del self.kept[next(iter(self.kept))]

    def planned(self, plan: StepPlan) -> None:
        """The plan is made: begin to write what earlier steps have copied to the host, and hand over reads."""
        super().planned(plan)
        if not self.disk:
            return
        self.fresh |= {block: plan.step for _, block in plan.swap_out}
        while self.to_write and self.num_writing < WRITES:
            key = next(iter(self.to_write))
            del self.to_write[key]
            block = self.host.block_of.get(key, -1)
            if block < 0 or block in self.fresh:  # `landed` names it once it is filled
                continue
            self.host.share([block])
            self.num_writing += 1
            ticket = self._begin(key, block, reads=False)
            plan.disk_out.append((ticket, self.name(key), block, self.kept.pop(key, 0.0)))
        plan.disk_in, self.to_read, plan.disk_first = self.to_read, [], self.first
        if plan.rows:
            self.last_rows = plan.step
        elif self.moves and plan.step - self.last_rows > self.stages:  # no other stage's step waits behind this one
            plan.disk_wait = WAIT

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """A step has run: what it has copied to the host may be written, and moves may have ended."""
        for _, block in plan.swap_out:
            if self.fresh.get(block) == plan.step:
                del self.fresh[block]
                if (key := self.host.hashes[block]) is not None:
                    self.to_write[key] = None
        for ticket, status in result.disk:
            if (move := self.moves.get(ticket)) is None:  # it was given up
                continue
            move.ranks -= 1
            move.status = min(move.status, status)
            if not move.ranks:
                self._end(ticket, move)

    def _end(self, ticket: int, move: Move) -> None:
        """All ranks have made a move, or could not."""
        assert self.disk
        del self.moves[ticket]
        kind = "read" if move.reads else "written"
        self.counters[f"kv_disk_{kind}_blocks_total"] += move.status > 0
        self.counters[f"kv_disk_{kind}_bytes_total"] += self.disk["bytes"] * (move.status > 0)
        self.counters["kv_disk_bad_blocks_total"] += move.status < 0
        if not move.reads:
            self.num_writing -= 1
        else:
            del self.reading[move.key]
            if move.status > 0:
                self.host.publish(move.block, move.key)
                self.arrived[move.block] = move.key
            for held in self.held.values():
                held.tickets.discard(ticket)
            self._release([seq for seq, held in self.held.items() if not held.tickets])
        self.host.free([move.block])

    def _release(self, seqs: Iterable[Sequence]) -> None:
        """Let sequences wait no longer. Their blocks become the latest used of the host."""
        for seq in seqs:
            self.host.free(self.held.pop(seq).blocks)
            self.ready.append(seq)

    # --- what is given up ---------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Give up all moves: the next plan tells the workers, see above."""
        self._release([*self.held])
        self.host.free([move.block for move in self.moves.values()])
        self.first, self.num_writing = self.ticket + 1, 0
        for books in (self.moves, self.reading, self.to_read, self.to_write, self.fresh, self.arrived):
            books.clear()

    def forget_moves(self, plans: Items[StepPlan]) -> None:
        super().forget_moves(plans)
        self._give_up()

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._give_up()

    def forget_all(self, config: EngineConfig) -> None:
        """Forget all cached prefixes, on disk, too: files have other names from now on, by the weights of `config`.

        If these are the same as before, somebody may have changed them in place. So the names are of this engine alone.
        """
        super().forget_all(config)
        if self.disk:
            before, self.weights = self.weights, weights_mark(config)
            self.mark = os.urandom(16) if self.weights == before else self.weights
