"""The benchmarks of processes for `bench.py`: the ring, the executors, and survival."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import operator
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import bench_serve
from ring import RingBuffer
from sampling_params import SamplingParams
from turns import in_turns, median_ratio, seconds_of

Figures = list[dict[str, Any]]

SPAWN = multiprocessing.get_context("spawn")
SIZES = (0, 100, 1000, 4000, 16_000, 70_000)  # bytes of the ring's messages; the last does not fit a chunk of 64 KB
WEIGHTS = (20, 40, 30, 8, 2, 0.1)


def noise(count: int) -> Any:
    """Yield `count` messages of mixed sizes; each begins with its number."""
    rng, pool = random.Random(0), random.Random(1).randbytes(2 * SIZES[-1])
    sizes = rng.choices(SIZES, WEIGHTS, k=count)
    for number, size in enumerate(sizes):
        begin = number % SIZES[-1]
        yield number.to_bytes(8, "little") + pool[begin : begin + size]


def ring_reader(ring: RingBuffer, reader: int, answer: RingBuffer, count: int, slow: bool) -> None:
    """Echo each message until an empty one comes; then check `count` messages and answer how many were right."""
    ring.be_reader(reader)
    answer.be_writer()
    while message := ring.read(60):
        answer.write(message, 60)
    rng, right = random.Random(reader), 0
    for wanted in noise(count):
        right += ring.read(60) == wanted
        if slow and rng.random() < 1e-5:
            time.sleep(0.02)
    answer.write(right.to_bytes(8, "little"), 60)


def ring_figures(messages: int, trips: int = 5000) -> Figures:
    """Time round trips of 1 KB, then so many messages, with 1, 2 and 4 readers; one reader falls asleep at random."""
    figures = []
    for readers in (1, 2, 4):
        ring, answers = RingBuffer(readers, 1 << 16), [RingBuffer(1, 1 << 16) for _ in range(readers)]
        processes = []
        for i, answer in enumerate(answers):
            process = SPAWN.Process(target=ring_reader, args=(ring, i, answer, messages, i == 0))
            process.start()
            answer.be_reader(0, [process.sentinel])
            processes.append(process)
        ring.be_writer()

        def trip(ring: RingBuffer = ring, answers: list[RingBuffer] = answers) -> None:
            ring.write(bytes(1024), 60)
            for answer in answers:
                answer.read(60)

        seconds = sorted(seconds_of(trip) for _ in range(trips))
        ring.write(b"", 60)
        begun = time.perf_counter()
        for message in noise(messages):
            ring.write(message, 60)
        right = [int.from_bytes(answer.read(600) or b"", "little") for answer in answers]
        for process in processes:
            process.join()
        for used in (ring, *answers):
            used.close()
        figures.append({
            "readers": readers, "round trip p50 us": round(seconds[trips // 2] * 1e6, 1),
            "p99 us": round(seconds[trips * 99 // 100] * 1e6, 1), "messages": messages,
            "right at each reader": min(right), "messages/s": round(messages / (time.perf_counter() - begun)),
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
        rng, vocab = random.Random(0), engines["uni"].core.facts["vocab_size"]
        prompts = [[[rng.randrange(5, vocab) for _ in range(32)] for _ in range(batch)] for _ in range(repeats + 1)]

        def generate(llm: LLM, turn: int, prompts: Any = prompts) -> tuple[float, list[list[int]]]:
            begun = time.perf_counter()
            outputs = llm.generate(prompts[turn], params, use_tqdm=False)
            return time.perf_counter() - begun, [output.outputs[0].token_ids for output in outputs]

        turns = in_turns({name: functools.partial(generate, llm) for name, llm in engines.items()}, repeats)
        for (_, expected), *others in zip(*turns.values(), strict=True):
            assert all(tokens == expected for _, tokens in others)
        seconds = {name: [taken for taken, _ in answers] for name, answers in turns.items()}
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        figures.append({
            "sequences": batch,
            **{f"{name} tok/s": round(batch * new_tokens / median) for name, median in medians.items()},
            **{f"{name} of uni": median_ratio(seconds["uni"], seconds[name]) for name in ("mp", "sanitized")},
        })  # fmt: skip
    return figures


# --- survival ---------------------------------------------------------------------------------------------------------


def survival_figures(model: str, streams: int, kills: int, new_tokens: int, options: list[str]) -> Figures:
    """Compare streams whose workers are killed (or stopped) at random moments with the same streams left in peace."""
    figures = []
    for name in ("SIGKILL", "SIGSTOP"):
        words = ["--step-timeout", "2", "--dtype", "float32", *options]
        with bench_serve.serving(model, words) as server, ThreadPoolExecutor(1) as readers:
            wanted = read_streams(server.port, streams, new_tokens)
            reading = readers.submit(read_streams, server.port, streams, new_tokens)
            rng, done, begun = random.Random(0), 0, time.monotonic()
            while done < kills and not reading.done():
                time.sleep(rng.uniform(0.5, 2.0))
                restarts = count_restarts(server.port)
                os.kill(rng.choice([*_workers(server.pid)]), getattr(signal, name))
                done += 1
                while count_restarts(server.port) == restarts:
                    time.sleep(0.05)
            got = reading.result()
            seconds, lines = time.monotonic() - begun, server.log.read_text().splitlines()
        took = [float(line.rpartition(" after ")[2].split()[0]) for line in lines if "new workers after" in line]
        figures.append({
            "signal": name, "streams": streams, "times": done,
            "texts as without": f"{sum(map(operator.eq, got, wanted))}/{streams}",
            "recovery median s": round(statistics.median(took), 2), "most s": max(took), "in all s": round(seconds, 1),
        })  # fmt: skip
    return figures


def read_stream(port: int, prompt: str, new_tokens: int) -> str:
    """The text of a stream, as far as it comes."""
    fields = {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
    body, text = json.dumps({"prompt": prompt} | fields).encode(), ""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    with contextlib.suppress(OSError):
        for line in connection.getresponse():
            if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
                text += choices[0]["text"]
    connection.close()
    return text


def read_streams(port: int, count: int, new_tokens: int) -> list[str]:
    """The texts of `count` concurrent streams."""
    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(lambda i: read_stream(port, f"Enter the {i}th SERVANT.\n\n", new_tokens), range(count))]


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
