"""The HTTP server's benchmarks for `bench.py`: streams against `generate`, a replayed trace, and the start.

They start `server.py` themselves and speak to it through plain sockets, because an HTTP library would use more of the
machine than the server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import math
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from config import VERSION
from model_config import ModelConfig
from sampling_params import SamplingParams
from turns import in_turns, median_ratio, seconds_of, spread

Figures = list[dict[str, Any]]
Peers = Sequence[tuple[str, str]]  # other servers: the name and the Python of each

ROOT = Path(__file__).parent.parent  # has server.py
POLL = 0.01  # seconds between looks at a server that starts
PROMPTS, OUTPUTS = (1020, 0.99), (129, 0.86)  # median and log-sigma of lengths in Azure's trace of 2023
STREAM = {"stream": True, "stream_options": {"include_usage": True}}  # an event may hold several tokens
TEXT = re.compile(rb'"text": ?"[^"]')  # in an event that shows something; vLLM also sends one where it shows nothing


class Server(NamedTuple):
    """A server that listens: its port, the file that its log goes to, and its process."""

    port: int
    log: Path
    pid: int


@contextlib.contextmanager
def serving(model: str, options: Sequence[str] = ()) -> Iterator[Server]:
    """Run `server.py` on `model` in a process of its own. The context begins when it listens, and ends it.

    Raises:
        RuntimeError: the server ended before it listened; the message has its log.
    """
    command = [sys.executable, "server.py", "--model", str(Path(model).resolve()), "--port", "0", *options]

    def find_port(log: str) -> int | None:
        address = re.search(r"http://127\.0\.0\.1:(\d+)\n", log)
        return int(address[1]) if address else None

    with running("server.py", command, find_port, ROOT) as server:
        yield server


@contextlib.contextmanager
def serving_vllm(model: str, python: str, max_model_len: int, options: Sequence[str] = ()) -> Iterator[Server]:
    """Run vLLM's own server, with its defaults where `options` do not say otherwise.

    The context begins when it is healthy; raises as `serving` does.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(model).resolve())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len), *options]

    def find_port(log: str) -> int | None:
        with contextlib.suppress(OSError, HTTPException), contextlib.closing(HTTPConnection("127.0.0.1", port)) as peer:
            peer.request("GET", "/health")
            return port if peer.getresponse().status == 200 else None
        return None

    elsewhere = Path(tempfile.gettempdir())  # transformers would import our kernels.py, see peers.py
    with running("vllm", command, find_port, elsewhere) as server:
        yield server


@contextlib.contextmanager
def running(name: str, command: list[str], find_port: Callable[[str], int | None], folder: Path) -> Iterator[Server]:
    """Run a server in a process of its own. The context begins when `find_port`, given the log, finds the port."""
    with tempfile.NamedTemporaryFile() as log:
        server = subprocess.Popen(command, cwd=folder, stderr=log)
        path = Path(log.name)
        try:
            while (port := find_port(path.read_text())) is None:
                if server.poll() is not None:
                    raise RuntimeError(f"{name} ended with status {server.returncode}: {path.read_text()}")
                time.sleep(POLL)
            yield Server(port, path, server.pid)
        finally:
            server.terminate()
            server.wait()


def get(port: int, path: str) -> tuple[int, Any]:
    """Send a GET; returns the status and the JSON."""
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.load(response)


async def post(port: int, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send this JSON as a request for a completion. The caller reads the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}"
    writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + content)
    return reader, writer


# --- streams ----------------------------------------------------------------------------------------------------------


def streams_figures(
    model: str,
    streams: list[int],
    new_tokens: int,
    repeats: int,
    options: Sequence[str] = (),
    peers: Peers = (),
    peer_options: Sequence[str] = (),
) -> Figures:
    """Output tokens a second of concurrent HTTP streams, and of `LLM.generate` on the same prompts, taking turns.

    A gap is the time between two events of a stream. "of generate" is the median of the turns' ratios.

    Args:
        model: the folder to serve.
        streams: how many at once.
        new_tokens: tokens of each.
        repeats: turns.
        options: further words of the command line of Manta's server.
        peers: names (vllm), and Pythons that have it; the server of each then gets the same requests in each turn.
        peer_options: further words of the command line of vLLM's server.
    """
    from engine import LLM

    llm, figures, generate = LLM(model), [], "LLM.generate"
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(model, options)).port
        servers, limit = {f"Manta {VERSION}": port}, context_of(port)
        for _, python in peers:
            port = stack.enter_context(serving_vllm(model, python, limit, peer_options)).port
            servers[f"vllm {get(port, '/version')[1]['version']}"] = port
        for count in streams:

            def measure(port: int | None, turn: int, count: int = count) -> tuple[float, list[Reply]]:
                prompts = [f"What is {turn * count + i} + {i}?" for i in range(count)]
                if port is None:
                    return seconds_of(llm.generate, prompts, params, use_tqdm=False), []
                begun = time.perf_counter()
                replies = asyncio.run(read_streams(port, prompts, new_tokens))
                return time.perf_counter() - begun, replies

            runs = {engine: partial(measure, port) for engine, port in ({generate: None} | servers).items()}
            turns = in_turns(runs, repeats)
            reference = [taken for taken, _ in turns[generate]]
            for engine, results in turns.items():
                rates = [count * new_tokens / taken for taken, _ in results]
                times = [reply.times for _, replies in results for reply in replies]
                gaps = [1e3 * (b - a) for events in times for a, b in pairwise(events)]
                figures.append({
                    "engine": engine, "concurrent": count, "new tokens": new_tokens,
                    "tok/s": round(statistics.median(rates)), **spread(rates),
                    "of generate": median_ratio(reference, [taken for taken, _ in results]),
                    "gap p50 ms": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99),
                })  # fmt: skip
    return figures


async def read_streams(port: int, prompts: list[str], new_tokens: int) -> list[Reply]:
    """Stream a completion of each of `prompts` at once, and read all of them to their ends.

    Raises:
        RuntimeError: a stream failed, or has another number of tokens.
    """
    fields = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True} | STREAM
    contents = [json.dumps({"prompt": prompt} | fields).encode() for prompt in prompts]
    begun = time.perf_counter()
    replies = await asyncio.gather(*(read_events(port, content, begun) for content in contents))
    for reply in replies:
        if reply.error or reply.tokens != new_tokens:
            raise RuntimeError(f"a stream of {new_tokens} tokens ended with {reply.tokens}: {reply.error}")
    return replies


def viewers_figures(model: str, streams: int, viewers: int, new_tokens: int, repeats: int) -> Figures:
    """Output tokens a second of concurrent HTTP streams while so many watch `/live`, and while nobody does."""
    fewest = math.inf  # events that a viewer had while the streams ran
    with serving(model) as server:

        def rate(watching: int, turn: int) -> float:
            nonlocal fewest
            prompts = [f"What is {turn * streams + i} + {i}?" for i in range(streams)]
            seconds, events = asyncio.run(read_watched(server.port, watching, prompts, new_tokens))
            fewest = min(fewest, *events) if events else fewest
            return streams * new_tokens / seconds

        rates = in_turns({watching: partial(rate, watching) for watching in (0, viewers)}, repeats)
    alone, watched = (statistics.median(rates[watching]) for watching in (0, viewers))
    return [{
        "concurrent": streams, "new tokens": new_tokens, "viewers": viewers, "fewest events": fewest,
        "tok/s": round(alone), **spread(rates[0]), "tok/s watched": round(watched),
        **{f"{name} watched": value for name, value in spread(rates[viewers]).items()},
        "lost": round(1 - watched / alone, 3),
    }]  # fmt: skip


async def read_watched(port: int, viewers: int, prompts: list[str], new_tokens: int) -> tuple[float, list[int]]:
    """The seconds that `read_streams` takes while so many watch `/live`, and how many events each of them had."""
    events = [0] * viewers

    async def watch(i: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with contextlib.closing(writer):
            while line := await reader.readline():
                events[i] += line.startswith(b"data:")

    watchers = [asyncio.create_task(watch(i)) for i in range(viewers)]
    while not all(events):  # until each has its first
        await asyncio.sleep(POLL)
        if any(watcher.done() for watcher in watchers):
            raise RuntimeError("a stream of /live ended early")
    before, begun = list(events), time.perf_counter()
    await read_streams(port, prompts, new_tokens)
    seconds = time.perf_counter() - begun
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    return seconds, [now - first for now, first in zip(events, before, strict=True)]


# --- a trace, replayed ------------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """A request of a trace: the seconds from the first request to this one, and its lengths in tokens."""

    at: float
    prompt: int
    output: int


def read_trace(path: Path, requests: int | None = None) -> list[Arrival]:
    """The first `requests`, or all, of a trace with Azure's columns TIMESTAMP, ContextTokens and GeneratedTokens.

    Raises:
        ValueError: the trace is shorter, or has other columns.
    """
    arrivals: list[tuple[datetime, int, int]] = []
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            if len(arrivals) == requests:
                break
            try:
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                arrivals.append((datetime.fromisoformat(row["TIMESTAMP"]), *lengths))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error!r}; a line is TIMESTAMP,ContextTokens,GeneratedTokens"
                ) from None
    if len(arrivals) < (requests or 1):
        raise ValueError(f"requests is {requests}; {path} has {len(arrivals)}")
    arrivals.sort()
    begin = arrivals[0][0]
    return [Arrival((at - begin).total_seconds(), prompt, output) for at, prompt, output in arrivals]


def poisson(requests: int, rate: float) -> list[Arrival]:
    """Arrivals of a Poisson process of `rate` requests a second with log-normal lengths; every call draws the same."""
    rng, at, work = random.Random(0), 0.0, []

    def length(median: float, sigma: float) -> int:
        return round(rng.lognormvariate(math.log(median), sigma))

    for _ in range(requests):
        work.append(Arrival(at, length(*PROMPTS), length(*OUTPUTS)))
        at += rng.expovariate(rate)
    return work


def rescale(work: list[Arrival], rate: float) -> list[Arrival]:
    """Stretch the gaps between arrivals so that their mean is that of `rate` requests a second."""
    span = work[-1].at
    stretch = (len(work) - 1) / (rate * span) if span else 0.0
    return [arrival._replace(at=arrival.at * stretch) for arrival in work]


def fit(work: list[Arrival], scale: float, limit: int) -> tuple[list[Arrival], int]:
    """Multiply lengths by `scale` and cut what a context of `limit` tokens cannot hold.

    An output is cut to half of the context, then its prompt to what is left.

    Returns:
        The requests, and how many of them were cut.
    """
    fitted, cut = [], 0
    for at, *lengths in work:
        prompt, output = (max(1, round(scale * length)) for length in lengths)
        arrival = Arrival(at, min(prompt, limit - min(output, limit // 2)), min(output, limit // 2))
        cut += arrival[1:] != (prompt, output)
        fitted.append(arrival)
    return fitted, cut


@dataclass
class Reply:
    """The outcome of a request.

    Attributes:
        times: when each event with text came, in seconds after the request was due; an event has one or more tokens. Of
            an answer without text it is when that ended.
        tokens: length of the output, as the server counts it.
        error: how the request failed; empty if it did not.
    """

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token, in ms."""
        return 1e3 * self.times[0]

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in ms; 0 where there is none."""
        return 1e3 * (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


async def read_events(port: int, content: bytes, arrival: float) -> Reply:
    """Send a request that was due at `arrival`, and note when each event of its stream comes."""
    reply, shown, last, before = Reply(), b"", b"", b""
    try:
        reader, writer = await post(port, content)
        status = await reader.readline()
        with contextlib.closing(writer):
            async for line in reader:
                shown = line.strip() or shown
                if line.startswith(b"data: "):
                    if TEXT.search(line):
                        reply.times.append(time.perf_counter() - arrival)
                    before, last = last, line
    except (OSError, ValueError) as error:  # ValueError: a line longer than asyncio's buffer
        return Reply(error=repr(error))
    usage = json.loads(before[6:]) if last.startswith(b"data: [DONE]") else {}
    if not usage.get("usage"):
        return Reply(error=f"{status!r} and at the end {before or shown!r}")
    reply.times = reply.times or [time.perf_counter() - arrival]
    reply.tokens = usage["usage"]["completion_tokens"]
    return reply


async def replay(port: int, work: list[Arrival], contents: list[bytes]) -> list[Reply]:
    """Send each request when it is due, however many are still unanswered; a short reply is an error."""
    begun, tasks = time.perf_counter(), []
    for arrival, content in zip(work, contents, strict=True):
        await asyncio.sleep(begun + arrival.at - time.perf_counter())
        tasks.append(asyncio.create_task(read_events(port, content, begun + arrival.at)))
    replies = await asyncio.gather(*tasks)
    for reply, arrival in zip(replies, work, strict=True):
        if not reply.error and reply.tokens != arrival.output:
            reply.error = f"{reply.tokens} tokens came; {arrival.output} were asked for"
    return replies


def percentile(values: Sequence[float], share: float) -> float | str:
    """The value that `share` of all values do not exceed, to one decimal; a dash if there are no values."""
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 1) if values else "-"


def latencies(replies: list[Reply], seconds: float, slo_ttft: float, slo_tpot: float) -> dict[str, Any]:
    """Sum up a run of `seconds`. The SLOs are in ms; goodput counts the requests that meet both.

    A failed request counts in the share that meets the SLO, but in no latency.
    """
    done = [reply for reply in replies if not reply.error]
    good = sum(reply.ttft <= slo_ttft and reply.tpot <= slo_tpot for reply in done)
    kinds = {
        "TTFT": [reply.ttft for reply in done],
        "TPOT": [reply.tpot for reply in done if reply.tokens > 1],
        "ITL": [1e3 * (b - a) for reply in done for a, b in pairwise(reply.times)],
    }
    return {
        "done": len(done), "failed": len(replies) - len(done), "done /s": round(len(done) / seconds, 2),
        "output tok/s": round(sum(reply.tokens for reply in done) / seconds, 1),
        **{f"{kind} p{p} ms": percentile(times, p / 100) for kind, times in kinds.items() for p in (50, 99)},
        "SLO": f"TTFT {slo_ttft:g} ms, TPOT {slo_tpot:g} ms", "goodput /s": round(good / seconds, 2),
        "share that meets it": round(good / len(replies), 3),
    }  # fmt: skip


def serve_figures(
    model: str,
    trace: Path | None,
    rate: float,
    requests: int,
    slo_ttft: float,
    slo_tpot: float,
    scale: float,
    options: Sequence[str] = (),
    peers: Peers = (),
) -> Figures:
    """Latencies of a server whose requests come as in `trace`, or else at random, whether or not it keeps up.

    Args:
        model: the folder to serve.
        trace: see `read_trace`.
        rate: mean rate of the arrivals, in requests a second.
        requests: how many requests to send.
        slo_ttft: the longest good time to the first token, in ms.
        slo_tpot: the longest good time per output token, in ms.
        scale: factor on prompt and output lengths.
        options: further words of Manta's command line.
        peers: names (vllm), and Pythons that have it; the server of each then gets the same requests.

    Raises:
        ValueError: the trace is not usable, or a number is not positive.
        RuntimeError: a server does not start.
    """
    for name, value in (("rate", rate), ("requests", requests), ("scale", scale)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    slo, arrivals = (slo_ttft, slo_tpot), arrivals_of(trace, rate, requests)
    with serving(model, options) as server:
        limit = context_of(server.port)
        work, contents, cut = workload(model, arrivals, scale, limit)
        offered = {
            "requests": requests, f"cut to the context of {limit}": cut, "offered /s": rate,
            "prompt tokens": sum(arrival.prompt for arrival in work),
            "output tokens": sum(arrival.output for arrival in work),
        }  # fmt: skip
        figures = [{"engine": f"Manta {VERSION}"} | offered | replay_figures(server.port, work, contents, *slo)]
    for _, python in peers:
        with serving_vllm(model, python, limit) as server:
            name = f"vllm {get(server.port, '/version')[1]['version']}"
            figures.append({"engine": name} | offered | replay_figures(server.port, work, contents, *slo))
    return figures


def context_of(port: int) -> int:
    """Tokens of the context of a server's model."""
    return get(port, "/v1/models")[1]["data"][0]["max_model_len"]


def arrivals_of(trace: Path | None, rate: float, requests: int) -> list[Arrival]:
    """The first `requests` of a trace or made-up ones, `rate` a second; a ValueError if the trace is not usable."""
    return rescale(read_trace(trace, requests) if trace else poisson(requests, rate), rate)


def workload(model: str, arrivals: list[Arrival], scale: float, limit: int) -> tuple[list[Arrival], list[bytes], int]:
    """Requests that fit into a context of `limit` tokens, their bodies, and how many were cut."""
    rng, vocab, contents = random.Random(0), ModelConfig.from_folder(model).vocab_size, []
    work, cut = fit(arrivals, scale, limit)
    for arrival in work:
        prompt = [rng.randrange(vocab) for _ in range(arrival.prompt)]
        fields = {"prompt": prompt, "max_tokens": arrival.output, "temperature": 0, "ignore_eos": True}
        contents.append(json.dumps(fields | STREAM).encode())
    return work, contents, cut


def replay_figures(
    port: int, work: list[Arrival], contents: list[bytes], slo_ttft: float, slo_tpot: float
) -> dict[str, Any]:
    """Replay `work` with these bodies on the server at `port`, and sum up its latencies."""
    used, begun = cpu_seconds(), time.perf_counter()
    replies = asyncio.run(replay(port, work, contents))
    seconds, used = time.perf_counter() - begun, cpu_seconds() - used
    if errors := [reply.error for reply in replies if reply.error]:
        print(f"{len(errors)} requests failed, the first one so: {errors[0][:500]}", file=sys.stderr)
    figures = latencies(replies, seconds, slo_ttft, slo_tpot)
    return {"seconds": round(seconds, 1), **figures, "client's share of a core": round(used / seconds, 3)}


def cpu_seconds() -> float:
    """CPU seconds that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- the start --------------------------------------------------------------------------------------------------------


def startup_figures(model: str, repeats: int, options: Sequence[str] = ()) -> Figures:
    """Seconds from the start of `python server.py` to the first token of a request, by phase.

    The start log has the worker's phases. "ready" is when /health says 200, and "the rest" is the part of it that is in
    no phase: starting three processes, their imports, and the first use of the device. "whole" is "ready" plus "first
    token".
    """
    content = json.dumps({"prompt": [5] * 16, "max_tokens": 1} | STREAM).encode()
    figures = []
    for number in range(repeats):
        begun = time.perf_counter()
        with serving(model, options) as server:
            while get(server.port, "/health")[0] != 200:
                time.sleep(POLL)
            ready = time.perf_counter() - begun
            reply = asyncio.run(read_events(server.port, content, begun))
            if reply.error:
                raise RuntimeError(f"the first request has failed: {reply.error}")
            figures.append({"start": number + 1} | startup_phases(server.log.read_text(), ready, reply.times[0]))
    return figures


def startup_phases(log: str, ready: float, whole: float) -> dict[str, float]:
    """Seconds of each phase in the start log, and of "the rest", so that all of them add up to `ready`."""
    line = re.search(r"^  start-up  (.+)$", log, re.MULTILINE)
    assert line, f"no phases in {log}"
    phases = {name: float(seconds) for name, seconds in re.findall(r"(\w[\w -]*) ([\d.]+) s", line[1])}
    ready, whole = round(ready, 3), round(whole, 3)
    rest, first = round(ready - sum(phases.values()), 3), round(whole - ready, 3)
    return phases | {"the rest": rest, "ready": ready, "first token": first, "whole": whole}
