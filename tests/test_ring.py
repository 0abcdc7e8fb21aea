"""The ring: every reader gets every message, whole and in order, however large it is and however slow the reader."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import ring as ring_module
from ring import GAP, PAUSE, RingBuffer, RingTimeout, Watchdog
from served import eventually, tell_time

SPAWN = multiprocessing.get_context("spawn")
CHUNK = 4096


def messages(count: int, seed: int = 0) -> Any:
    """Messages of mixed sizes, some of them larger than a chunk; each begins with its number."""
    rng, noise = random.Random(seed), random.Random(seed + 1).randbytes(5 * CHUNK)
    for number in range(count):
        size = rng.choice((0, 8, 200, CHUNK - 8)) if rng.random() < 0.999 else 4 * CHUNK
        begin = rng.randrange(CHUNK)
        yield number.to_bytes(8, "little") + noise[begin : begin + size]


def listen(ring: RingBuffer, reader: int, count: int, slow: bool, answer: RingBuffer) -> None:
    """Read `count` messages, and answer whether they are what they should be."""
    ring.be_reader(reader)
    answer.be_writer()
    rng, wanted = random.Random(reader), messages(count)
    for number in range(count):
        got = ring.read(60)
        if got != next(wanted):
            answer.write(f"message {number} is wrong".encode(), 60)
            return
        if slow and rng.random() < 0.0005:
            time.sleep(0.005)
    answer.write(b"all right", 60)


def send(count: int, readers: int, slow: bool) -> list[bytes]:
    """Send `count` messages to `readers` processes; returns their answers."""
    ring, answers = RingBuffer(readers, CHUNK), [RingBuffer(1) for _ in range(readers)]
    processes = []
    for i, answer in enumerate(answers):
        process = SPAWN.Process(target=listen, args=(ring, i, count, slow and i == 0, answer))
        process.start()
        answer.be_reader(0, [process.sentinel])
        processes.append(process)
    ring.be_writer()
    for message in messages(count):
        ring.write(message, 60)
    replies = [answer.read(60) for answer in answers]
    for process in processes:
        process.join(10)
    for used in (ring, *answers):
        used.close()
    return replies


@pytest.mark.parametrize(
    ("readers", "count"),
    [pytest.param(1, 5000, marks=pytest.mark.full), (2, 5000), pytest.param(4, 20_000, marks=pytest.mark.long)],
)
def test_nothing_is_lost_torn_or_reordered(readers, count):
    assert send(count, readers, slow=True) == [b"all right"] * readers


def copied(ring: RingBuffer) -> RingBuffer:
    """Another end of a ring in the same process, which shares its memory and sockets."""
    other = object.__new__(RingBuffer)
    other.__dict__.update({name: getattr(ring, name) for name in ("num_readers", "chunk_bytes", "num_chunks")})
    other.fd = os.dup(ring.fd)
    other.bells = [(a.dup(), b.dup()) for a, b in ring.bells]
    other._map()
    return other


@pytest.fixture
def pair():
    """Makes both ends of a ring in one process, and closes them after the test."""
    made: list[RingBuffer] = []

    def make(chunks: int = 8) -> tuple[RingBuffer, RingBuffer]:
        ring = RingBuffer(1, CHUNK, chunks)
        other = copied(ring)
        other.be_reader(0)
        ring.be_writer()
        made.extend((ring, other))
        return ring, other

    yield make
    for ring in made:
        ring.close()


def test_a_full_ring_names_who_does_not_read(pair):
    writer, reader = pair(chunks=4)
    for _ in range(4):
        writer.write(b"x", 1)
    with pytest.raises(RingTimeout, match=r"reader 0 has not taken message 1 within 0.05 s") as caught:
        writer.write(b"x", 0.05)
    assert caught.value.reader == 0
    assert reader.read(1) == b"x"
    writer.write(b"y", 1)
    assert [reader.read(1) for _ in range(4)] == [b"x"] * 3 + [b"y"]


def test_nothing_comes(pair):
    writer, reader = pair()
    begun = time.monotonic()
    assert reader.read(0.05) is None and time.monotonic() - begun >= 0.05
    writer.write(b"late", 1)
    assert reader.read(0.05) == b"late"


def test_a_large_message_that_is_broken_off_is_an_error(pair, monkeypatch):
    monkeypatch.setattr(ring_module, "BROKEN_OFF", 0.1)
    writer, reader = pair(chunks=4)
    with pytest.raises(RingTimeout):
        writer.write(bytes(10**7), 0.1)  # nobody reads, and the ring does not hold so much
    with pytest.raises(RingTimeout, match=r"the rest of a message has not come within 0\.1 s"):
        reader.read(0.01)


def test_a_large_message_is_waited_for_however_short_the_look_is(pair):
    """A worker looks for the next plan only briefly while a step runs, and a large plan takes longer to come."""
    writer, reader = pair(chunks=2)
    message = random.Random(0).randbytes(100 * CHUNK)
    looks = []
    sending = threading.Thread(target=writer.write, args=(message, 10, lambda: looks.append(1)))
    sending.start()
    while (got := reader.read(2e-5)) is None:
        pass
    sending.join()
    assert got == message and looks


class TinyRing(RingBuffer):
    """A ring in which little fits a chunk, and not much more the whole ring."""

    def __init__(self, num_readers: int, chunk_bytes: int = 512):
        super().__init__(num_readers, chunk_bytes)


def test_two_that_write_to_each_other_do_not_wait_for_each_other(pair, monkeypatch):
    """One of them takes, while there is no room, what the other has sent, which reads nothing before that."""
    (there, out), (back, answers), pauses = pair(), pair(), []
    monkeypatch.setattr(ring_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    plan, result = random.Random(0).randbytes(10**6), random.Random(1).randbytes(10**6)
    got: list[Any] = []
    other = threading.Thread(target=lambda: [back.write(result, 10), got.append(out.read(10))])
    other.start()
    early: list[bytes] = []
    there.write(plan, 10, lambda: early.extend(filter(None, [answers.read(0)])))
    other.join()
    assert (early, got) == ([result], [plan]) and set(pauses) == {PAUSE}  # it does not look once a BEAT alone


def test_ctrl_c_in_the_midst_of_a_large_message_loses_nothing_of_it(pair):
    writer, reader = pair()
    message = random.Random(0).randbytes(10**6)
    writing = threading.Thread(target=lambda: [writer.write(message, 10), writer.write(b"next", 10)])
    writing.start()
    wait, waits = reader._wait, []

    def interrupted(timeout: float) -> bool:
        waits.append(timeout)
        if len(waits) == 3:
            raise KeyboardInterrupt
        return wait(timeout)

    reader._wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        reader.read(10)
    assert [reader.read(10), reader.read(10)] == [message, b"next"] and len(waits) > 3
    writing.join()


def die(ring: RingBuffer) -> None:
    ring.be_writer()
    ring.write(b"last words", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_hears_of_the_writers_death():
    ring = RingBuffer(1)
    process = SPAWN.Process(target=die, args=(ring,))
    process.start()
    ring.be_reader(0, [process.sentinel])
    assert ring.read(60) == b"last words"
    begun = time.monotonic()
    assert ring.read(60) is None and time.monotonic() - begun < 30
    process.join(10)
    ring.close()


def test_a_sleeping_reader_takes_no_time(pair):
    _, reader = pair()
    begun = time.thread_time()
    assert reader.read(0.5) is None
    assert time.thread_time() - begun < 0.01


def test_heartbeats_reach_the_other_end(pair):
    writer, reader = pair()
    assert reader.beats == 0
    writer.beat()
    writer.beat()
    assert reader.beats == 2


def test_each_reader_sleeps_and_is_woken_whatever_the_others_do(monkeypatch):
    monkeypatch.setattr(ring_module, "BACKSTOP", 1e6)
    writer = RingBuffer(2, CHUNK)
    busy, idle = copied(writer), copied(writer)
    busy.be_reader(0)
    idle.be_reader(1)
    writer.be_writer()
    waiting = threading.Thread(target=idle.read, args=(1e6,), daemon=True)
    waiting.start()
    eventually(lambda: [*writer.words[writer.asleep :][:2]] == [0, 1], 5)
    writer.write(b"x", 1)
    waiting.join(30)
    assert not waiting.is_alive()
    for ring in (writer, busy, idle):
        ring.close()


@pytest.mark.parametrize("size", [1, 3 * 10**6], ids=["in a chunk", "in several"])
def test_a_writer_that_waits_looks_around(pair, size):
    writer, _ = pair(chunks=1)
    looks = []
    if size == 1:
        writer.write(b"x", 1)
    with pytest.raises(RingTimeout):
        writer.write(bytes(size), 0.3, lambda: looks.append(1))
    assert len(looks) >= 2


def test_a_watchdog_counts_only_the_time_in_which_it_looks(monkeypatch):
    clock = iter([0.0, 0.0, 0.5, 1.0, 1.5, 100.0, 100.5, 101.0])
    tell_time(monkeypatch, lambda: next(clock))
    dog = Watchdog()
    assert [dog.look(beats) for beats in (1, 1, 1, 2, 2, 2)] == [0, 0.5, 1.0, 0, GAP, GAP + 0.5]
    assert dog.look(0) == 0  # another process has taken its place


def test_the_messages_of_these_tests_are_what_they_say():
    sizes = [len(message) for message in messages(5000)]
    assert min(sizes) == 8 and max(sizes) > CHUNK
    assert len({hashlib.sha256(message).digest() for message in messages(5000)}) == 5000
