"""A storm: seeded streams run while random things happen to the server, and each stream must keep its word.

    python tests/storm.py --events 200 --streams 200 --seed 1       prints what happened, in JSON
    python -m pytest tests/storm.py -m long                         the same as a test

Each stream is asked for again and again until the events are over. Its text must be the one that a quiet server gave,
or the beginning of that with a documented error after it: its engine process or its API process has ended, or the
server said 503. While any stream runs, `/health` may not say 200 for longer than LIE seconds in which no token comes.
At the end every stream is whole once more, the server ends with 0 by SIGTERM, and nothing is left behind.

A row's logits depend in their last bits on what is computed with it, and once in some hundred thousand tokens that
turns another one up. So a text that differs is not broken if the model gives it, too, when the stream is resumed from a
prefix of its tokens, alone or in a batch (`settle`). Wrong keys and values give texts that no such run does.

The same storm blows in several worlds: one engine, diagnostics on a full disk, and two engines with a coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # the engine's files lie one folder up

from config import DEMO
from engine import LLM, SamplingParams
from sequence import derived_seed

ROOT = Path(__file__).parent.parent
DEADLY = [13, 11, 7, 5, 3, 2]  # as in poison/sitecustomize.py
LIE = 5.0  # seconds that /health may say 200 while no token comes
HUNG = 90.0  # seconds without a token, an error or an end, after which a stream counts as lost
QUIET = 60.0  # seconds that the server has to recover before the next event
DOCUMENTED = (
    "the engine process has ended",
    "gives no sign of life",
    "no engine",
    "the server is shutting down",
    "rank 0 ",  # at the door, while workers are started anew: died, stopped, makes no progress
)


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class World:
    """How a server is started.

    Attributes:
        flags: beside those that all have.
        full_disk: whether its log, journal and trace lie on a full disk.
        share: of the events that happen here.
    """

    name: str
    flags: tuple[str, ...]
    full_disk: bool = False
    share: float = 1.0


WORLDS = (
    World("one engine", ("--api-server-count", "2"), share=0.5),
    World("full disk", ("--log-scheduler", "/dev/full", "--trace", "/dev/full"), full_disk=True, share=0.25),
    World("two engines", ("--api-server-count", "2", "--data-parallel-size", "2"), share=0.25),
)


# --- the server -------------------------------------------------------------------------------------------------------


class Server:
    """A server of a world, and its processes by kind."""

    def __init__(self, world: World, folder: Path):
        self.world, self.tmp = world, Path(tempfile.mkdtemp(dir="/tmp"))
        self.shm = set(os.listdir("/dev/shm"))
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.log = folder / f"{world.name.replace(' ', '-')}.log"
        path = os.pathsep.join([str(ROOT / "tests" / "poison"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.tmp), "PYTHONPATH": path}
        command = [
            sys.executable, "server.py", "--port", str(self.port), "--device", "cpu", "--dtype", "float32",
            "--threads", "1", "--step-timeout", "8", *world.flags,
        ]  # fmt: skip
        with open("/dev/full" if world.full_disk else self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, start_new_session=True)
        self.seen: set[int] = set()

    def family(self) -> dict[str, list[int]]:
        """Its processes by kind."""
        kinds: dict[str, list[int]] = {"main": [self.process.pid], "api": [], "engine": [], "coordinator": []}
        kinds["worker"] = []
        below = [(child, "main") for child in children(self.process.pid)]
        while below:
            pid, parent = below.pop()
            command = command_of(pid)
            # The first words are those of a process that has not called itself by the others yet.
            engine, coordinator = (r"engine_process\.py|manta: engine", r"data_parallel\.py|manta: coordinator")
            kind = "engine" if re.search(engine, command) else "coordinator" if re.search(coordinator, command) else ""
            worker = re.search("spawn_main|manta: worker", command)
            kind = kind or ("api" if parent == "main" else "worker" if worker else "")
            if kind:
                kinds[kind].append(pid)
                below += [(child, kind) for child in children(pid)]
            self.seen.add(pid)
        return kinds

    def assert_gone(self) -> None:
        """Nothing of it is left: no process, no shared memory, no file."""
        deadline = time.monotonic() + 20
        while left := [pid for pid in self.seen if alive(pid)]:
            if time.monotonic() > deadline:
                raise Broken(f"processes are left: {[(pid, command_of(pid)) for pid in left]}")
            time.sleep(0.1)
        while files := list(self.tmp.iterdir()):
            if time.monotonic() > deadline:
                raise Broken(f"files are left: {files}")
            time.sleep(0.1)
        if shared := set(os.listdir("/dev/shm")) - self.shm:
            raise Broken(f"shared memory is left: {shared}")
        self.tmp.rmdir()


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# --- clients ----------------------------------------------------------------------------------------------------------


async def connect(port: int, method: str, path: str, body: bytes = b"") -> tuple[Any, Any]:
    """A connection with a request on its way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    """Status and body of a reply."""
    reader, writer = await connect(port, method, path, body)
    try:
        with contextlib.suppress(ConnectionError):  # a body that is refused early
            await writer.drain()
        data = await reader.read()
    finally:
        writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionError("no reply")
    return int(head.split(b" ", 2)[1]), rest.decode(errors="replace")


@dataclass
class Stream:
    """A request that is asked for again and again.

    Attributes:
        expected: the text of each choice, as the quiet server gave it.
        whole: how often it came in full.
        moved: when it last brought anything.
    """

    number: int
    body: bytes
    expected: list[str] = field(default_factory=list)
    whole: int = 0
    moved: float = 0.0
    waiting: bool = False  # for the server to take it


def make_stream(number: int, seed: int) -> Stream:
    """The request of one seeded stream; some have two samples, some a stop string that may never come."""
    rng = random.Random(f"{seed}/{number}")
    body: dict[str, Any] = {
        "prompt": f"Enter the {number}th SERVANT, with a torch.\n\n", "seed": number, "stream": True,
        "n": 1, "temperature": rng.choice([0.0, 0.8, 1.2]), "max_tokens": rng.randrange(60, 400), "ignore_eos": True,
    }  # fmt: skip
    if rng.random() < 0.15:
        body["n"] = 2
    if rng.random() < 0.15:
        body["stop"] = ["\n\n\n", "KING"]
    if rng.random() < 0.15:
        body |= {"repetition_penalty": 1.1, "top_k": 20}
    return Stream(number, json.dumps(body).encode())


class Storm:
    """All clients of one world, what they have seen, and what happens to the server."""

    def __init__(self, server: Server, streams: list[Stream], seed: int):
        self.server, self.streams = server, streams
        self.rng = random.Random(f"{seed}/{server.world.name}")
        self.counts: Counter[str] = Counter()
        self.tokens, self.token_at = 0, time.monotonic()
        self.longest_lie = self.longest_outage = 0.0
        self.healthy_since: float | None = None  # /health has said 200 since then, without a break
        self.trouble_since: float | None = None
        self.api_cuts: list[float] = []  # when an API process was hurt
        self.disputes: list[tuple[Stream, int, str]] = []  # texts that differ, with the index of the sample
        self.over = False

    # --- what clients see

    async def run_once(self, stream: Stream) -> None:
        """Ask for a stream once.

        Raises:
            Broken: its text is not what it should be.
        """
        texts = [""] * max(1, len(stream.expected))
        error, done = "", False
        try:
            reader, writer = await connect(self.server.port, "POST", "/v1/completions", stream.body)
        except OSError as problem:
            raise Broken(f"stream {stream.number}: {problem!r}: the server does not listen") from None
        try:
            async for line in lines(reader, stream):
                if line == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    error = event.get("error", {}).get("message", error)
                    for choice in event.get("choices", ()):
                        while len(texts) <= choice["index"]:
                            texts.append("")
                        texts[choice["index"]] += choice["text"]
                        self.tokens, self.token_at = self.tokens + 1, time.monotonic()
                elif line.startswith(b'{"error"'):
                    error, done = json.loads(line)["error"]["message"], True
        except (ConnectionError, asyncio.IncompleteReadError):
            done = False
        finally:
            writer.close()
        self.judge(stream, texts, error, done)

    def judge(self, stream: Stream, texts: list[str], error: str, done: bool) -> None:
        """Whether what came is what was promised."""
        if not stream.expected:
            if error or not done:
                raise Broken(f"stream {stream.number} failed in a quiet server: {error or 'cut'}")
            stream.expected = texts
        different = 0
        for index, (text, expected) in enumerate(zip(texts, stream.expected, strict=False)):
            if not expected.startswith(text):
                different += 1
                self.disputes.append((stream, index, text))
        if error:
            if not any(known in error for known in DOCUMENTED):
                raise Broken(f"stream {stream.number} ended with an error that nobody promised: {error}")
            self.counts["ended: " + re.sub(r"\d+(\.\d+)?", "N", error)[:60]] += 1
        elif not done:
            if not any(time.monotonic() - at < 200 for at in self.api_cuts):
                raise Broken(f"stream {stream.number} was cut, and no API process was hurt")
            self.counts["cut with its API process"] += 1
        elif not different and texts != stream.expected:
            raise Broken(f"stream {stream.number} ended early: {[len(text) for text in texts]} characters")
        else:
            stream.whole += 1
            self.counts["whole"] += 1

    async def keep_asking(self, stream: Stream) -> None:
        while not self.over:
            before = stream.whole
            await self.run_once(stream)
            if stream.whole == before:
                await asyncio.sleep(0.3)

    async def watch_health(self) -> None:
        """Ask /health four times a second, and hold it to what it says."""
        while not self.over:
            try:
                status, _ = await asyncio.wait_for(ask(self.server.port, "GET", "/health"), 5)
            except (OSError, TimeoutError, ValueError, IndexError):
                status = 0
            now = time.monotonic()
            if status == 200:
                self.healthy_since = self.healthy_since or now
                self.trouble_since = None
                lie = now - max(self.token_at, self.healthy_since)
                self.longest_lie = max(self.longest_lie, lie)
            else:
                self.healthy_since = None
                self.trouble_since = self.trouble_since or now
                self.longest_outage = max(self.longest_outage, now - self.trouble_since)
            await asyncio.sleep(0.25)

    # --- what happens

    async def recover(self) -> None:
        """Wait until /health says 200 again and tokens flow."""
        await asyncio.sleep(0.6)  # for /health to have been asked since
        begun, tokens = time.monotonic(), self.tokens
        while self.healthy_since is None or self.tokens < tokens + 20:
            if time.monotonic() - begun > QUIET + 130 * bool(self.api_cuts):  # gunicorn waits for a stopped one
                raise Broken(f"no recovery within {time.monotonic() - begun:.0f} s of {self.last}")
            await asyncio.sleep(0.1)

    def victim(self, kinds: tuple[str, ...] = ("worker", "engine", "api", "coordinator")) -> tuple[str, int] | None:
        family = self.server.family()
        weights = {"worker": 5, "engine": 3, "api": 2, "coordinator": 2}
        found = [(kind, pid) for kind in kinds for pid in family[kind] for _ in range(weights[kind])]
        return self.rng.choice(found) if found else None

    def hurt(self, kind: str, pid: int, number: signal.Signals) -> None:
        if kind == "api":
            self.api_cuts.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    async def death(self) -> None:
        """Any process dies."""
        number = self.rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
        if found := self.victim():
            if found[0] == "api" and number == signal.SIGTERM:  # which would drain it
                number = signal.SIGKILL
            self.last = f"{number.name} of the {found[0]}"
            self.hurt(*found, number)

    async def double_death(self) -> None:
        """Two processes die within 100 ms, or the same kind twice."""
        self.last = "two deaths within 100 ms"
        for _ in range(2):
            if found := self.victim():
                self.hurt(*found, signal.SIGKILL)
            await asyncio.sleep(self.rng.random() / 10)

    async def death_in_recovery(self) -> None:
        """A worker dies, and then, one to three times, whoever replaces it while it starts."""
        self.last = "deaths during a recovery"
        for _ in range(self.rng.randrange(2, 5)):
            if found := self.victim(("worker", "engine") if self.rng.random() < 0.3 else ("worker",)):
                self.hurt(*found, self.rng.choice([signal.SIGKILL, signal.SIGSEGV]))
            await asyncio.sleep(self.rng.uniform(0.08, 1.8))

    async def stop(self) -> None:
        """A process is stopped; perhaps it goes on after some seconds."""
        if found := self.victim():
            self.last = f"SIGSTOP of the {found[0]}"
            self.hurt(*found, signal.SIGSTOP)
            if found[0] == "api" or self.rng.random() < 0.5:
                await asyncio.sleep(self.rng.uniform(1, 8))
                self.hurt(*found, signal.SIGCONT)

    async def poison(self) -> None:
        """A request that kills each worker which runs it: it alone gets an error."""
        self.last = "poison"
        ids = DEADLY + [self.rng.randrange(100, 400) for _ in range(8)]
        body = json.dumps({"prompt": ids, "max_tokens": 20, "n": self.rng.choice([1, 4])}).encode()
        for _ in range(20):
            try:
                status, text = await asyncio.wait_for(ask(self.server.port, "POST", "/v1/completions", body), 120)
            except (OSError, ValueError, TimeoutError) as error:
                raise Broken(f"a poison request got no reply: {error!r}") from None
            if status == 200:
                raise Broken("a poison request was answered")
            if "has died" in text:
                self.counts["poison refused"] += 1
                return
            await asyncio.sleep(0.5)  # no engine at that moment
        raise Broken(f"a poison request was never refused: {text[:200]}")

    async def big_body(self) -> None:
        """Bodies of up to 31 MB, some of them cut off."""
        self.last = "big bodies"
        ids = b",".join(b"%d" % self.rng.randrange(300) for _ in range(1000))
        for _ in range(self.rng.randrange(1, 4)):
            body = b'{"prompt": [' + ids + (b"," + ids) * self.rng.randrange(10, 6000) + b"]}"
            if self.rng.random() < 0.3:
                body = body[: len(body) // 2]
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                status, text = await asyncio.wait_for(ask(self.server.port, "POST", "/v1/completions", body), 60)
                if status not in (400, 413, 429, 503):
                    raise Broken(f"a big body got {status}: {text[:200]}")

    async def slow_readers(self) -> None:
        """Clients that ask for streams and do not read, or go away."""
        self.last = "slow readers"
        body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 8}
        data, writers = json.dumps(body).encode(), []
        for _ in range(self.rng.randrange(1, 8)):
            with contextlib.suppress(OSError):
                writers.append((await connect(self.server.port, "POST", "/v1/completions", data))[1])
        await asyncio.sleep(self.rng.uniform(0, 4))
        for writer in writers:
            writer.transport.abort()

    async def nonsense(self) -> None:
        """Requests that are none."""
        self.last = "nonsense"
        for body in (b"{", b"[" * 10**6, b'{"prompt": [-1]}', b'{"prompt": "a", "temprature": 0}', b"\xff" * 1000):
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                status, text = await asyncio.wait_for(ask(self.server.port, "POST", "/v1/completions", body), 30)
                if status not in (400, 503):
                    raise Broken(f"nonsense got {status}: {text[:200]}")

    async def run(self, events: int, kinds: tuple[str, ...] = ()) -> None:
        """Let so many events happen, of all kinds or of these.

        Raises:
            Broken: a promise was not kept.
        """
        await self.until_up()
        await asyncio.gather(*(self.run_once(stream) for stream in self.streams))  # a quiet server, or one as before
        self.counts.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for stream in self.streams:
                    group.create_task(self.keep_asking(stream))
                group.create_task(self.watch_health())
                await self.events(events, kinds)
                self.over = True
        except ExceptionGroup as broken:
            raise broken.exceptions[0] from None
        if self.longest_lie > LIE:
            raise Broken(f"/health said 200 for {self.longest_lie:.1f} s in which no token came")

    async def until_up(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.server.process.poll() is None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                if (await ask(self.server.port, "GET", "/health"))[0] == 200:
                    return
            await asyncio.sleep(0.2)
        raise Broken(f"the server did not start: {self.server.log.read_text() if self.server.log.exists() else ''}")

    async def events(self, events: int, only: tuple[str, ...]) -> None:
        kinds: dict[Callable[[], Awaitable[None]], float] = {
            self.death: 6, self.double_death: 2, self.death_in_recovery: 2, self.stop: 3, self.poison: 1.5,
            self.big_body: 1, self.slow_readers: 1.5, self.nonsense: 1,
        }  # fmt: skip
        kinds = {kind: weight for kind, weight in kinds.items() if not only or kind.__name__ in only}
        for i in range(events):
            await asyncio.sleep(self.rng.uniform(0.2, 2))
            event = self.rng.choices(list(kinds), list(kinds.values()))[0]
            self.last, begun = event.__name__, time.monotonic()
            print(f"  {i + 1}: {self.last}", end="", file=sys.stderr, flush=True)
            await event()
            self.counts["event: " + event.__name__] += 1
            print(f", {self.last}", end="", file=sys.stderr, flush=True)
            await self.recover()
            print(f", {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        wholes = [stream.whole for stream in self.streams]
        deadline = time.monotonic() + HUNG
        while any(stream.whole == whole for stream, whole in zip(self.streams, wholes, strict=True)):
            if time.monotonic() > deadline:
                raise Broken("after the storm not every stream came whole once more")
            await asyncio.sleep(0.2)


async def lines(reader: asyncio.StreamReader, stream: Stream) -> Any:
    """The lines of a reply; a stream that stays silent for HUNG seconds is lost."""
    while True:
        try:
            line = await asyncio.wait_for(reader.readline(), HUNG)
        except TimeoutError:
            raise Broken(f"stream {stream.number} hung: nothing came for {HUNG:.0f} s") from None
        if not line:
            return
        yield line.strip()


def settle(disputes: list[tuple[Stream, int, str]]) -> None:
    """See whether the model gives each of these texts when its stream is resumed somewhere before it differs.

    Raises:
        Broken: it does not.
    """
    llm = LLM(DEMO, dtype="float32", device="cpu", threads=1)
    known: set[str] = set()  # texts that it has given
    for stream, index, text in disputes:
        if any(other.startswith(text) for other in known):
            continue
        fields = json.loads(stream.body)
        del fields["stream"], fields["n"]
        fields["seed"] = derived_seed(fields["seed"], str(index)) if index else fields["seed"]
        prompt, most = llm.tokenizer.encode(fields.pop("prompt")), fields.pop("max_tokens")

        def resume(begins: list[list[int]], prompt=prompt, fields=fields, most=most) -> list[list[int]]:
            params = [SamplingParams(**fields, max_tokens=most - len(begin)) for begin in begins]
            outputs = llm.generate([prompt + begin for begin in begins], params, use_tqdm=False)
            wholes = [begin + output.outputs[0].token_ids for begin, output in zip(begins, outputs, strict=True)]
            known.update(map(llm.tokenizer.decode, wholes))
            return wholes

        tokens = resume([[]])[0]
        same = len(os.path.commonprefix([text, stream.expected[index]]))  # noqa: RUF071 (this is what it is for)
        place = next((i for i in range(len(tokens)) if len(llm.tokenizer.decode(tokens[:i])) > same), len(tokens) - 1)
        begins = [tokens[:i] for i in range(max(0, place - 64), place + 1)]
        for size in (len(begins), 5, 1):  # how many are resumed together
            for i in range(0, len(begins), size):
                if not any(other.startswith(text) for other in known):
                    resume(begins[i : i + size])
        if not any(other.startswith(text) for other in known):
            raise Broken(f"stream {stream.number} is {text!r}; it should be {stream.expected[index]!r}")


def blow(
    world: World, streams: list[Stream], events: int, seed: int, folder: Path, kinds: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A storm in one world; returns its figures.

    Raises:
        Broken: a promise was not kept.
    """
    server = Server(world, folder)
    storm, begun = Storm(server, streams, seed), time.monotonic()
    try:
        asyncio.run(storm.run(events, kinds))
        server.family()
        server.process.terminate()
        if (code := server.process.wait(60)) != 0:
            raise Broken(f"the server ended with {code}")
        server.assert_gone()
        settle(storm.disputes)
    finally:
        server.family()
        if server.process.poll() is None:
            server.process.kill()
    return {
        "world": world.name, "seconds": round(time.monotonic() - begun), "tokens": storm.tokens,
        "texts that differ by rounding": len(storm.disputes),
        "longest 200 without a token": round(storm.longest_lie, 1), "longest outage": round(storm.longest_outage, 1),
        **dict(sorted(storm.counts.items())),
    }  # fmt: skip


def run(
    events: int,
    num_streams: int,
    seed: int,
    folder: Path,
    worlds: tuple[World, ...] = WORLDS,
    kinds: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """The storm in all worlds; returns the figures of each."""
    streams = [make_stream(number, seed) for number in range(num_streams)]
    return [blow(world, streams, max(1, round(events * world.share)), seed, folder, kinds) for world in worlds]


@pytest.mark.long
def test_the_storm(tmp_path: Path) -> None:
    run(200, 200, 0, tmp_path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", action="append", choices=[world.name for world in WORLDS])
    parser.add_argument("--kind", action="append", default=[], help="of event, by the name of the method of Storm")
    flags = parser.parse_args()
    chosen = tuple(world for world in WORLDS if not flags.world or world.name in flags.world)
    with tempfile.TemporaryDirectory(prefix="storm-") as logs:
        try:
            for figures in run(flags.events, flags.streams, flags.seed, Path(logs), chosen, tuple(flags.kind)):
                print(json.dumps(figures, indent=1))
        except BaseException:
            for log in Path(logs).iterdir():
                print(f"--- {log.name}\n{log.read_text()[-6000:]}", file=sys.stderr)
            raise
