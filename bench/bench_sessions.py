"""The benchmark of paused sessions for `bench.py`: agents whose prompts grow, on a pool that holds a part of them.

While a session's tool runs, other sessions need the pool's blocks. A turn whose blocks are gone is computed again,
unless a lower tier has kept them. llama.cpp's server has slots instead of a pool. Its client saves a slot to disk after
each turn, and restores it before the next one, as its users do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench_serve import Server, percentile, running, serving
from config import VERSION
from model_config import ModelConfig

Figures = list[dict[str, Any]]
Send = Callable[[int, list[int]], Coroutine[Any, Any, tuple[float, int]]]  # seconds to the first token; cached tokens

FIRST, RESULT = (600, 1000), (100, 400)  # tokens of a session's first prompt, and of each tool's result


@dataclass
class Session:
    """An agent's session: the tokens that each turn adds to its prompt, and the seconds before it."""

    added: list[list[int]]
    pauses: list[float]


@dataclass
class Totals:
    """What all turns of a run have brought."""

    waits: list[float] = field(default_factory=list)  # milliseconds to the first token
    prompt_tokens: int = 0
    again: int = 0  # tokens that an earlier turn of the session has had, and this one computes again


def draw_sessions(count: int, turns: int, new_tokens: int, pauses: tuple[float, float], vocab: int) -> list[Session]:
    """The same sessions in every call. The answer before a turn is drawn, too, so that all engines have one prompt."""
    rng, sessions = random.Random(0), []
    for _ in range(count):
        sizes = [rng.randint(*FIRST), *(new_tokens + rng.randint(*RESULT) for _ in range(turns - 1))]
        added = [[rng.randrange(5, vocab) for _ in range(size)] for size in sizes]
        sessions.append(Session(added, [rng.uniform(*pauses) for _ in sizes]))
    return sessions


async def run_session(number: int, session: Session, send: Send, totals: Totals) -> None:
    """Go through a session's turns."""
    prompt: list[int] = []
    for added, pause in zip(session.added, session.pauses, strict=True):
        await asyncio.sleep(pause)
        before = len(prompt)
        prompt = prompt + added
        wait, cached = await send(number, prompt)
        totals.waits.append(1e3 * wait)
        totals.prompt_tokens += len(prompt)
        totals.again += max(0, before - cached)


async def post(port: int, path: str, fields: dict[str, Any]) -> tuple[float, list[Any]]:
    """Send a request; returns the seconds to the first line of data, or the end, and all lines of data.

    Raises:
        RuntimeError: the status is not 200.
    """
    content, begun, first, lines = json.dumps(fields).encode(), time.perf_counter(), 0.0, []
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}"
    writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + content)
    with contextlib.closing(writer):
        status = line = await reader.readline()
        async for line in reader:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                lines.append(json.loads(line[6:]))
    if b" 200 " not in status:
        raise RuntimeError(f"{path} is answered with {status!r}, {line!r:.500}")
    return first or time.perf_counter() - begun, lines


async def send_to_manta(port: int, new_tokens: int, number: int, prompt: list[int]) -> tuple[float, int]:
    """A turn on Manta's server. The salt marks the session's blocks as ones that come back."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": f"session {number}"}
    fields = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True} | options
    wait, lines = await post(port, "/v1/completions", fields)
    return wait, lines[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


class LlamaClient:
    """A client of llama.cpp's server that keeps each session's slot in a file while the slot serves others."""

    def __init__(self, port: int, slots: int, new_tokens: int):
        self.port, self.new_tokens = port, new_tokens
        self.free, self.holder = asyncio.Queue[int](), dict[int, int]()  # slots; and which session each holds
        self.saved = set[int]()
        for slot in range(slots):
            self.free.put_nowait(slot)

    async def send(self, number: int, prompt: list[int]) -> tuple[float, int]:
        """A turn of a session."""
        begun, slot = time.perf_counter(), await self.free.get()
        if self.holder.get(slot) != number and number in self.saved:
            await post(self.port, f"/slots/{slot}?action=restore", {"filename": f"{number}.bin"})
        before = time.perf_counter() - begun
        options = {"stream": True, "cache_prompt": True, "id_slot": slot, "ignore_eos": True, "temperature": 0}
        fields = {"prompt": prompt, "n_predict": self.new_tokens, "return_tokens": True} | options
        wait, lines = await post(self.port, "/completion", fields)
        await post(self.port, f"/slots/{slot}?action=save", {"filename": f"{number}.bin"})
        self.holder[slot] = number
        self.saved.add(number)
        self.free.put_nowait(slot)
        return before + wait, len(prompt) - lines[-1]["timings"]["prompt_n"]


@contextlib.contextmanager
def serving_llama(binary: str, gguf: str, slots: int, tokens: int, threads: int, folder: str) -> Iterator[Server]:
    """Run llama.cpp's server with slots of so many tokens in all."""
    command = [binary, "-m", gguf, "-c", str(tokens), "-np", str(slots), "-t", str(threads), "--port", "0"]
    command += ["--slot-save-path", folder, "--no-webui", "--host", "127.0.0.1"]

    def find_port(log: str) -> int | None:
        address = re.search(r"listening on http://127\.0\.0\.1:(\d+)", log)
        return int(address[1]) if address else None

    with running("llama-server", command, find_port, Path(folder)) as server:
        yield server


def play(sessions: list[Session], send: Send) -> tuple[float, Totals]:
    """Run all sessions at once; returns the seconds that it took, and the totals."""
    totals, begun = Totals(), time.perf_counter()

    async def run() -> None:
        await asyncio.gather(*(run_session(i, session, send, totals) for i, session in enumerate(sessions)))

    asyncio.run(run())
    return time.perf_counter() - begun, totals


def session_figures(
    model: str,
    sessions: int,
    turns: int,
    new_tokens: int,
    pauses: list[float],
    share: float,
    tiers: list[str],
    repeats: int,
    threads: int,
    options: Sequence[str] = (),
    llama: str = "",
    gguf: str = "",
) -> Figures:
    """Tokens computed again and times to the first token of paused sessions, by the tiers behind the device's pool.

    Args:
        model: the folder to serve.
        sessions, turns, new_tokens: how many sessions, turns of each, and tokens of each answer.
        pauses: the shortest and the longest pause before a turn, in seconds.
        share: of the blocks that all sessions have at their ends: so many has the device's pool.
        tiers: further options of Manta's server for each run, {folder} is a new folder: "", "--swap-space 1".
        repeats: turns of all runs.
        threads: of llama.cpp's server.
        options: of Manta's server, in all runs.
        llama, gguf: the program llama-server and its file of the model. It gets as many tokens as the pool has, in as
            many slots as the longest session allows.
    """
    vocab = ModelConfig.from_folder(model).vocab_size
    work = draw_sessions(sessions, turns, new_tokens, (pauses[0], pauses[1]), vocab)
    needed = sum(len(tokens) for session in work for tokens in session.added)
    longest = max(sum(map(len, session.added)) for session in work) + 128
    blocks = max(int(share * needed), longest) // 16
    slots = 16 * blocks // longest
    results: dict[str, list[tuple[float, Totals]]] = {}

    for _ in range(repeats):
        for tier in tiers:
            with tempfile.TemporaryDirectory() as folder:
                words = [*options, *shlex.split(tier.format(folder=folder))]
                words += ["--num-gpu-blocks-override", str(blocks), "--block-size", "16"]
                with serving(model, words) as server:
                    run = play(work, partial(send_to_manta, server.port, new_tokens))
                    results.setdefault(f"Manta {VERSION} {tier}".strip(), []).append(run)
        if llama:
            with (
                tempfile.TemporaryDirectory() as folder,
                serving_llama(llama, gguf, slots, blocks * 16, threads, folder) as server,
            ):
                send = LlamaClient(server.port, slots, new_tokens).send
                results.setdefault("llama.cpp", []).append(play(work, send))
    figures = []
    for name, runs in results.items():
        waits = [wait for _, totals in runs for wait in totals.waits]
        figures.append({
            "engine": name, "sessions": sessions, "turns": turns, "tokens at the end": needed, "pool": blocks * 16,
            "seconds": round(statistics.median(seconds for seconds, _ in runs), 1),
            "prompt tokens": runs[0][1].prompt_tokens,
            "computed again": round(statistics.median(totals.again for _, totals in runs)),
            "first token p50 ms": percentile(waits, 0.5), "p90": percentile(waits, 0.9), "p99": percentile(waits, 0.99),
        })  # fmt: skip
    return figures
