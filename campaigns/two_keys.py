"""Two keys side by side: what a quiet client notices of another one that sends hostile requests.

    python campaigns/two_keys.py                          200 requests, of all kinds in `hostile.py`, four at a time
    python campaigns/two_keys.py --each                   each kind by itself
    python campaigns/two_keys.py --kind batch --seed 1    some kinds
    python campaigns/two_keys.py --each --seconds 60      each without pause for a minute
    (flags that this does not know go to the server)

The quiet key asks for streams all the time, every other one with a small schema. The figures are the time to the first
token and the time between two events of a stream, as it sees them. The other key has turns, one after the other, so
that all kinds of turns see the same machine:

    refused     it sends what the server refuses, or what is hardly any work: the quiet key should notice nothing
    alone       it sends nothing
    work        it sends hostile requests that are answered: long prompts, many samples, streams that nobody reads
    ordinary    it sends batches of ordinary prompts that fill the engine, as many at a time as hostile ones

What is answered is work, and has a right to its share of the engine, as an ordinary batch has: the quiet key's tokens
come later beside either. So the p99 beside what is refused is held against that alone, and the p99 beside hostile work
against that beside an ordinary batch; both must stay within MOST times. All figures are printed. The script fails with
1 where one of these does not hold, where a hostile request gets a 5xx other than 503, or where it gets no reply within
`hostile.LONGEST` seconds, or if it is work, within WORK_LONGEST. It also prints the memory of the server's processes
before the first turn and 5 seconds after the last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import hostile
from served import serving

MOST = 1.5  # times the p99 of the turns that a kind of turns is held against
WORK_LONGEST = 300.0  # seconds that an answer may take: others have a right to the engine, too
AGAINST = {"refused": "alone", "work": "ordinary"}
STREAMS = 2  # of the quiet key at a time
BATCH = 20  # hostile requests in a turn
LONGEST_TURN = 15.0  # seconds of a turn in which nothing hostile is sent
KEYS = ("quiet", "other")
SMALL = {
    "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


class Answered(NamedTuple):
    """What came of a hostile request."""

    kind: str
    statuses: list[int]  # none where nobody read one; 0: no reply in time
    seconds: float
    said: str


# --- the other key, in a process of its own ---------------------------------------------------------------------------


def ordinary(rng: random.Random) -> bytes:
    """A batch of prompts as anybody sends it."""
    prompts = [[rng.randrange(10, 1000) for _ in range(rng.randrange(50, 900))] for _ in range(16)]
    body = {"prompt": prompts, "max_tokens": 64, "ignore_eos": True}
    return hostile.request(KEYS[1], hostile.COMPLETIONS, body)


def other_key(port: int, at_once: int, seed: int, seconds: float, pipe: Connection) -> None:
    """Send what the pipe says: a list of kinds for so many seconds, or None for ordinary requests until more comes."""
    rng = random.Random(seed)
    kinds = hostile.kinds(rng)

    def answered(kind: str, raw: bytes) -> Answered:
        begun = time.monotonic()
        try:
            most = WORK_LONGEST if kind in hostile.WORK else hostile.LONGEST
            statuses, body = hostile.send(port, raw, kinds[kind].way, most)
        except OSError as error:
            statuses, body = [0], repr(error).encode()
        return Answered(kind, statuses, time.monotonic() - begun, body[:200].decode(errors="replace"))

    def ask(batches: list[bytes]) -> None:
        while not pipe.poll():
            hostile.send(port, batches[0], hostile.Way(), WORK_LONGEST)
            batches.append(batches.pop(0))

    with ThreadPoolExecutor(at_once) as threads:
        while (names := pipe.recv()) != "end":
            made = [(name, kinds[name].make(KEYS[1])) for name in names or ()]
            batches = [ordinary(rng) for _ in range(0 if names else 40)]
            pipe.send("ready")
            pipe.recv()
            if names is None:
                list(threads.map(ask, [batches] * at_once))
                pipe.send(pipe.recv())  # "enough"
            else:
                begun, answers = time.monotonic(), list[Answered]()
                while time.monotonic() < begun + seconds:  # what is refused at once is sent again and again
                    answers += threads.map(answered, *zip(*made, strict=True))
                pipe.send(answers)


# --- the quiet key ----------------------------------------------------------------------------------------------------


class Quiet:
    """The quiet client, and the times that it measures, by what the other key does meanwhile.

    Attributes:
        turn: what the other key does; empty while it begins or ends.
        wrong: replies that were not what they should be.
    """

    def __init__(self, port: int, seed: int):
        self.port, self.seed, self.turn = port, seed, ""
        self.first: dict[str, list[float]] = defaultdict(list)
        self.between: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []
        self.over = False
        self.threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(STREAMS)]

    def _run(self, number: int) -> None:
        rng, count = random.Random(f"{self.seed} {number}"), 0
        while not self.over:
            count += 1
            body = {"prompt": [rng.randrange(10, 1000) for _ in range(60)], "max_tokens": 40, "stream": True}
            body |= {"structured_outputs": {"json": SMALL}} if count % 2 else {"ignore_eos": True}
            self._ask(hostile.request(KEYS[0], hostile.COMPLETIONS, body))

    def _ask(self, raw: bytes) -> None:
        turn, last, whole = self.turn, time.perf_counter(), False
        times = self.first
        with hostile.socket.create_connection(("127.0.0.1", self.port), 60) as sock:
            sock.sendall(raw)
            with sock.makefile("rb") as lines:
                for line in lines:
                    now = time.perf_counter()
                    whole = whole or line.startswith(b"data: [DONE]")
                    if b'"text"' in line:
                        if turn == self.turn:
                            times[turn].append(now - last)
                        times, turn, last = self.between, self.turn, now
                    elif b"error" in line:
                        self.wrong.append(line.decode(errors="replace"))
        if not whole:
            self.wrong.append("a stream was cut")


def percentiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1e3, 2), "p99_ms": round(cuts[98] * 1e3, 2), "count": len(values)}


def figures(quiet: Quiet) -> dict[str, Any]:
    """Of each kind of turns, and the ratios of the p99s that are held against each other.

    Raises:
        ValueError: the turns are too short for a figure.
    """
    rows: dict[str, Any] = {}
    for what, times in (("time to first token", quiet.first), ("between tokens", quiet.between)):
        turns = {turn: percentiles(values) for turn, values in times.items() if turn and len(values) > 1}
        p99 = {turn: values["p99_ms"] for turn, values in turns.items()}
        held = {turn: other for turn, other in AGAINST.items() if turn in times}
        if short := [turn for pair in held.items() for turn in pair if turn not in p99]:
            raise ValueError(f"{what}: there are too few in the turns {short}")
        ratios = {f"{turn} / {other}": round(p99[turn] / p99[other], 2) for turn, other in held.items()}
        rows[what] = turns | {"ratios of p99": ratios}
    return rows


# --- the campaign -----------------------------------------------------------------------------------------------------


def turns_of(kinds: list[str]) -> list[tuple[str, list[str] | None]]:
    """The turns in which these hostile kinds are sent, each followed by the one that it is held against."""
    work = [kind for kind in kinds if kind in hostile.WORK]
    others = [kind for kind in kinds if kind not in hostile.WORK]
    turns: list[tuple[str, list[str] | None]] = []
    for i in range(0, len(kinds), BATCH):
        for name, sent in (("refused", others[i : i + BATCH]), ("work", work[i : i + BATCH])):
            turns += [(name, sent), (AGAINST[name], None)] if sent else []
    return turns


def measure(port: int, kinds: list[str], at_once: int, seed: int, seconds: float) -> tuple[Quiet, list[Answered]]:
    """Have the other key send these hostile kinds while the quiet one asks for streams."""
    pipe, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=other_key, args=(port, at_once, seed, seconds, theirs))
    other.start()
    quiet, answers = Quiet(port, seed), list[Answered]()
    for thread in quiet.threads:
        thread.start()
    for turn, sent in turns_of(kinds):
        if turn != "alone":
            pipe.send(sent)
            pipe.recv()
            pipe.send("go")
        time.sleep(0.5)
        quiet.turn, begun = turn, time.monotonic()
        if sent:
            answers += pipe.recv()
            seconds = min(time.monotonic() - begun, LONGEST_TURN)
        else:
            time.sleep(seconds)
        quiet.turn = ""
        if turn == "ordinary":
            pipe.send("enough")
            pipe.recv()
        time.sleep(0.5)
        print(f"{turn}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    quiet.over = True
    pipe.send("end")
    other.join()
    for thread in quiet.threads:
        thread.join()
    return quiet, answers


def report(quiet: Quiet, answers: list[Answered]) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what broke a promise."""
    rows = figures(quiet)
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        by_kind[answer.kind].update([*map(str, answer.statuses)] or ["none"])
    broken = [
        f"{one.kind}: {one.statuses} after {one.seconds:.1f} s: {one.said}"
        for one in answers
        if any(status == 0 or (status >= 500 and status != 503) for status in one.statuses)
    ]
    broken += [f"the quiet key got: {reply[:200]}" for reply in quiet.wrong]
    for what in [*rows]:
        for held, ratio in rows[what]["ratios of p99"].items():
            broken += [f"{what}: the ratio of the p99s, {held}, is {ratio}"] if ratio > MOST else []
    longest = max(answers, key=lambda answer: answer.seconds)
    rows["longest hostile request"] = f"{longest.kind}: {longest.seconds:.1f} s, {longest.statuses}"
    rows["statuses"] = {kind: dict(counts) for kind, counts in sorted(by_kind.items())}
    return rows, broken


def memory_of(pid: int) -> list[int]:
    """Resident memory in MiB of a process and of all below it."""
    server = psutil.Process(pid)
    return [process.memory_info().rss >> 20 for process in [server, *server.children(recursive=True)]]


def main() -> int:
    """The command line; returns the exit code."""
    names = [*hostile.kinds(random.Random())]
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=names)
    parser.add_argument("--seconds", type=float, default=5.0, help="that a turn takes at least")
    parser.add_argument("--each", action="store_true")
    flags, others = parser.parse_known_args()
    chosen = flags.kind or names
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--threads", "1", *keys, *others) as server:
        plans = {kind: [kind] * BATCH for kind in chosen}
        if not flags.each:
            plans = {"all kinds": (chosen * flags.requests)[: flags.requests]}
            random.Random(flags.seed).shuffle(plans["all kinds"])
        failed = False
        for name, kinds in plans.items():
            before = memory_of(server.process.pid)
            rows, broken = report(*measure(server.port, kinds, flags.at_once, flags.seed, flags.seconds))
            time.sleep(5)
            rows["MiB of each process, before and after"] = [before, memory_of(server.process.pid)]
            print(json.dumps({name: rows | {"broken": broken}}, indent=1), flush=True)
            failed = failed or bool(broken)
        log = server.log.read_text()
        if "Traceback" in log:
            print(log[-6000:], file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
