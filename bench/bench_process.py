"""The benchmarks of processes for `bench.py`: the ring, the executors, routing among engines, and survival."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from config import EngineConfig
from plan import StepResult
from processes.routing import Router
from ring import RingBuffer
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import SequenceGroup

Figures = list[dict[str, Any]]

ROOT = Path(__file__).parent.parent  # has server.py
SPAWN = multiprocessing.get_context("spawn")
SIZES = (0, 100, 1000, 4000, 16_000, 70_000)  # bytes of the ring's messages; the last does not fit a chunk of 64 KB
WEIGHTS = (20, 40, 30, 8, 2, 0.1)


def messages(count: int) -> Any:
    """Yield `count` messages of mixed sizes; each begins with its number."""
    rng, noise = random.Random(0), random.Random(1).randbytes(2 * SIZES[-1])
    sizes = rng.choices(SIZES, WEIGHTS, k=count)
    for number, size in enumerate(sizes):
        begin = number % SIZES[-1]
        yield number.to_bytes(8, "little") + noise[begin : begin + size]


def ring_reader(ring: RingBuffer, reader: int, answer: RingBuffer, count: int, slow: bool) -> None:
    """Echo each message until an empty one comes; then check `count` messages and answer how many were right."""
    ring.be_reader(reader)
    answer.be_writer()
    while message := ring.read(60):
        answer.write(message, 60)
    rng, right = random.Random(reader), 0
    for wanted in messages(count):
        right += ring.read(60) == wanted
        if slow and rng.random() < 1e-5:
            time.sleep(0.02)
    answer.write(right.to_bytes(8, "little"), 60)


def ring_figures(count: int, trips: int = 5000) -> Figures:
    """Time round trips of 1 KB, then `count` messages, with 1, 2 and 4 readers; one reader falls asleep at random."""
    figures = []
    for readers in (1, 2, 4):
        ring, answers = RingBuffer(readers, 1 << 16), [RingBuffer(1, 1 << 16) for _ in range(readers)]
        processes = []
        for i, answer in enumerate(answers):
            process = SPAWN.Process(target=ring_reader, args=(ring, i, answer, count, i == 0))
            process.start()
            answer.be_reader(0, [process.sentinel])
            processes.append(process)
        ring.be_writer()
        seconds = []
        for _ in range(trips):
            begun = time.perf_counter()
            ring.write(bytes(1024), 60)
            for answer in answers:
                answer.read(60)
            seconds.append(time.perf_counter() - begun)
        ring.write(b"", 60)
        begun = time.perf_counter()
        for message in messages(count):
            ring.write(message, 60)
        right = [int.from_bytes(answer.read(600) or b"", "little") for answer in answers]
        for process in processes:
            process.join()
        for used in (ring, *answers):
            used.close()
        seconds.sort()
        figures.append({
            "readers": readers, "round trip p50 us": round(seconds[trips // 2] * 1e6, 1),
            "p99 us": round(seconds[trips * 99 // 100] * 1e6, 1), "messages": count,
            "right at each reader": min(right), "messages/s": round(count / (time.perf_counter() - begun)),
        })  # fmt: skip
    return figures


def executor_figures(model: str, batches: list[int], new_tokens: int, repeats: int) -> Figures:
    """Compare `LLM.generate` with a worker process, and with the KV sanitizer, with neither. They take turns."""
    from engine import LLM

    variants: dict[str, dict[str, Any]] = {
        "uni": {"distributed_executor_backend": "uni"},
        "mp": {"distributed_executor_backend": "mp"},
        "sanitized": {"distributed_executor_backend": "uni", "sanitize_kv": True},
    }
    engines = {name: LLM(model, **fields) for name, fields in variants.items()}
    params, figures = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True), []
    for batch in batches:
        rates: dict[str, list[float]] = {name: [] for name in variants}
        rng, vocab = random.Random(0), engines["uni"].core.facts["vocab_size"]
        for repeat in range(repeats + 1):
            prompts = [[rng.randrange(5, vocab) for _ in range(32)] for _ in range(batch)]
            answers = []
            for name in random.Random(repeat).sample(list(engines), len(engines)):
                begun = time.perf_counter()
                outputs = engines[name].generate(prompts, params, use_tqdm=False)
                if repeat:  # the first warms up
                    rates[name].append(batch * new_tokens / (time.perf_counter() - begun))
                answers.append([output.outputs[0].token_ids for output in outputs])
            assert answers[0] == answers[1] == answers[2]
        ratios = {name: [b / a for a, b in zip(rates["uni"], rates[name], strict=True)] for name in ("mp", "sanitized")}
        figures.append({
            "sequences": batch,
            **{f"{name} tok/s": round(statistics.median(found)) for name, found in rates.items()},
            **{f"{name} of uni": round(statistics.median(found), 3) for name, found in ratios.items()},
        })  # fmt: skip
    return figures


def routing_figures(trace: Path, engines: int, pools: list[int], in_flight: int = 32) -> Figures:
    """Prefix-cache hits of several engines on a trace, by how requests are routed.

    Args:
        trace: JSON lines with `hash_ids`; see `prefix_figures` in bench.py.
        engines: how many there are.
        pools: sizes of each engine's pool, in pages.
        in_flight: the router sees the loads that this many latest requests make.
    """
    prompts = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    longest, vocab, total = max(map(len, prompts)), max(map(max, prompts)) + 1, sum(map(len, prompts))
    figures = []
    for pool in pools:
        rates = {}
        for affinity in (False, True):
            config = EngineConfig(block_size=1, max_num_batched_tokens=2**18)
            schedulers = [Scheduler(config, pool, longest + 2, vocab, []) for _ in range(engines)]
            router, latest = Router(engines, 1, affinity=affinity), deque[int](maxlen=in_flight)
            counts = [0] * engines
            for i, pages in enumerate(prompts):
                router.update([(0, latest.count(rank)) for rank in range(engines)])
                rank = router.choose(pages, "", 1, range(engines))
                latest.append(rank)
                counts[rank] += 1
                scheduler = schedulers[rank]
                try:
                    scheduler.add(SequenceGroup(str(i), pages, SamplingParams(max_tokens=1)))
                except ValueError:  # longer than the whole pool
                    continue
                while scheduler.has_work():
                    plan = scheduler.schedule()
                    scheduler.update(plan, StepResult(plan.step, [0] * len(plan.rows)))
            rates[affinity] = sum(s.counters["prefix_cache_hits_total"] for s in schedulers) / total
            shares = " / ".join(f"{count / len(prompts):.0%}" for count in counts)
        figures.append({
            "engines": engines, "pool tokens of each": pool * 512, "round robin": round(rates[False], 4),
            "by prefix": round(rates[True], 4), "requests of each": shares,
        })  # fmt: skip
    return figures


# --- survival ---------------------------------------------------------------------------------------------------------


def survival_figures(model: str, streams: int, kills: int, new_tokens: int, options: list[str]) -> Figures:
    """Compare streams whose workers are killed (or stopped) at random moments with the same streams left in peace."""
    figures = []
    for name in ("SIGKILL", "SIGSTOP"):
        with tempfile.TemporaryFile("w+") as log:
            folder = str(Path(model).resolve())
            command = [sys.executable, "server.py", "--model", folder, "--port", "0", "--step-timeout", "2"]
            server = subprocess.Popen([*command, "--dtype", "float32", *options], cwd=ROOT, stderr=log)
            try:
                port = int(wait_for_log(server, log, "http://127.0.0.1:").strip("\n"))
                wanted = read_streams(port, streams, new_tokens)
                got: list[Stream] = []
                reading = threading.Thread(target=lambda: got.extend(read_streams(port, streams, new_tokens)))  # noqa: B023
                reading.start()
                rng, done, begun = random.Random(0), 0, time.monotonic()
                while done < kills and reading.is_alive():
                    time.sleep(rng.uniform(0.5, 2.0))
                    restarts = count_restarts(port)
                    os.kill(rng.choice([*_workers(server.pid)]), getattr(signal, name))
                    done += 1
                    while count_restarts(port) == restarts:
                        time.sleep(0.05)
                reading.join()
                seconds = time.monotonic() - begun
            finally:
                server.terminate()
                server.wait()
            log.seek(0)
            took = [float(line.rpartition(" after ")[2].split()[0]) for line in log if "new workers after" in line]
        figures.append({
            "signal": name, "streams": streams, "times": done,
            "texts as without": f"{count_equal(got, wanted)}/{streams}",
            "recovery median s": round(statistics.median(took), 2), "most s": max(took), "in all s": round(seconds, 1),
        })  # fmt: skip
    return figures


def count_equal(streams: Sequence[Stream], wanted: Sequence[Stream]) -> int:
    """How many have the text of those that are wanted."""
    return sum(stream.text == other.text for stream, other in zip(streams, wanted, strict=True))


def wait_for_log(server: subprocess.Popen[bytes], log: Any, what: str) -> str:
    """What the server's log says after `what`, as soon as it is there."""
    while server.poll() is None:
        log.seek(0)
        if what in (text := log.read()):
            return text.rpartition(what)[2]
        time.sleep(0.1)
    raise SystemExit("the server ended before it listened")


class Stream:
    """A stream: its text, when its tokens came, and how it ended: whole, lost, or with an error."""

    def __init__(self) -> None:
        self.text, self.end = "", "lost"
        self.times: list[float] = []

    def read(self, port: int, prompt: str, new_tokens: int) -> None:
        """Ask for it, and read it to its end."""
        fields = {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps({"prompt": prompt} | fields).encode()
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with contextlib.suppress(OSError):
            for line in connection.getresponse():
                if line.startswith(b"data: [DONE]"):
                    self.end = "whole" if self.end == "lost" else self.end
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        self.end = f"error: {event['error']['message']}"
                        continue
                    self.text += event["choices"][0]["text"]
                    self.times.append(time.monotonic())
        connection.close()


def read_streams(port: int, count: int, new_tokens: int, streams: Sequence[Stream] = ()) -> Sequence[Stream]:
    """What `count` concurrent streams are; those of `streams` may be watched meanwhile."""
    streams = streams or [Stream() for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        for i, stream in enumerate(streams):
            threads.submit(stream.read, port, f"Enter the {i}th SERVANT.\n\n", new_tokens)
    return streams


def count_restarts(port: int) -> float:
    """How often the server's workers were started anew; -1: it does not say."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    lines = [line for line in text.splitlines() if line.startswith("manta_num_worker_restarts_total")]
    return float(lines[0].split()[-1]) if lines else -1.0


def _workers(pid: int) -> Iterator[int]:
    """The processes below `pid` that hold the model, or a stage of it, found by torch's library."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "libtorch" in Path(f"/proc/{child}/maps").read_text():
            yield int(child)
        yield from _workers(int(child))
