"""KV blocks on disk, the prefix cache's third tier, which outlives a restart. Of the files see `device/kv_disk.py`.

A cached block that was copied to the host is written to disk behind the steps (`disk_out`). When a sequence is the next
to come in, blocks of its prefix that only the disk has are read into host blocks (`disk_in`), and it is held until they
are there, while others come in. Then they are found as others in host memory are. At a time so many sequences read as
fit on the device, because a long queue would drive out what its first ones have read.

Each move has a ticket, which every rank reports once it has made the move (`StepResult.disk`). Until then the host
block is pinned. When moves are given up, the next plan says so (`disk_first`), and the workers end them before that
plan moves anything else. So the blocks are free at once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import TENSORS, EngineConfig
from kv_cache import BlockSpaceManager
from plan import StepPlan, StepResult
from scheduling.host_memory import TieredSpaceManager
from sequence import Sequence, Status

ON_DISK = -3  # stands in a table for a block to read
WRITES = 32  # blocks that are on their way to the disk at once
WAIT = 0.005  # seconds that a plan without rows waits for the end of a move
PATIENCE = 5.0  # seconds that a sequence waits for the disk, and that a move without an end keeps an idle engine awake
SAMPLES, SAMPLE = 256, 4096  # of a file of weights, and bytes of each


def weights_mark(config: EngineConfig) -> bytes:
    """A hash of the weights' files: their names, sizes, times, and SAMPLES of their bytes, because images of containers
    may give all files one time. Of weights that nobody can name it is another one at each call."""
    try:
        if config.weights == TENSORS:
            return os.urandom(16)
        if not config.checkpoint:
            return hashlib.blake2b(f"dummy {config.seed}".encode(), digest_size=16).digest()
        hashed, path = hashlib.blake2b(digest_size=16), Path(config.checkpoint)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
        for file in files:
            with file.open("rb") as weights:
                state = os.fstat(weights.fileno())
                hashed.update(f"{file.name} {state.st_size} {state.st_mtime_ns} ".encode())
                for i in range(SAMPLES):
                    weights.seek(state.st_size * i // SAMPLES)
                    hashed.update(weights.read(SAMPLE))
        return hashed.digest() if files else os.urandom(16)
    except OSError:
        return os.urandom(16)


@dataclass(slots=True)
class Move:
    """A block on its way to or from the disk."""

    key: bytes
    block: int  # of the host
    reads: bool
    ranks: int  # that have yet to report
    status: int = 1  # the least that a rank has reported
    begun: float = field(default_factory=time.monotonic)


class DiskSpaceManager(TieredSpaceManager):
    """The block tables, with host memory and disk. `disk` has facts of the workers, see `startup.add_disk`; None: there
    is no such tier. It is not used if it does not pay. `counters` are the scheduler's, the rest `TieredSpaceManager`'s.
    """

    def __init__(self, disk: dict[str, Any] | None, counters: dict[str, float], config: EngineConfig, *sizes: Any):
        super().__init__(config, *sizes)
        self.disk, self.counters = disk if disk and disk["pays"] else None, counters
        self.config, self.ranks, self.stages = config, config.world_size, config.pipeline_parallel_size
        self.mark = self.weights = weights_mark(config) if self.disk else b""  # a part of each file's name
        self.first = self.ticket = 0  # the first ticket that counts, and the latest one
        self.moves: dict[int, Move] = {}  # by ticket, those that have not ended
        self.reading: dict[bytes, int] = {}  # the tickets of keys that are being read
        self.to_read: list[tuple[int, bytes, int]] = []  # for the next plan
        self.to_write: dict[bytes, None] = {}  # keys, the oldest first
        self.kept: dict[bytes, float] = {}  # seconds for which a marked key's file is to be kept
        # Sequences that wait: for which tickets, host blocks in order of their tokens, and until when at most.
        self.held: dict[Sequence, tuple[set[int], list[int], float]] = {}
        self.ready: list[Sequence] = []  # held ones that need not wait any longer
        self.tried = set[Sequence]()  # those that wait or read, and were looked for on the disk
        self.arrived: dict[int, bytes] = {}  # host blocks that were read and not used yet
        self.fresh: dict[int, int] = {}  # host blocks that a step in flight fills, and which one
        self.last_rows = -self.stages  # the latest step with rows
        self.looking: dict[bytes, bool] | None = None  # during `read_ahead`: whether there are files of these keys

    def name(self, key: bytes) -> bytes:
        """The name of a key's file."""
        return hashlib.blake2b(key, digest_size=16, key=self.mark).digest()

    def has_file(self, name: bytes) -> bool:
        """Whether rank 0 has a file of this name."""
        assert self.disk
        return os.path.exists(os.path.join(self.disk["folder"], "0", name.hex()))

    def look_up(self, key: bytes) -> int | None:
        block = super().look_up(key)
        if block is not None or self.looking is None:
            return block
        if key not in self.looking:
            self.looking[key] = key in self.reading or self.has_file(self.name(key))
        return ON_DISK if self.looking[key] else None

    def read_ahead(self, seq: Sequence) -> bool | None:
        """Begin to read what only the disk has of a sequence's prefix, as far as the host has room.

        Returns whether there is something to wait for; then the sequence is among `take_ready` later. None: it has to
        ask again, because those that read will take all of the device.
        """
        if not self.disk or seq in self.tried or seq.group.beam or seq.group.score:  # prompts to be scored are computed
            return False
        now = time.monotonic()
        if next((move.begun for move in self.moves.values() if move.reads), now) < now - PATIENCE:
            return False  # the disk does not answer
        self.looking = looked = dict[bytes, bool]()
        _, tables = BlockSpaceManager.find_prefix(self, seq, len(seq.tokens) - 1)
        self.looking = None
        if not any(looked.values()):
            self.tried.add(seq)
            return False
        columns = enumerate(zip(*tables, strict=True))
        lower = [(i, kind) for i, column in columns for kind, block in enumerate(column) if block < -1]
        keys = [seq.hashes[i] + self.marks[kind] for i, kind in lower]
        if len(self.reading.keys() | keys) * self.disk["read"] > len(keys) * self.disk["compute"]:
            return False  # others have too many blocks on their way
        if self.held and sum(len(held[1]) for held in self.held.values()) + len(keys) > self.device.num_free:
            return None
        self.tried.add(seq)
        present = {key: self.host.block_of[key] for key in keys if key in self.host.block_of}
        self.host.share(present.values())  # first, so that no read takes their place
        tickets, blocks = set[int](), list[int]()
        for key in keys:
            if (block := present.pop(key, None)) is None:
                if (ticket := self.reading.get(key)) is None:
                    if not self.host.num_free:
                        break
                    ticket = self.reading[key] = self._begin(key, self.host.allocate(1)[0], reads=True)
                    self.to_read.append((ticket, self.name(key), self.moves[ticket].block))
                block = self.moves[ticket].block
                self.host.share([block])
                tickets.add(ticket)
            blocks.append(block)
        self.held[seq] = tickets, [*blocks, *present.values()], now + PATIENCE
        if not tickets:
            self.host.free(self.held.pop(seq)[1])
        return bool(tickets)

    def take_ready(self) -> list[Sequence]:
        """The sequences that were held, are not aborted, and need not wait any longer."""
        waiting = Status.READING, Status.WAITING
        self.tried = {seq for seq in self.tried if seq.status in waiting}
        for tickets, _, until in self.held.values():
            if time.monotonic() > until:  # the disk does not answer
                tickets.clear()
        self._release()
        ready, self.ready = self.ready, []
        return [seq for seq in ready if not seq.finish_reason]

    def tier_of(self, key: bytes) -> str:
        """A block that was read counts once as the disk's, and as the host's from then on."""
        return "disk" if self.arrived.pop(self.host.block_of[key], None) == key else "host"

    def lower(self, seq: Sequence) -> None:
        super().lower(seq)
        if self.disk and seq.group.retention:
            keys = [digest + mark for digest in seq.hashes for mark in self.marks]
            self.to_write |= dict.fromkeys(keys)  # of those that are on the host already
            self.kept |= dict.fromkeys(keys, seq.group.retention)
            for keys_of in (self.kept, self.to_write):
                for key in [*keys_of][: max(0, len(keys_of) - self.device.num_blocks - self.host.num_blocks)]:
                    del keys_of[key]

    def has_moves(self) -> bool:
        """Whether blocks are to be moved though no sequence runs, and the disk answers."""
        oldest = next((move.begun for move in self.moves.values()), float("inf"))
        return (super().has_moves() or bool(self.moves or self.to_write)) and time.monotonic() < oldest + PATIENCE

    def _begin(self, key: bytes, block: int, reads: bool) -> int:
        """Begin a move, for which the caller has a reference to the host block; returns its ticket."""
        self.ticket += 1
        self.moves[self.ticket] = Move(key, block, reads, self.ranks)
        return self.ticket

    def planned(self, plan: StepPlan) -> None:
        """The plan is made: begin to write what earlier steps have copied to the host, and hand over reads."""
        super().planned(plan)
        if not self.disk:
            return
        self.fresh |= {block: plan.step for _, block in plan.swap_out}
        while self.to_write and len(self.moves) - len(self.reading) < WRITES:
            key = next(iter(self.to_write))
            del self.to_write[key]
            block = self.host.block_of.get(key, -1)
            if block >= 0 and block not in self.fresh:  # else `landed` names it once it is filled
                self.host.share([block])
                ticket = self._begin(key, block, reads=False)
                plan.disk_out.append((ticket, self.name(key), block, self.kept.pop(key, 0.0)))
        plan.disk_in, self.to_read, plan.disk_first = self.to_read, [], self.first
        if plan.rows:
            self.last_rows = plan.step
        elif self.moves and plan.step - self.last_rows > self.stages and not self.config.lockstep:
            plan.disk_wait = WAIT  # no other stage's or engine's step waits behind this one

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """A step has run: what it has copied to the host may be written, and moves may have ended."""
        for _, block in plan.swap_out:
            if self.fresh.get(block) == plan.step:
                del self.fresh[block]
                if (key := self.host.hashes[block]) is not None:
                    self.to_write[key] = None
        for ticket, status in result.disk:
            if move := self.moves.get(ticket):  # else it was given up
                move.ranks, move.status = move.ranks - 1, min(move.status, status)
                if not move.ranks:
                    self._end(ticket, self.moves.pop(ticket))

    def _end(self, ticket: int, move: Move) -> None:
        """All ranks have made a move, or could not."""
        assert self.disk
        kind, moved = "read" if move.reads else "written", move.status > 0
        self.counters[f"kv_disk_{kind}_blocks_total"] += moved
        self.counters[f"kv_disk_{kind}_bytes_total"] += self.disk["bytes"] * moved
        self.counters["kv_disk_bad_blocks_total"] += move.status < 0
        if move.reads:
            del self.reading[move.key]
            if moved:
                self.host.publish(move.block, move.key)
                self.arrived[move.block] = move.key
            for tickets, *_ in self.held.values():
                tickets.discard(ticket)
            self._release()
        self.host.free([move.block])

    def _release(self) -> None:
        """Let sequences go whose tickets have ended. Their blocks become the latest used of the host."""
        for seq in [seq for seq, (tickets, *_) in self.held.items() if not tickets]:
            self.host.free(self.held.pop(seq)[1])
            self.ready.append(seq)

    def _give_up(self) -> None:
        """Give up all moves: the next plan tells the workers, see above."""
        for tickets, *_ in self.held.values():
            tickets.clear()
        self._release()
        self.host.free([move.block for move in self.moves.values()])
        self.first = self.ticket + 1
        for books in (self.moves, self.reading, self.to_read, self.to_write, self.fresh, self.arrived):
            books.clear()

    def forget_moves(self, plans: Items[StepPlan]) -> None:
        super().forget_moves(plans)
        self._give_up()

    def reset_prefix_cache(self) -> None:
        """Forget what device and host have: new workers have loaded the weights, which may be others by now."""
        super().reset_prefix_cache()
        self._give_up()
        if self.disk and self.mark == self.weights:
            self.mark = self.weights = weights_mark(self.config)

    def forget_all(self, config: EngineConfig) -> None:
        """Forget all cached prefixes for good: because a caller says so, or because `config` has a new version of the
        weights. Files have other names from then on. Without a new version these are of this engine alone."""
        super().reset_prefix_cache()
        self._give_up()
        if self.disk:
            is_new = config.weights_version != self.config.weights_version
            self.mark, self.config = os.urandom(16), config
            if is_new:
                self.mark = self.weights = weights_mark(config)
