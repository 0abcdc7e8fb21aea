"""Several models under load by hand: clients ask for three of which two fit, while processes are killed.

    python campaigns/models_on_demand.py [--requests 400] [--clients 8] [--kills 12] [--seed 0]

Each request names a model at random. Its text must be the one that the model gives alone. It may end with an error only
if the model's engine, its worker or an API process was killed while it ran or waited. In the end the models answer once
more, the server ends with 0, and nothing is left behind. What happened is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

from config import DEMO
from engine import LLM, SamplingParams
from served import Server, api_of, serving

NAMES = ("one", "two", "three")
PROMPTS = ("What is 23 + 58?", "To be, or not to be", "Spell stone backwards.", "a")
TOKENS = 48
TABLE = "".join(
    f'[{name}]\npath = "{DEMO}"\nload_format = "dummy"\nseed = {seed}\nmemory = 0.8\nmax_num_seqs = 16\n'
    for seed, name in enumerate(NAMES, 1)
)
BEFORE = 12.0  # seconds by which a kill may come before a request that it fails; see `processes.models.RETRY`
AGAIN = 1.0  # seconds after which a client asks again for a model whose start was killed


def alone() -> dict[tuple[str, str], str]:
    """What each model answers to each prompt by itself."""
    texts = {}
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    for seed, name in enumerate(NAMES, 1):
        with LLM(DEMO, load_format="dummy", seed=seed, device="cpu", dtype="float32", max_num_seqs=16) as llm:
            outputs = llm.generate([*PROMPTS], params, use_tqdm=False)
        texts |= {(name, prompt): output.outputs[0].text for prompt, output in zip(PROMPTS, outputs, strict=True)}
    return texts


class Campaign:
    """Clients and kills, and what they have seen."""

    def __init__(self, server: Server, texts: dict[tuple[str, str], str], seed: int):
        self.server, self.texts, self.rng = server, texts, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.broken: list[str] = []
        self.kills: list[tuple[float, str]] = []  # when, and of which model; of an API process: of all
        self.waits: list[float] = []
        self.lock, self.ended = threading.Lock(), threading.Event()

    def client(self, count: int, seed: int) -> None:
        """Send so many requests, one after the other."""
        rng = random.Random(seed)
        for _ in range(count):
            name, prompt, stream = rng.choice(NAMES), rng.choice(PROMPTS), rng.random() < 0.6
            begun = time.monotonic()
            try:
                while "cannot be loaded" in (answer := self.ask(name, prompt, stream))[1] and self.is_excused(
                    name, begun
                ):
                    self.done["asked again"] += 1
                    time.sleep(AGAIN)
                text, error = answer
            except (OSError, HTTPException, ValueError) as failure:
                text, error = "", repr(failure)
            with self.lock:
                self.waits.append(time.monotonic() - begun)
                self.judge(name, prompt, begun, text, error)

    def ask(self, name: str, prompt: str, stream: bool) -> tuple[str, str]:
        """The text of an answer and its error, one of which may be empty."""
        body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body | {"ignore_eos": True, "stream": stream}), headers
            )
            response = connection.getresponse()
            content = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            return "", f"{response.status} {content}"
        if not stream:
            return json.loads(content)["choices"][0]["text"], ""
        events = [json.loads(line[6:]) for line in content.split("\n") if line.startswith("data: {")]
        error = "".join(str(event["error"]) for event in events if "error" in event)
        error = error or ("" if content.endswith("data: [DONE]\n\n") else "the stream breaks off")
        return "".join(choice["text"] for event in events for choice in event.get("choices", ())), error

    def is_excused(self, name: str, begun: float) -> bool:
        """Whether a process was killed that the model needs."""
        return any(at > begun - BEFORE and victim in (name, "all") for at, victim in self.kills)

    def judge(self, name: str, prompt: str, begun: float, text: str, error: str) -> None:
        """Count an answer, or note what is wrong with it."""
        right, excused = self.texts[name, prompt], self.is_excused(name, begun)
        if not error and text == right:
            self.done["whole"] += 1
        elif error and right.startswith(text) and excused:
            self.done["cut off by a kill"] += 1
        else:
            self.broken.append(f"{name}: {error or 'the text is another one'}: {text!r:.80} for {right!r:.80}")

    def killer(self, kills: int) -> None:
        """Kill a process now and then, so many times."""
        for _ in range(kills):
            if self.ended.wait(self.rng.uniform(2, 8)):
                return
            started = dict(re.findall(r"the engine of (\w+) is started \(pid (\d+)\)", self.server.log.read_text()))
            name = self.rng.choice([*started, "all"])
            with self.lock:
                try:
                    pids = api_of(self.server) if name == "all" else [int(started[name])]
                    if name != "all" and self.rng.random() < 0.5:
                        pids = [*map(int, Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split())]
                    os.kill(self.rng.choice(pids), signal.SIGKILL)
                except (OSError, IndexError):  # it has ended, or just starts
                    continue
                self.kills.append((time.monotonic(), name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 400), ("clients", 8), ("kills", 12), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    texts, folder = alone(), Path(tempfile.mkdtemp())
    (folder / "models.toml").write_text(TABLE)
    options = ("--models-memory", "1.7", "--model-min-seconds", "1", "--threads", "1", "--enforce-eager")
    server_flags = ("--models", str(folder / "models.toml"), "--api-server-count", "2", *options)
    with serving(folder, *server_flags) as server:
        campaign = Campaign(server, texts, flags.seed)
        count = -(-flags.requests // flags.clients)
        clients = [threading.Thread(target=campaign.client, args=(count, flags.seed + i)) for i in range(flags.clients)]
        killer = threading.Thread(target=campaign.killer, args=(flags.kills,))
        begun = time.monotonic()
        for thread in (*clients, killer):
            thread.start()
        for thread in clients:
            thread.join()
        campaign.ended.set()
        killer.join()
        took = time.monotonic() - begun
        time.sleep(BEFORE)
        for name in NAMES:
            campaign.judge(name, "a", time.monotonic() + BEFORE, *campaign.ask(name, "a", stream=False))
        server.pids = server.family()
        server.process.terminate()
        code = server.process.wait(60)
        server.assert_gone()
        log = server.log.read_text()
    waits = sorted(campaign.waits)
    summary = {
        "requests": len(waits), "seconds": round(took), "done": campaign.done, "broken": campaign.broken, "code": code,
        "kills": Counter(name for _, name in campaign.kills), "loads": len(re.findall("is ready, after", log)),
        "seconds of a request": {f"p{p}": round(waits[p * (len(waits) - 1) // 100], 1) for p in (50, 90, 99, 100)},
        "tracebacks": log.count("Traceback"), "log": str(server.log),
    }  # fmt: skip
    print(json.dumps(summary, indent=1))
    sys.exit(bool(campaign.broken or code or summary["tracebacks"]))


if __name__ == "__main__":
    main()
