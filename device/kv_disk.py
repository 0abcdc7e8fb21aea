"""Files of KV blocks: a worker's threads write blocks of host memory to disk behind the steps, and read them ahead.

    DIR/blocks/<fingerprint>/<rank>/<name>   magic | name | length | CRC-32 of all else | the bytes of this rank

The fingerprint is of all that must agree for bytes to mean the same, but for the weights, which are a part of the name
(see `scheduling/disk.py`). A file is written under another name and then renamed. Nothing is synced: after a loss of
power the checksum finds what is not whole. What is wrong with a file or the disk costs nothing but a hit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import statistics
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from config import EngineConfig, private_folder
from observe.logs import warn_once
from plan import StepPlan

Views = Callable[[int], list[memoryview]]
MAGIC = b"MantaKV1"  # with the number of this format
HEADER = struct.Struct("<8s16sQI")
PAUSE = 30.0  # seconds without a write after one that failed
ROOM = 1 / 16  # share of the size to free once it is used up
LISTINGS = 8  # the folder is listed each time that this part of its size was written, because others write there, too


class KVDisk:
    """The files of a rank.

    Args:
        config: names the folder of all files, and its size.
        fingerprint, rank: name the folder of this worker's there.
        views: returns the memory of a host block, which is read from and written to a file.
    """

    def __init__(self, config: EngineConfig, fingerprint: str, rank: int, views: Views):
        self.root = Path(private_folder(config.kv_disk or "")) / "blocks"  # files beside it are not ours
        self.folder = self.root / fingerprint / str(rank)
        self.size, self.used, self.written = int(config.kv_disk_size * 2**30), 0, 0  # bytes; the latter since a listing
        self.views = views
        self.reader, self.writer = (ThreadPoolExecutor(1, f"manta-kv-{kind}") for kind in ("read", "write"))
        self.moves: dict[int, Future[int]] = {}  # by ticket, those that were not reported
        self.first = 0  # the lowest ticket that counts
        self.paused_until = 0.0
        with contextlib.suppress(OSError):
            self.trim()

    def time_reads(self, nbytes: int) -> float:
        """Seconds that reading and checking a file takes that is not in the system's memory; infinite: it fails."""
        seconds, block = [], bytearray(os.urandom(nbytes))
        try:
            for name in (os.urandom(16) for _ in range(4)):
                if not self.write_file(name, [memoryview(block)], 0.0):
                    raise OSError(errno.ENOSPC, f"kv_disk_size has no room for blocks of {nbytes} bytes")
                with open(self.path(name), "rb") as file, contextlib.suppress(AttributeError):  # not on macOS
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                begun = time.perf_counter()
                self.read_file(name, [memoryview(block)])
                seconds.append(time.perf_counter() - begun)
                self.path(name).unlink()
        except OSError as error:
            warn_once(f"kv_disk is {str(self.root)!r}: {error}; it is not used")
            return float("inf")
        return statistics.median(seconds)

    def begin(self, plan: StepPlan, event: torch.cuda.Event | None) -> None:
        """Begin a plan's moves, and wait until one has ended if the plan says so. On a GPU threads wait for an event,
        because steps in its queue move the same blocks."""
        for ticket, name, block in plan.disk_in:
            self.moves[ticket] = self.reader.submit(self.read, name, block, event)
        for ticket, name, block, seconds in plan.disk_out:
            self.moves[ticket] = self.writer.submit(self.write, name, block, seconds, event)
        if plan.disk_wait:
            wait(self.moves.values(), plan.disk_wait, FIRST_COMPLETED)

    def ended(self) -> list[tuple[int, int]]:
        """The moves that have ended since the last call, see `StepResult.disk`."""
        ended = [ticket for ticket, move in self.moves.items() if move.done()]
        return [(ticket, self.moves.pop(ticket).result()) for ticket in ended]

    def give_up(self, first: int | None = None) -> None:
        """Give up all moves if tickets below `first` do not count any more. No thread touches a block afterwards."""
        if first is None or first > self.first:
            wait([move for move in self.moves.values() if not move.cancel()])
            self.moves.clear()
            self.first = first or self.first

    def read(self, name: bytes, block: int, event: torch.cuda.Event | None) -> int:
        """Fill a host block from its file, which is removed if it is bad; returns the move's status."""
        if event:
            event.synchronize()
        try:
            if self.read_file(name, self.views(block)):
                return 1
            warn_once(f"kv_disk: {self.path(name)} is not what was written there, and is removed")
            self.path(name).unlink()
            return -1
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # as where it was the least recently used
                warn_once(f"kv_disk: reading from {self.folder} fails: {error.strerror}")
            return 0

    def write(self, name: bytes, block: int, seconds: float, event: torch.cuda.Event | None) -> int:
        """Write a host block to its file, which is to be kept for some seconds; returns the move's status."""
        if event:
            event.synchronize()
        if time.monotonic() < self.paused_until:
            return 0
        try:
            with contextlib.suppress(FileNotFoundError):
                self.touch(name, seconds)
                return 0
            return int(self.write_file(name, self.views(block), seconds))
        except OSError as error:
            warn_once(f"kv_disk: writing to {self.folder} fails, and pauses: {error.strerror}")
            self.paused_until = time.monotonic() + PAUSE
            return 0

    def path(self, name: bytes) -> Path:
        """The file of this name."""
        return self.folder / name.hex()

    def touch(self, name: bytes, seconds: float = 0.0) -> None:
        """Have a file count as used in so many seconds, unless it does later already."""
        now = time.time()
        os.utime(self.path(name), (now, max(now + seconds, os.stat(self.path(name)).st_mtime)))

    def read_file(self, name: bytes, views: list[memoryview]) -> bool:
        """Fill memory from a file; returns whether it is whole. Raises an OSError if it cannot be read."""
        with open(self.path(name), "rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or os.fstat(file.fileno()).st_size != HEADER.size + sum(map(len, views)):
                return False
            if any(file.readinto(view) < len(view) for view in views):
                return False
        if header != self.header(name, views):
            return False
        with contextlib.suppress(OSError):
            self.touch(name)
        return True

    def write_file(self, name: bytes, views: list[memoryview], seconds: float) -> bool:
        """Make a file, and room for it; returns whether there is some. Raises an OSError."""
        size = HEADER.size + sum(map(len, views))
        if self.used + size > self.size or self.written > self.size / LISTINGS:
            self.trim(size)
        if self.used + size > self.size:
            return False
        for folder in (self.root, self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        path, temporary = self.path(name), self.folder / f"{name.hex()}.{os.urandom(4).hex()}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines([self.header(name, views), *views])
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self.used, self.written = self.used + size, self.written + size
        self.touch(name, seconds)
        return True

    def header(self, name: bytes, views: list[memoryview]) -> bytes:
        """The header of a file with these contents."""
        facts = MAGIC, name, sum(map(len, views))
        checksum = zlib.crc32(HEADER.pack(*facts, 0))
        for view in views:
            checksum = zlib.crc32(view, checksum)
        return HEADER.pack(*facts, checksum)

    def trim(self, coming: int = 0) -> None:
        """Count what all engines have in the folder; if there is no room, remove what was used least recently. Where
        more than half is to be kept for longer, as one client's sessions may fill the disk, that counts no more."""
        now, files = time.time(), []
        for path in self.root.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                begun = path.suffix and state.st_mtime > now - PAUSE  # it is being written
                used, until = (float("inf"),) * 2 if begun else (state.st_atime, state.st_mtime)
                files.append((until, used, state.st_size, path))
        self.used, self.written = sum(size for *_, size, _ in files), 0
        if self.used + coming <= self.size:
            return
        if sum(size for until, _, size, _ in files if now < until < float("inf")) > self.size / 2:
            files.sort(key=lambda file: file[1])
        else:
            files.sort()
        for *_, size, path in files:
            if self.used + coming <= self.size * (1 - ROOM):
                return
            path.unlink(missing_ok=True)
            self.used -= size
