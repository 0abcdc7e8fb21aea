"""A soak by hand: mixed requests for an hour, and whether the memory of every process stays as it is.

    python campaigns/soak.py [--minutes 60] [--seed 0] [--clients 12] [--json FILE] [flags of server.py ...]

Clients send what users send: prompts of 1 token up to the whole context, several answers, stop strings, penalties and
biases, streams and plain replies, streams that are left, and mistakes. The resident memory of each process is read
every few seconds. A line is fitted to the last half of these by least squares. The soak fails if the line rises by
more than 3% of its mean, if a process was replaced, or if a reply was not what it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from served import Server, command, serving

ALLOWED = 0.03  # of the mean: what a process may grow by over the last half
EVERY = 5.0  # seconds between looks at the memory
TIMEOUT = 600.0  # seconds that a client waits for the next bytes
COMPLETIONS = "/v1/completions"
MISTAKES: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": [10**9]}, {"prompt": 7}, {"prompt": "a", "n": 0}, {"prompt": "a", "max_tokens": -7},
    {"prompt": "a", "temperature": "hot"}, {"prompt": "a", "top_p": 2}, {"prompt": "a" * 200_000}, {},
]  # fmt: skip


class Load:
    """What the clients share.

    Attributes:
        done: how many requests of each kind were answered as they should be.
        wrong: what other answers there were.
    """

    def __init__(self, server: Server, seed: int, end: float):
        self.server, self.seed, self.end = server, seed, end
        models = json.loads(server.get("/v1/models")[1])
        self.context = models["data"][0]["max_model_len"]
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, number: int) -> None:
        """Send one request after the other until the end."""
        rng = random.Random(f"{self.seed} {number}")
        kinds: dict[str, Callable[[random.Random], str]] = {
            "stream": self.stream, "plain": self.plain, "left": self.left, "mistake": self.mistake,
        }  # fmt: skip
        while time.monotonic() < self.end:
            kind = rng.choices(list(kinds), (5, 3, 2, 1))[0]
            try:
                problem = kinds[kind](rng)
            except OSError as error:
                problem = repr(error)
            if problem:
                self.wrong.append(f"{kind}: {problem}")
            else:
                self.done[kind] += 1

    def body(self, rng: random.Random) -> dict[str, Any]:
        """A request for completions."""
        length = min(self.context - 1, int(self.context ** rng.random()))
        answers = rng.choice((1, 1, 1, 1, 2, 3))
        fields: dict[str, Any] = {
            "prompt": [rng.randrange(1, 1000) for _ in range(length)],
            "max_tokens": min(self.context - length, 1 + int(rng.expovariate(1 / 60))),
            "temperature": rng.choice((0, 0.7, 1.5)), "n": answers, "ignore_eos": rng.random() < 0.7,
        }  # fmt: skip
        options: dict[str, Any] = {
            "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": rng.randrange(2**31), "stop": ["the", "\n\n"],
            "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {str(rng.randrange(1000)): 5},
        }  # fmt: skip
        return fields | {name: options[name] for name in options if rng.random() < 0.2}

    @contextlib.contextmanager
    def send(self, body: dict[str, Any]) -> Iterator[HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=TIMEOUT)
        with contextlib.closing(connection):
            connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()

    def plain(self, rng: random.Random) -> str:
        """A whole reply; returns what is wrong with it, or nothing."""
        body = self.body(rng)
        with self.send(body) as response:
            content = json.loads(response.read())
        whole = response.status == 200 and len(content["choices"]) == body["n"]
        return "" if whole else f"{response.status} {content}"

    def stream(self, rng: random.Random) -> str:
        """A stream that is read to its end."""
        with self.send(self.body(rng) | {"stream": True}) as response:
            *_, last = [line for line in response if line.strip()]
        return "" if response.status == 200 and last == b"data: [DONE]\n" else f"{response.status} {last!r}"

    def left(self, rng: random.Random) -> str:
        """A stream whose client leaves after some events."""
        with self.send(self.body(rng) | {"stream": True}) as response:
            for _ in range(rng.randrange(20)):
                response.readline()
        return "" if response.status == 200 else f"{response.status}"

    def mistake(self, rng: random.Random) -> str:
        """A request that is refused."""
        with self.send(rng.choice(MISTAKES)) as response:
            return "" if response.status == 400 else f"{response.status}"


def memory(pid: int) -> dict[str, float]:
    """Resident and anonymous MiB of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) / 1024 for line in lines[1:]}
    return {"rss": sizes["Rss:"], "anonymous": sizes["Anonymous:"]}


def name_of(pid: int, main: int) -> str:
    """What a process of the server is, by its title."""
    if pid == main:
        return "main"
    words = {"manta: engine": "engine", "resource_tracker": "tracker", "manta: worker": "worker", "manta: api": "api"}
    title = command(pid)
    return next((name for word, name in words.items() if word in title), title)


def rise(samples: list[tuple[float, float]]) -> float:
    """How much a line through the last half of the samples (seconds, size) rises over that half, by its mean size."""
    times, sizes = zip(*samples[len(samples) // 2 :], strict=True)
    slope = statistics.linear_regression(times, sizes).slope
    return slope * (times[-1] - times[0]) / statistics.mean(sizes)


def soak(server: Server, minutes: float, seed: int, clients: int) -> dict[str, Any]:
    """Run the load and watch; returns what was found."""
    begun = time.monotonic()
    load = Load(server, seed, begun + 60 * minutes)
    pids = server.family()
    names = {pid: name_of(pid, server.process.pid) for pid in pids}
    threads = [threading.Thread(target=load.client, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    samples: defaultdict[int, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    while time.monotonic() < load.end and server.family() == pids:
        for pid in pids:
            samples[pid].append((time.monotonic() - begun, memory(pid)))
        time.sleep(EVERY)
    replaced = server.family() != pids
    load.end = 0.0
    for thread in threads:
        thread.join(TIMEOUT)
    return {
        "minutes": minutes, "seed": seed, "clients": clients, "done": dict(load.done),
        "wrong": load.wrong[:20], "replaced": replaced, "processes": [
            summary(names[pid], sizes) for pid, sizes in samples.items()],
    }  # fmt: skip


def summary(name: str, samples: list[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    """A process's RSS in MiB at the quarters of the soak, and how it and anonymous memory rise over the last half."""
    rss = [sizes["rss"] for _, sizes in samples]
    quarters = [round(rss[i * (len(rss) - 1) // 4], 1) for i in range(5)]
    lines = {kind: [(at, sizes[kind]) for at, sizes in samples] for kind in ("rss", "anonymous")}
    return {"name": name, "rss": quarters} | {f"{kind}_rise": round(rise(line), 4) for kind, line in lines.items()}


def main() -> None:
    """The command line. Exit code 1 if the soak has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--json", type=Path, help="file for what was found")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *flags) as server:
        report = {"flags": flags} | soak(server, options.minutes, options.seed, options.clients)
    print(f"{'process':<10}{'RSS in MiB at each quarter':<45}{'RSS':>8}{'anonymous':>12}, over the last half")
    for process in report["processes"]:
        sizes = "".join(f"{size:>9,.1f}" for size in process["rss"])
        print(f"{process['name']:<10}{sizes}{process['rss_rise']:>+8.1%}{process['anonymous_rise']:>+12.1%}")
    print(f"requests: {report['done']}; wrong: {report['wrong']}; a process was replaced: {report['replaced']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    grown = [p for p in report["processes"] if p["rss_rise"] > ALLOWED]
    sys.exit(bool(grown or report["wrong"] or report["replaced"]))


if __name__ == "__main__":
    main()
