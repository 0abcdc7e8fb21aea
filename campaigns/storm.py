"""A storm: seeded streams run while random things happen to the server, and each stream must keep its word.

    python campaigns/storm.py --events 200 --streams 200 --seed 1       prints what happened, in JSON
    python -m pytest campaigns/storm.py -m long                         the same as a test

Each stream is asked for again and again until the events are over. Its text must be the one that a quiet server gave,
or the beginning of that with a documented error after it: its engine process or its API process has ended, or the
server said 503. While any stream runs, `/health` may not say 200 for longer than LIE seconds in which no token comes.
At the end every stream is whole once more, the server ends with 0 by SIGTERM, and nothing is left behind.

A row's logits depend in their last bits on what is computed with it, and once in some hundred thousand tokens that
turns another one up. So a text that differs is not broken if the model gives it, too, when the stream is resumed from a
prefix of its tokens, alone or in a batch (`settle`). Wrong keys and values give texts that no such run does.

What harms is among them: grammars that nobody can compile, connections that say nothing, compiled libraries that are
not as they were written. Whoever sends such a grammar gets a 400 that says what is wrong, within `hostile.LONGEST`.

The same storm blows in several worlds: one engine with compiled C++, one with adapters, drafts and int8 weights,
diagnostics on a full disk, two engines with a coordinator, and two hosts with a gate between them. They share a cache
for what is compiled, which is the storm's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import hostile
from config import DEMO
from cpu.compiled import folder as compiled_folder
from engine import LLM, SamplingParams
from sampling_params import LoRARequest
from sequence import derived_seed
from storm_worlds import INT8, WORLDS, Broken, Server, World, adapters, limit

VICTIMS = {"worker": 5, "engine": 3, "api": 2, "coordinator": 2, "gate": 2}  # and how often it hits them
DEADLY = [13, 11, 7, 5, 3, 2]  # as in poison/sitecustomize.py
LIE = 5.0  # seconds that /health may say 200 while no token comes
HUNG = 90.0  # seconds without a token, an error or an end, after which a stream counts as lost
QUIET = 60.0  # seconds that the server has to recover before the next event
COMPILING = 300.0  # seconds that it has if C++ must be compiled meanwhile
DOCUMENTED = (
    "the engine process has ended",
    "gives no sign of life",
    "no engine",
    "the server is shutting down",
    "rank 0 ",  # at the door, while workers are started anew: died, stopped, makes no progress
)
SAYS_WHY = ("too deep", "takes more than", "took more than", "the prompt is too long")  # what is wrong with a grammar


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


def make_stream(number: int, seed: int, world: World) -> Stream:
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
    if world.adapters and number % 4:
        body["model"] = "abc"[number % 4 - 1]
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
            if not any(words in error for words in DOCUMENTED):
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

    async def recover(self, most: float = QUIET) -> None:
        """Wait until /health says 200 again and tokens flow, at most so many seconds."""
        await asyncio.sleep(0.6)  # for /health to have been asked since
        begun, tokens = time.monotonic(), self.tokens
        while self.healthy_since is None or self.tokens < tokens + 20:
            if time.monotonic() - begun > most + 130 * bool(self.api_cuts):  # gunicorn waits for a stopped one
                raise Broken(f"no recovery within {time.monotonic() - begun:.0f} s of {self.last}")
            await asyncio.sleep(0.1)

    def victim(self, kinds: tuple[str, ...] = tuple(VICTIMS)) -> tuple[str, int] | None:
        family = self.server.family()
        weighted = [(kind, pid) for kind in kinds for pid in family[kind] for _ in range(VICTIMS[kind])]
        return self.rng.choice(weighted) if weighted else None

    def hurt(self, kind: str, pid: int, number: signal.Signals) -> None:
        if kind == "api":
            self.api_cuts.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    async def death(self) -> None:
        """Any process dies."""
        number = self.rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
        if victim := self.victim():
            if victim[0] == "api" and number == signal.SIGTERM:  # which would drain it
                number = signal.SIGKILL
            self.last = f"{number.name} of the {victim[0]}"
            self.hurt(*victim, number)

    async def double_death(self) -> None:
        """Two processes die within 100 ms, or the same kind twice."""
        self.last = "two deaths within 100 ms"
        for _ in range(2):
            if victim := self.victim():
                self.hurt(*victim, signal.SIGKILL)
            await asyncio.sleep(self.rng.random() / 10)

    async def death_in_recovery(self) -> None:
        """A worker dies, and then, one to three times, whoever replaces it while it starts."""
        self.last = "deaths during a recovery"
        for _ in range(self.rng.randrange(2, 5)):
            if victim := self.victim(("worker", "engine") if self.rng.random() < 0.3 else ("worker",)):
                self.hurt(*victim, self.rng.choice([signal.SIGKILL, signal.SIGSEGV]))
            await asyncio.sleep(self.rng.uniform(0.08, 1.8))

    async def stop(self) -> None:
        """A process is stopped; perhaps it goes on after some seconds."""
        if victim := self.victim():
            self.last = f"SIGSTOP of the {victim[0]}"
            self.hurt(*victim, signal.SIGSTOP)
            if victim[0] == "api" or self.rng.random() < 0.5:
                await asyncio.sleep(self.rng.uniform(1, 8))
                self.hurt(*victim, signal.SIGCONT)

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

    async def harmful(self) -> None:
        """Three grammars that would harm whoever compiles them, by any of the fields that take one."""
        grammars = hostile.harmful(f"n{self.rng.getrandbits(60)}")
        chosen = self.rng.sample(sorted(grammars), 3)
        self.last = "grammars: " + ", ".join(chosen)
        await asyncio.gather(*(self.be_refused(what, *grammars[what]) for what in chosen))

    async def be_refused(self, what: str, path: str, body: dict[str, Any]) -> None:
        """Send a grammar until it is refused for what is wrong with it; large ones may be answered.

        Raises:
            Broken: it is answered otherwise, or too late.
        """
        data = json.dumps(body).encode()
        for _ in range(20):
            try:
                status, text = await asyncio.wait_for(ask(self.server.port, "POST", path, data), hostile.LONGEST)
            except TimeoutError:
                raise Broken(f"{what} got no reply within {hostile.LONGEST:.0f} s") from None
            except (OSError, ValueError) as error:
                if not any(time.monotonic() - at < 200 for at in self.api_cuts):
                    raise Broken(f"{what} got no reply: {error!r}") from None
                status, text = 503, ""
            if status == 400 and any(words in text for words in SAYS_WHY):
                self.counts["grammars refused"] += 1
                return
            if status == 200 and what.startswith("properties"):
                self.counts["grammars answered"] += 1
                return
            if status != 503 or (text and not any(words in text for words in DOCUMENTED)):
                raise Broken(f"{what} got {status}: {text[:300]}")
            await asyncio.sleep(0.5)  # no engine at that moment
        raise Broken(f"{what} was never refused: {text[:300]}")

    async def silent(self) -> None:
        """Connections that say nothing take all descriptors, of API processes and of the gate, and others come in."""
        self.last = "silent connections"
        with contextlib.ExitStack() as stack:
            for pid in self.server.family()["api"]:
                with contextlib.suppress(OSError):
                    stack.callback(limit, pid, resource.prlimit(pid, resource.RLIMIT_NOFILE)[0])
                    limit(pid, len(os.listdir(f"/proc/{pid}/fd")) + 60)
            for port in [self.server.port, self.server.gate] * 150:
                if port:
                    with contextlib.suppress(OSError):  # the gate hangs up on the one before
                        stack.callback((await asyncio.open_connection("127.0.0.1", port))[1].close)
            if self.rng.random() < 0.7 and (victim := self.victim(("worker", "engine", "gate"))):
                self.last += f", and the {victim[0]} is killed"
                self.hurt(*victim, signal.SIGKILL)
            await self.recover()

    async def broken_library(self) -> None:
        """A library of compiled C++ is not as it was written: the next worker makes it again."""
        library = self.rng.choice(sorted(compiled_folder().glob("*.so")))
        data = bytearray(library.read_bytes())
        if self.rng.random() < 0.5:
            del data[self.rng.randrange(len(data)) :]
        else:
            data[self.rng.randrange(len(data))] ^= 255
        self.last = f"a library of {len(data)} bytes that is broken"
        broken = library.with_suffix(".broken")
        broken.write_bytes(data)
        broken.chmod(0o600)
        broken.replace(library)  # the worker that runs has the old file
        if victim := self.victim(("worker",)):
            self.hurt(*victim, signal.SIGKILL)
        await self.recover(COMPILING)
        for path in compiled_folder().glob(f"{library.stem.rpartition('-')[0]}-*.so"):
            if hashlib.sha256(path.read_bytes()).hexdigest() != path.stem.rpartition("-")[2]:
                raise Broken(f"a worker runs, and {path} is not as it was written")

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
        deadline = time.monotonic() + COMPILING
        while time.monotonic() < deadline and self.server.process.poll() is None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                if (await ask(self.server.port, "GET", "/health"))[0] == 200:
                    return
            await asyncio.sleep(0.2)
        raise Broken(f"the server did not start: {self.server.log.read_text() if self.server.log.exists() else ''}")

    async def events(self, events: int, only: tuple[str, ...]) -> None:
        kinds: dict[Callable[[], Awaitable[None]], float] = {
            self.death: 6, self.double_death: 2, self.death_in_recovery: 2, self.stop: 3, self.poison: 1.5,
            self.big_body: 1, self.slow_readers: 1.5, self.nonsense: 1, self.harmful: 3, self.silent: 2,
            self.broken_library: 3 * self.server.world.compiles,
        }  # fmt: skip
        kinds = {kind: n for kind, n in kinds.items() if n and (not only or kind.__name__ in only)}
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


def settle(disputes: list[tuple[Stream, int, str]], world: World, folder: Path) -> None:
    """See whether the model gives each of these texts when its stream is resumed somewhere before it differs.

    Raises:
        Broken: it does not.
    """
    options: dict[str, Any] = {"quantization": INT8, "enable_lora": True} if world.adapters else {}
    llm = LLM(DEMO, dtype="float32", device="cpu", threads=1, compile=world.compiles, **options)
    paths = adapters(folder) if world.adapters else {}
    requests = {name: LoRARequest(name, i + 1, str(paths[name])) for i, name in enumerate(paths)}
    written: set[str] = set()  # texts that it has given
    for stream, index, text in disputes:
        if any(other.startswith(text) for other in written):
            continue
        fields = json.loads(stream.body)
        del fields["stream"], fields["n"]
        fields["seed"] = derived_seed(fields["seed"], str(index)) if index else fields["seed"]
        prompt, most = llm.tokenizer.encode(fields.pop("prompt")), fields.pop("max_tokens")
        adapter = requests.get(fields.pop("model", ""))

        def resume(
            begins: list[list[int]], prompt=prompt, fields=fields, most=most, adapter=adapter
        ) -> list[list[int]]:
            params = [SamplingParams(**fields, max_tokens=most - len(begin)) for begin in begins]
            outputs = llm.generate([prompt + b for b in begins], params, use_tqdm=False, lora_request=adapter)
            wholes = [begin + output.outputs[0].token_ids for begin, output in zip(begins, outputs, strict=True)]
            written.update(map(llm.tokenizer.decode, wholes))
            return wholes

        tokens = resume([[]])[0]
        same = len(os.path.commonprefix([text, stream.expected[index]]))  # noqa: RUF071 (this is what it is for)
        place = next((i for i in range(len(tokens)) if len(llm.tokenizer.decode(tokens[:i])) > same), len(tokens) - 1)
        begins = [tokens[:i] for i in range(max(0, place - 64), place + 1)]
        for size in (len(begins), 5, 1):  # how many are resumed together
            for i in range(0, len(begins), size):
                if not any(other.startswith(text) for other in written):
                    resume(begins[i : i + size])
        if not any(other.startswith(text) for other in written):
            raise Broken(f"stream {stream.number} is {text!r}; it should be {stream.expected[index]!r}")


def blow(
    world: World, num_streams: int, events: int, seed: int, folder: Path, kinds: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A storm in one world; returns its figures.

    Raises:
        Broken: a promise was not kept.
    """
    server = Server(world, folder)
    streams = [make_stream(number, seed, world) for number in range(num_streams)]
    storm, begun = Storm(server, streams, seed), time.monotonic()
    try:
        asyncio.run(storm.run(events, kinds))
        server.end()
        server.assert_gone()
        settle(storm.disputes, world, folder)
    finally:
        server.kill()
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
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")):
        return [blow(world, num_streams, max(1, round(events * world.share)), seed, folder, kinds) for world in worlds]


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
            for log in Path(logs).glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-6000:]}", file=sys.stderr)
            raise
