"""The engine's benchmarks for `bench.py`: throughput, latency and its phases, with other engines taking turns."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from config import VERSION, EngineConfig
from model_config import ModelConfig
from sampling_params import SamplingParams

Row = dict[str, Any]
Figures = list[Row]
Generate = Callable[[list[list[int]], Any], dict[str, Any]]  # the jobs of peers.py, and their answers

PEERS = Path(__file__).parent / "peers.py"
COMPARED = 4  # first tokens of each answer that are compared; later ones differ by rounding
ENGINE = ("schedule", "submit", "wait", "update")  # phases of the engine's thread
MODEL = ("decode", "prepare_inputs", "model", "greedy_head", "logits", "sample", "post_update")  # phases of the device
MOVES = "move_blocks"  # another phase of the device


def engine_figures(args: argparse.Namespace) -> Figures:
    """The figures of `throughput` or `latency`, whichever the command line asks for."""
    names = ("load_format", "dtype", "quantization", "device", "threads", "compile")
    options = {name: getattr(args, name) for name in names}
    pythons = peer_pythons(args)
    if args.command == "latency" and args.breakdown:
        return [*breakdown_figures(args.model, [args.breakdown], args.new_tokens, options)]
    arguments = [str(Path(args.model).resolve()), "--threads", str(args.threads), "--device", args.device]
    if args.command == "throughput":
        work = throughput_work(args.requests, args.scale, ModelConfig.from_folder(args.model).vocab_size)
        share = EngineConfig.gpu_memory_utilization / (1 + len(args.peer))  # Manta comes last and takes what is left
        arguments += ["--max-model-len", str(longest(work)), "--memory-share", f"{share:.3f}"]
    else:
        shapes = [(int(batch), int(length)) for batch, _, length in (shape.partition("x") for shape in args.shapes)]
        arguments += ["--cache", str(Path(args.peer_cache).resolve()), "--weights", args.peer_weights]
    with contextlib.ExitStack() as stack:
        peers = []
        for engine, python in zip(args.peer, pythons, strict=True):
            peers.append(Peer(engine, python, arguments))
            stack.callback(peers[-1].close)
        if args.command == "throughput":
            return throughput_figures(args.model, work, options, args.repeats, peers)
        return latency_figures(args.model, shapes, args.new_tokens, args.repeats, peers, options)


def peer_pythons(args: argparse.Namespace) -> list[str]:
    """The Python of each `--peer`. Exits with a message where a peer has none."""
    if len(args.peer) != len(args.peer_python):
        raise SystemExit(f"--peer is given {len(args.peer)} times; --peer-python {len(args.peer_python)} times")
    return args.peer_python


def throughput_work(requests: int, scale: float, vocab_size: int) -> list[tuple[list[int], int]]:
    """nano-vllm's workload, drawn with its seed: prompts and outputs of 100 to 1,024 tokens each, times `scale`."""
    rng = random.Random(0)

    def length() -> int:
        return max(1, round(scale * rng.randint(100, 1024)))

    prompts = [[rng.randint(0, 10000) % vocab_size for _ in range(length())] for _ in range(requests)]
    return [(prompt, length()) for prompt in prompts]


def throughput_figures(
    model: str,
    work: list[tuple[list[int], int]],
    options: dict[str, Any],
    repeats: int = 1,
    peers: Sequence[Peer] = (),
) -> Figures:
    """Median seconds for all of `work`, offered at once. The engines take turns on the same prompts.

    Args:
        model: its folder.
        work: prompts, and how many tokens to answer each with; see `throughput_work`.
        options: Manta's, fields of `EngineConfig`.
        repeats: turns of each engine.
        peers: the other engines. They return tokens only; Manta's time includes making text of them.

    Raises:
        RuntimeError: an engine wrote more or fewer tokens than it was asked for.
    """
    from engine import LLM

    vocab_size, outputs = ModelConfig.from_folder(model).vocab_size, [output for _, output in work]
    llm = LLM(model, max_model_len=longest(work), **options)

    def manta(prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for count in new_tokens]
        begun = time.perf_counter()
        outs = llm.generate(prompts, params, use_tqdm=False)
        return {"seconds": time.perf_counter() - begun, "tokens": [out.outputs[0].token_ids for out in outs]}

    engines: dict[str, Generate] = {f"Manta {VERSION}": manta, **{peer.name: peer for peer in peers}}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for run in engines.values():
        run([[0]], [min(4, longest(work) - 1)])
    for turn in range(repeats):
        prompts = [[(token + turn) % vocab_size for token in prompt] for prompt, _ in work]  # no prefix is cached
        for name, run in engines.items():
            answer = run(prompts, outputs)
            if [len(ids) for ids in answer["tokens"]] != outputs:
                raise RuntimeError(f"{name} wrote {[len(ids) for ids in answer['tokens']]} tokens, not {outputs}")
            seconds[name].append(answer["seconds"])
    reference, *_ = seconds.values()
    read, written, figures = sum(len(prompt) for prompt, _ in work), sum(outputs), []
    for name, taken in seconds.items():
        median = statistics.median(taken)
        figures.append({
            "engine": name, "requests": len(work), "prompt tokens": read, "output tokens": written,
            "seconds": round(median, 2), "output tok/s": round(written / median, 1),
            "min": round(written / max(taken), 1), "max": round(written / min(taken), 1),
            "total tok/s": round((read + written) / median, 1),
        })  # fmt: skip
        if peers:
            ratios = [a / b for a, b in zip(reference, taken, strict=True)]
            figures[-1]["of Manta"] = round(statistics.median(ratios), 3)
    return figures


def longest(work: list[tuple[list[int], int]]) -> int:
    """Tokens of the longest prompt and its answer together."""
    return max(len(prompt) + output for prompt, output in work)


class Peer:
    """Another engine, which runs `peers.py` in a Python of its own. Calling it with a job returns the answer.

    Args:
        engine: its name in `peers.py`.
        python: the interpreter that has the engine installed.
        arguments: the rest of the command line: the model's folder and options.
        program: the program to run; it speaks the protocol of `peers.py`.

    Raises:
        RuntimeError: the process ends before it answers.
    """

    def __init__(self, engine: str, python: str, arguments: list[str], program: Path = PEERS):
        command, pipe = [python, "-I", str(program), engine, *arguments], subprocess.PIPE
        elsewhere = tempfile.gettempdir()  # transformers would import our kernels.py, see peers.py
        self.engine = engine
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=elsewhere)
        self.name: str = self._read()["engine"]

    def __call__(self, prompts: list[list[int]], new_tokens: int | list[int]) -> dict[str, Any]:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
            self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.engine} ended with status {self.process.wait()} and no answer; see its messages")
        return json.loads(line)

    def close(self) -> None:
        """Close its input, so that it ends by itself with the processes it may have; kill it if it does not."""
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def manta(model: str, batch: int, length: int, new_tokens: int, options: dict[str, Any]) -> tuple[Generate, Any]:
    """`LLM.generate` in the form of a peer, and its engine, which prefills a whole batch in one step."""
    from engine import LLM

    tokens = max(batch * length, 256)
    llm = LLM(model, max_num_seqs=batch, max_model_len=length + new_tokens, max_num_batched_tokens=tokens, **options)

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outs = llm.generate(prompts, params, use_tqdm=False)
        begun = min(out.metrics.arrival_time for out in outs)
        firsts = [out.metrics.first_token_time or 0.0 for out in outs]
        last = max(out.metrics.finished_time or 0.0 for out in outs)
        if max(firsts) - min(firsts) > (last - max(firsts)) / (new_tokens - 1):
            raise ValueError(
                f"a batch of {len(prompts)} did not start in one step: there is no memory for its KV cache"
            )
        tokens = [out.outputs[0].token_ids for out in outs]
        return {"prefill": max(firsts) - begun, "decode": last - max(firsts), "tokens": tokens}

    return generate, llm.core


def latency_figures(
    model: str, shapes: list[tuple[int, int]], new_tokens: int, repeats: int, peers: list[Peer], options: dict[str, Any]
) -> Figures:
    """Decode and prefill speed for (batch, prompt length) `shapes`, greedy. Engines take turns on the same prompts.

    Manta's engine is made anew for each shape, as llama.cpp's context is. Decode begins when all sequences have their
    first token. "GB/s" counts the weights that a step multiplies by and the KV cache of the context; weights count
    whole, also where a greedy sequence reads fewer bytes of them; of experts those count that are met by tokens which
    choose evenly. "of memory" compares that with what `read_bandwidth` found in the same round, because a shared
    machine changes its speed.
    """
    config, rng = ModelConfig.from_folder(model), random.Random(0)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size  # it is looked up only
    kv = config.layout(1).total  # numbers that a token stores

    def prompts_of(batch: int, length: int) -> list[list[int]]:  # always new ones: no prefix is cached
        return [[rng.randrange(config.vocab_size) for _ in range(length)] for _ in range(batch)]

    figures = []
    for batch, length in shapes:
        generate, core = manta(model, batch, length, new_tokens, options)
        engines: dict[str, Generate] = {f"Manta {VERSION}": generate} | {peer.name: peer for peer in peers}
        results: dict[str, Figures] = {name: [] for name in engines}
        warm, reads = prompts_of(batch, length), []
        for run in engines.values():  # for a whole turn, because new memory of a virtual machine is slow for seconds
            run(warm, new_tokens)
        turns = deque(engines.items())
        for _ in range(repeats):
            prompts = prompts_of(batch, length)
            for name, run in turns:
                results[name].append(run(prompts, new_tokens))
            turns.rotate()  # in a virtual machine, the first engine of a round may get other cores
            reads.append(read_bandwidth(core.facts["device"]))
        core.close()
        reference, *_ = results.values()
        # The context is counted as it is half-way through the answer.
        weights = core.facts["parameters"] - embedding - unmet(config, batch)
        size = 4 if core.facts["dtype"] == "float32" else 2
        in_codes = options.get("quantization", "auto") != "auto"
        mean = core.facts["memory"]["weights"] / core.facts["parameters"] if in_codes else size
        traffic = weights * mean + batch * kv * (length + new_tokens / 2) * size
        for name, answers in results.items():
            steps = [answer["decode"] / (new_tokens - 1) for answer in answers]
            step, prefill = statistics.median(steps), statistics.median(answer["prefill"] for answer in answers)
            shares = [traffic / step / read for step, read in zip(steps, reads, strict=True)]
            figures.append({
                "engine": name, "batch": batch, "prompt": length, "decode tok/s": round(batch / step, 1),
                "min": round(batch / max(steps), 1), "max": round(batch / min(steps), 1),
                "ms/token": round(step * 1e3, 2), "prefill tok/s": round(batch * length / prefill, 1),
                "GB/s": round(traffic / step / 1e9, 1), "of memory": round(statistics.median(shares), 3),
                f"first {COMPARED} as Manta": round(agreement(answers, reference), 3),
            })  # fmt: skip
    return figures


def unmet(config: ModelConfig, batch: int) -> float:
    """Weights of experts that no token of a step meets, if each of `batch` tokens chooses evenly."""
    if (e := config.experts) is None:
        return 0.0
    return sum(config.expert_layers) * e.count * 3 * config.hidden_size * e.size * (1 - e.top_k / e.count) ** batch


def breakdown_figures(model: str, batches: Sequence[int], new_tokens: int, options: dict[str, Any]) -> Iterator[Row]:
    """Median microseconds of each phase of a decode step, from the timeline that `--trace` writes.

    "the engine's own" is the host's work for a step. On a GPU it is everything that the engine's thread does except
    waiting. On a CPU it is everything except the model and the copies of KV blocks, which would be a GPU's work.
    "streams and text" is what the callers do between steps; a server does it in other processes. Each of the `batches`
    has two rows: with prompts of one length, all sequences need another block in the same step and none in the median
    step; with prompts of different lengths, some sequences do in each step. One engine serves all of them.
    """
    from engine import LLM

    cases = [[16 + i % spread for i in range(sequences)] for sequences in batches for spread in (1, 64)]
    most: dict[str, Any] = {"max_num_seqs": max(batches), "max_model_len": max(map(max, cases)) + new_tokens}
    with tempfile.TemporaryDirectory() as folder:
        path, seen = Path(folder, "trace.json"), 0
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        most |= {"trace": str(path), "distributed_executor_backend": "uni"}
        with LLM(model, **options | most) as llm:
            cuda = llm.core.facts["device"] != "cpu"
            for lengths in cases:
                for turn in range(2):  # the first warms up
                    prompts = [[5 + turn + i % 500] * length for i, length in enumerate(lengths)]
                    llm.generate(prompts, params, use_tqdm=False)
                events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
                spread = f"{min(lengths)} to {max(lengths)}" if len(set(lengths)) > 1 else str(lengths[0])
                yield {"prompt": spread} | phases_of(events[seen:], len(lengths), cuda)
                seen = len(events)


def phases_of(events: Figures, sequences: int, cuda: bool) -> dict[str, Any]:
    """Median phases of those steps of a timeline that decode `sequences` rows.

    Args:
        events: the timeline's spans, in order; "ts" and "dur" are microseconds.
        sequences: rows of the steps to look at.
        cuda: whether a lane of the timeline is a GPU's.

    Raises:
        ValueError: no step decodes that many.
    """
    begins = [i for i, event in enumerate(events) if event["name"] == "schedule"]
    steps = []
    for i, following in pairwise(begins):
        taken: dict[str, float] = defaultdict(float)
        device: dict[str, float] = defaultdict(float)
        sizes = set()
        for event in events[i:following]:
            if event["tid"] < 2:  # the engine's and the worker's lanes, not the GPU's
                taken[event["name"]] += event["dur"]
            if event["tid"] == 1 + cuda:
                device["model" if event["name"] in MODEL else event["name"]] += event["dur"]
            if "rows" in event["args"]:
                sizes.add((event["args"]["rows"], event["args"]["tokens"]))
        if sizes != {(sequences, sequences)}:
            continue
        whole, busy = events[following]["ts"] - events[i]["ts"], sum(taken[name] for name in ENGINE)
        shown = {name: taken[name] for name in ("schedule", "submit", "apply", "results", "update")}
        shown |= {"model": device["model"], "block copies": device[MOVES]}
        shown["the engine's own"] = busy - (taken["wait"] if cuda else device["model"] + device[MOVES])
        steps.append(shown | {"streams and text": whole - busy, "step": whole})
    if not steps:
        raise ValueError(f"no step has decoded {sequences} sequences")
    medians = {name: round(statistics.median(step[name] for step in steps), 1) for name in steps[0]}
    return {"sequences": sequences, "steps": len(steps)} | medians


def agreement(answers: Figures, reference: Figures) -> float:
    """Share of each sequence's first `COMPARED` tokens that are the same in both engines' answers."""
    same = [
        a == b
        for answer, expected in zip(answers, reference, strict=True)
        for got, wanted in zip(answer["tokens"], expected["tokens"], strict=True)
        for a, b in zip(got[:COMPARED], wanted[:COMPARED], strict=True)
    ]
    return statistics.mean(same)


@functools.cache
def gibibyte(device: str) -> Any:
    """1 GiB of ones. It is kept, because after a virtual machine gave memory back, whatever runs next is slower."""
    import torch

    return torch.ones(2**28, device="cpu" if device == "cpu" else "cuda")


def read_bandwidth(device: str) -> float:
    """Bytes a second at which torch sums 1 GiB, which is more than any cache holds. The best of five tries."""
    values = gibibyte(device)
    seconds = []
    for _ in range(6):  # the first one warms up
        begun = time.perf_counter()
        values.sum().item()
        seconds.append(time.perf_counter() - begun)
    return values.nbytes / min(seconds[1:])
