"""Messages as bytes, and a ring in shared memory that carries them between the processes of a machine.

A ring has chunks, one writer and many readers. All words lie before all payloads:

    words of chunk i      written | length | read by 0 | read by 1 | ...        64 bits each
    payload of chunk i    [chunk_bytes]

Every reader gets every message, in order. A message that is longer than a chunk goes in pieces. The k-th piece that is
written (from 1 on) goes into chunk (k - 1) mod num_chunks. `written` becomes k when its payload is there, and a
reader's word when that reader has taken it. The writer uses the chunk again once all readers have. So no word has two
writers and there is no lock. The design is vLLM's `shm_broadcast`, but words are sequence numbers, not flags: no piece
lost, repeated or overtaken looks like the next. `length` is what is left of the message, in bytes.

A reader spins for a moment, and then sleeps until a socket, its bell, wakes it. Nothing here has a name in the file
system, so nothing is left there, whichever process is killed.

In one more word the writer's process counts its heartbeats, for a `Watchdog` of the reader.
"""

from __future__ import annotations

import _signal
import contextlib
import mmap
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from typing import Any, get_args

from plan import Message

CHUNK_BYTES = 1 << 18  # a plan is mostly a few KB; one with a prompt of 50,000 tokens may be larger
NUM_CHUNKS = 8  # pieces that the writer may be ahead of the slowest reader
SPIN = 100e-6  # seconds before a reader sleeps; an immediate answer comes sooner, and waking up takes half as long
PAUSE = 500e-6  # seconds between a writer's looks while there is no room
BACKSTOP = 1.0  # seconds that a reader sleeps at most, in case it ever misses the bell
BEAT = 0.5  # seconds between two heartbeats, and between two looks at them
STALL = 3.5  # seconds without a heartbeat after which a process counts as stuck, at most 4.5 after it stopped
GAP = 1.0  # seconds that one look at a heartbeat counts for, at most
BROKEN_OFF = 60.0  # seconds after which a reader gives up the rest of a message that has begun
WORD = 8  # bytes


class Codec:
    """Turns messages of a union of classes into bytes and back: a class's name and fields, in msgpack. No code runs.

    Each decoding thread needs a codec of its own.
    """

    def __init__(self, classes: Any = Message):
        import msgspec  # here, because a script that uses `LLM` on one device does not need it

        self.encoder = msgspec.msgpack.Encoder()
        self.envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self.bodies = {cls.__name__: msgspec.msgpack.Decoder(cls) for cls in get_args(classes)}

    def encode(self, message: Any) -> bytes:
        return self.encoder.encode((type(message).__name__, message))

    def decode(self, data: bytes) -> Any:
        """The message that `encode` made these bytes from; a ValueError or KeyError if they are none."""
        name, body = self.envelope.decode(data)
        return self.bodies[name].decode(body)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C until the end of this, so that nothing is left half done.

    A step enters this several times. So it uses the module below `signal`, without enums: 3 us instead of 22.
    """
    handler = _signal.getsignal(_signal.SIGINT)
    pending: list[Any] = []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no signal is handled in this thread, or none by Python
        return
    _signal.signal(_signal.SIGINT, lambda *caught: pending.append(caught))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if pending:
            handler(*pending[0])


class RingTimeout(RuntimeError):
    """A reader takes no messages, or the rest of a message does not come; `reader` is that reader's number."""

    def __init__(self, reader: int, what: str):
        super().__init__(what)
        self.reader = reader


class Watchdog:
    """Measures how long another process's count of heartbeats stands still. Call `look` at least once a second.

    Only time in which this process runs counts, because the whole machine may have stood still.
    """

    def __init__(self) -> None:
        self.beats = -1  # the count at the last look
        self.still = 0.0  # seconds
        self.last = time.monotonic()

    def look(self, beats: int) -> float:
        """Seconds for which the count has been `beats`, its present value."""
        now = time.monotonic()
        self.still = 0.0 if beats != self.beats else self.still + min(now - self.last, GAP)
        self.beats, self.last = beats, now
        return self.still

    def still_if(self, condition: bool) -> float:
        """Seconds for which `condition` has held, where there is no count to look at."""
        return self.look(0 if condition else self.beats + 1)


def nameless_file(purpose: str) -> int:
    """The descriptor of a new file in memory, or on disk where that cannot be; it ends with its last descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(purpose)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class RingBuffer:
    """One end of a ring. It is made in one process, and handed to others as an argument when they are started."""

    def __init__(self, num_readers: int, chunk_bytes: int = CHUNK_BYTES, num_chunks: int = NUM_CHUNKS):
        self.num_readers, self.chunk_bytes, self.num_chunks = num_readers, chunk_bytes, num_chunks
        size = self._words() * WORD + num_chunks * chunk_bytes
        self.fd = nameless_file("manta-ring")
        os.ftruncate(self.fd, size)
        self.bells = [socket.socketpair() for _ in range(num_readers)]  # (writer's end, reader's end)
        self._map()

    def _words(self) -> int:
        words = self.num_chunks * (2 + self.num_readers) + self.num_readers + 1
        return (words + 7) // 8 * 8  # rounded up to 64 bytes

    def _map(self) -> None:
        self.memory = mmap.mmap(self.fd, 0)
        self.words = memoryview(self.memory)[: self._words() * WORD].cast("Q")
        self.payloads = memoryview(self.memory)[self._words() * WORD :]
        self.asleep = self.num_chunks * (2 + self.num_readers)  # index of each reader's word, 1 while it sleeps
        self.pulse = self.asleep + self.num_readers  # index of the word in which the writer counts its heartbeats
        self.count = 0  # pieces written, or read, at this end
        self.pieces: list[bytes] = []  # of a message, so far; they stay if Ctrl-C breaks off reading it
        self.fence = threading.Lock()
        for bell, _ in self.bells:
            bell.setblocking(False)
        self.poll = select.poll()

    def __getstate__(self) -> dict[str, object]:
        kept = ("num_readers", "chunk_bytes", "num_chunks", "bells")
        return {name: getattr(self, name) for name in kept} | {"fd": reduction.DupFd(self.fd)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.fd = state["fd"].detach()  # type: ignore[attr-defined]
        self._map()

    def _order(self) -> None:
        """No store or load of this thread passes here: a lock's atomic instruction is a fence on x86 and on Arm."""
        with self.fence:
            pass

    # --- the writer's end

    def be_writer(self) -> None:
        """Be the writer's end. The readers' sockets are closed here, so that a reader's death shows."""
        for _, theirs in self.bells:
            theirs.close()

    def write(self, message: bytes, timeout: float, look: Callable[[], None] = lambda: None) -> None:
        """Put a message in; waits while there is no room, and calls `look` every PAUSE while it does.

        `look` must take what readers write to this process: a reader that waits for room there reads nothing here.

        Raises:
            RingTimeout: a reader has not made room in time. No reader gets the message; of a large one, maybe a part.
        """
        deadline = time.monotonic() + timeout
        length = len(message)
        for begin in range(0, length or 1, self.chunk_bytes):
            self._put(message[begin : begin + self.chunk_bytes], length - begin, timeout, deadline, look)

    def _put(self, piece: bytes, left: int, timeout: float, deadline: float, look: Callable[[], None]) -> None:
        """Put the next piece of a message into a chunk; the message has `left` bytes still to come, with this piece."""
        chunk = self.count % self.num_chunks
        at, begin = chunk * (2 + self.num_readers), chunk * self.chunk_bytes
        for reader in range(self.num_readers):
            while self.words[at + 2 + reader] + self.num_chunks <= self.count:
                if time.monotonic() > deadline:
                    piece_number = self.count - self.num_chunks + 1
                    what = f"reader {reader} has not taken message {piece_number} within {timeout:g} s"
                    raise RingTimeout(reader, what)
                look()
                time.sleep(PAUSE)
        self.payloads[begin : begin + len(piece)] = piece
        self.words[at + 1] = left
        self._order()  # the payload is there before its number
        self.count += 1
        self.words[at] = self.count
        self._order()  # the number is there before we look which readers sleep
        for reader, (bell, _) in enumerate(self.bells):
            if self.words[self.asleep + reader]:
                with contextlib.suppress(BlockingIOError, ConnectionError):  # it rings already, or its reader is gone
                    bell.send(b"\0")

    def beat(self) -> None:
        """Count a heartbeat. A thread of the writer's process does that, so that a long step does not stop them."""
        self.words[self.pulse] += 1

    # --- a reader's end

    @property
    def beats(self) -> int:
        """Heartbeats of the writer's process so far."""
        return self.words[self.pulse]

    def be_reader(self, reader: int, sentinels: Sequence[int] = ()) -> None:
        """Be this reader's end. A `read` also returns when a file descriptor in `sentinels` is readable."""
        self.reader = reader
        for i, (theirs, mine) in enumerate(self.bells):
            theirs.close()
            if i != reader:
                mine.close()
        for fd in (self.bells[reader][1].fileno(), *sentinels):
            self.poll.register(fd, select.POLLIN)

    def read(self, timeout: float) -> bytes | None:
        """The next message; None if none has begun within `timeout` seconds, or before a sentinel was readable.

        Raises:
            RingTimeout: a message has begun, and its rest does not come within BROKEN_OFF seconds.
        """
        while self._wait(BROKEN_OFF if self.pieces else timeout):
            self._order()  # the number was there before the payload is read
            chunk = self.count % self.num_chunks
            at, begin = chunk * (2 + self.num_readers), chunk * self.chunk_bytes
            left = self.words[at + 1]
            piece = bytes(self.payloads[begin : begin + min(left, self.chunk_bytes)])
            with undisturbed():
                self.count += 1
                assert self.words[at] == self.count, "the writer overtook a reader"
                self._order()  # the payload was read before the chunk is given back
                self.words[at + 2 + self.reader] = self.count
                self.pieces.append(piece)
                if left <= self.chunk_bytes:
                    message, self.pieces = b"".join(self.pieces), []
                    return message
        if self.pieces:
            raise RingTimeout(self.reader, f"the rest of a message has not come within {BROKEN_OFF:g} s")
        return None

    def _wait(self, timeout: float) -> bool:
        at = self.count % self.num_chunks * (2 + self.num_readers)
        words, wanted = self.words, self.count + 1
        begun = time.monotonic()
        while words[at] != wanted:
            if (waited := time.monotonic() - begun) > timeout:
                return False
            if waited < SPIN:
                os.sched_yield()  # without this two readers on two cores keep the writer from running
                continue
            asleep, bell = self.asleep + self.reader, self.bells[self.reader][1]
            words[asleep] = 1
            self._order()  # the writer sees that we sleep, or we see its message
            rung = self.poll.poll(min(timeout - waited, BACKSTOP) * 1e3) if words[at] != wanted else []
            words[asleep] = 0
            for fd, _ in rung:
                if fd != bell.fileno():
                    return words[at] == wanted
                bell.recv(4096)
        return True

    def close(self) -> None:
        """Give the memory and the sockets back; the other ends keep theirs."""
        self.words.release()
        self.payloads.release()
        self.memory.close()
        os.close(self.fd)
        for pair in self.bells:
            for end in pair:
                end.close()
