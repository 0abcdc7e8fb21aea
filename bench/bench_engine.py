"""The engine's benchmarks for `bench.py`: throughput, latency and its phases, with other engines taking turns."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from config import VERSION, EngineConfig
from model_config import ModelConfig
from plan import EngineCoreRequest
from sampling_params import SamplingParams
from turns import in_turns, median_ratio, seconds_of

Row = dict[str, Any]
Figures = list[Row]
Peers = Sequence[tuple[str, str]]  # other engines: the name and the Python of each
Generate = Callable[[list[list[int]], Any], dict[str, Any]]  # the jobs of peers.py, and their answers

PEERS = Path(__file__).parent / "peers.py"
COMPARED = 4  # first tokens of each answer that are compared; later ones differ by rounding
ENGINE = ("schedule", "submit", "wait", "update")  # phases of the engine's thread
MODEL = ("decode", "prepare_inputs", "model", "logits", "sample", "post_update")  # phases of the device
MOVES = "move_blocks"  # another phase of the device


@contextlib.contextmanager
def running(peers: Peers, model: str, options: dict[str, Any], *arguments: str) -> Iterator[list[Peer]]:
    """Run other engines on the same model and device as Manta's `options`."""
    words = [str(Path(model).resolve()), "--threads", str(options["threads"]), "--device", options["device"]]
    words += arguments
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Peer(*peer, words))) for peer in peers]


def compare_throughput(model: str, requests: int, scale: float, repeats: int, peers: Peers, **options: Any) -> Figures:
    """The figures of `bench.py throughput`, whose further options are fields of `EngineConfig`."""
    work = throughput_work(requests, scale, ModelConfig.from_folder(model).vocab_size)
    share = EngineConfig.gpu_memory_utilization / (1 + len(peers))  # Manta comes last and takes what is left
    limits = "--max-model-len", str(longest(work)), "--memory-share", f"{share:.3f}"
    with running(peers, model, options, *limits) as others:
        return throughput_figures(model, work, options, repeats, others)


def compare_latency(
    model: str, shapes: list[str], new_tokens: int, breakdown: int, repeats: int, peers: Peers, peer_cache: str,
    peer_weights: str, **options: Any,
) -> Figures:  # fmt: skip
    """The figures of `bench.py latency`, whose further options are fields of `EngineConfig`."""
    if breakdown:
        return [*breakdown_figures(model, [breakdown], new_tokens, options)]
    sizes = [(int(batch), int(length)) for batch, _, length in (shape.partition("x") for shape in shapes)]
    files = "--cache", str(Path(peer_cache).resolve()), "--weights", peer_weights
    with running(peers, model, options, *files) as others:
        return latency_figures(model, sizes, new_tokens, repeats, others, options)


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
    for run in engines.values():
        run([[0]], [min(4, longest(work) - 1)])

    def measure(name: str, turn: int) -> float:
        prompts = [[(token + turn) % vocab_size for token in prompt] for prompt, _ in work]  # no prefix is cached
        answer = engines[name](prompts, outputs)
        if [len(ids) for ids in answer["tokens"]] != outputs:
            raise RuntimeError(f"{name} wrote {[len(ids) for ids in answer['tokens']]} tokens, not {outputs}")
        return answer["seconds"]

    seconds = in_turns({name: functools.partial(measure, name) for name in engines}, repeats, warm_up=False)
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
            figures[-1]["of Manta"] = median_ratio(reference, taken)
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
        # A whole turn warms up, because new memory of a virtual machine is slow for seconds.
        prompts = [prompts_of(batch, length) for _ in range(repeats + 1)]
        runs: dict[str, Callable[[int], Any]] = {
            name: functools.partial(answer_turn, run, prompts, new_tokens) for name, run in engines.items()
        }
        runs["memory"] = functools.partial(read_bandwidth, core.facts["device"])
        results = in_turns(runs, repeats)
        reads = results.pop("memory")
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


def answer_turn(run: Generate, prompts: Sequence[Any], new_tokens: int, turn: int) -> Row:
    """What an engine makes of the prompts of a turn."""
    return run(prompts[turn], new_tokens)


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


def read_bandwidth(device: str, turn: int = 0) -> float:
    """Bytes a second at which torch sums 1 GiB, which is more than any cache holds. The best of five tries, whosever
    `turn` it is (`in_turns`)."""
    values = gibibyte(device)
    seconds = [seconds_of(lambda: values.sum().item()) for _ in range(6)]  # the first one warms up
    return values.nbytes / min(seconds[1:])


def overload_figures(model: str, repeats: int) -> Figures:
    """Time four times the work that the KV pool holds, offered all at once, and offered as much as fits at a time.

    Each row is the median of `repeats` runs, and "of the paced" compares it with the second way.
    """
    from engine import EngineCore

    size, blocks = 16, 256
    rng = random.Random(0)
    work: list[tuple[list[int], int]] = []
    while sum(len(prompt) + output for prompt, output in work) < 4 * size * blocks:
        work.append(([rng.randrange(5, 1000) for _ in range(rng.randint(50, 250))], rng.randint(50, 250)))
    capacity = size * blocks // max(len(prompt) + output for prompt, output in work)
    figures = []
    for mode, reserve in (("recompute", 1.0), ("recompute", 0.0), ("swap", 1.0), ("swap", 0.0), ("auto", 1.0)):
        options: dict[str, Any] = {
            "model": model, "dtype": "float32", "device": "cpu", "block_size": size, "num_gpu_blocks_override": blocks,
            "max_model_len": 512, "max_num_batched_tokens": 512, "preemption_mode": mode,
            "schedule_conservativeness": reserve, "swap_space": 4.0,
        }  # fmt: skip
        core = EngineCore(EngineConfig(**options))

        def offer(at_once: int, turn: int, core: EngineCore = core) -> dict[str, float]:
            core.reset_prefix_cache()
            begun, before, steps = time.perf_counter(), dict(core.scheduler.counters), 0
            waiting = [(f"{turn}-{at_once}-{i}", *request) for i, request in enumerate(work)][::-1]
            while waiting or core.has_work():
                while waiting and len(core.scheduler.requests) < at_once:
                    name, prompt, output = waiting.pop()
                    params = SamplingParams(max_tokens=output, ignore_eos=True)
                    core.add(EngineCoreRequest(name, prompt, params))
                core.step()
                steps += 1
            counts = {name: value - before[name] for name, value in core.scheduler.counters.items()}
            return counts | {"seconds": time.perf_counter() - begun, "steps": steps}

        sizes = capacity, len(work)
        runs = in_turns({at_once: functools.partial(offer, at_once) for at_once in sizes}, repeats, warm_up=False)
        paced = statistics.median(run["seconds"] for run in runs[capacity])
        for at_once, results in runs.items():
            result = sorted(results, key=lambda run: run["seconds"])[len(results) // 2]
            again = result["num_recomputed_tokens_total"] + result["num_swapped_tokens_total"]
            figures.append({
                "mode": mode, "conservativeness": reserve, "offered at once": at_once, "steps": result["steps"],
                "output tok/s": round(sum(output for _, output in work) / result["seconds"]),
                "of the paced": round(paced / result["seconds"], 3), "preemptions": result["num_preemptions_total"],
                "recomputed + swapped": round(again / result["num_computed_tokens_total"], 4),
            })  # fmt: skip
    return figures
