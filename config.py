"""What is fixed at start: engine and server options, and the model's shape; and files that only diagnose.

Standard library only: every process reads this file, and most of them never import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

VERSION = "0.1.0"
PROG = "manta" if __package__ else "server.py"  # the command: installed, this file is in a package
DEMO = str(Path(__file__).parent / "demo")
MAX_CONTEXT = 2**24  # tokens
STEP_TOKENS = 2048  # of a step, by default; on a GPU there are more, see device/memory.py
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # torch's other names, which vLLM takes, too
TENSORS = "tensors"  # as the option `weights`: they came as tensors, and cannot be loaded again
BACKEND_NAMES = {"torchrun": "external_launcher"}  # another name of an executor, and vLLM's
MODEL_TAKES = "--model takes a folder in Hugging Face layout or a model's id on the hub, like Qwen/Qwen3-0.6B"


def option(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    """A field with its default, one line of help and a number's range; with help it is also a command-line flag."""
    return field(default=default, metadata={"help": help, "low": low, "high": high})


def check_fields(record: Any) -> None:
    """Check each field of a dataclass of `option`s against its annotation and range.

    Raises:
        ValueError: names the field, the value received and what is allowed.
    """
    hints = get_type_hints(type(record))
    for f in dataclasses.fields(record):
        value, hint, low, high = getattr(record, f.name), hints[f.name], f.metadata["low"], f.metadata["high"]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise ValueError(f"{f.name} is {value!r}; allowed: {', '.join(map(str, get_args(hint)))}")
            continue
        if get_origin(hint) is tuple:
            if not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
                raise ValueError(f"{f.name} is {value!r}; it must be a list of strings")
            continue
        allowed = [a for a in get_args(hint) or (hint,) if a is not type(None)]
        if value is None and type(None) in get_args(hint):
            continue
        numeric = float in allowed and isinstance(value, int) and not isinstance(value, bool)
        if not (numeric or any(type(value) is a for a in allowed)):
            raise ValueError(f"{f.name} is {value!r}; it must be of type {' or '.join(a.__name__ for a in allowed)}")
        if low is not None and not low <= value <= (math.inf if high is None else high):
            upper = "" if high is None else f" and at most {high}"
            raise ValueError(f"{f.name} is {value!r}; it must be at least {low}{upper}")


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine; the names are vLLM's. `LLM(model, **fields)` and the command line take the same ones."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {  # of the help
        "model": (
            "model", "revision", "download_dir", "load_format", "skip_tokenizer_init", "task", "pooling_type",
            "generation_config", "seed"),
        "device": ("device", "backend", "dtype", "enforce_eager", "compile", "threads", "batch_invariant"),
        "memory and batches": (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "gpu_memory_utilization",
            "num_gpu_blocks_override", "swap_space", "enable_prefix_caching", "num_state_snapshots"),
        "scheduling": (
            "scheduling_policy", "scheduler_delay_factor", "enable_chunked_prefill", "preemption_mode",
            "schedule_conservativeness", "async_scheduling", "num_lookahead_slots"),
        "several devices, and processes": (
            "tensor_parallel_size", "pipeline_parallel_size", "pipeline_layer_partition", "data_parallel_size",
            "enable_expert_parallel", "distributed_executor_backend", "startup_timeout", "step_timeout",
            "max_worker_restarts"),
        "engines on several hosts, and a changing number of them": (
            "data_parallel_backend", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port",
            "data_parallel_secret_file",
            "headless", "data_parallel_start_rank", "data_parallel_external_lb", "data_parallel_rank",
            "data_parallel_size_max", "data_parallel_autoscale"),
        "limits of a request": ("max_logprobs",),
        "diagnostics": (
            "log_level", "log_format", "disable_log_stats", "log_scheduler", "trace", "torch_profiler_dir",
            "sanitize_kv"),
    }  # fmt: skip
    model: str = option(
        DEMO,
        "folder of a model in Hugging Face layout, or a model's id on the hub, like Qwen/Qwen3-0.6B (default: the "
        "bundled demo)",
    )
    _: KW_ONLY
    revision: str | None = option(
        None, "branch, tag or commit of a model that is downloaded from the hub (default: its main branch)"
    )
    download_dir: str | None = option(
        None, "folder that models are downloaded to (default: the hub's cache, which HF_HOME moves)"
    )
    snapshot: str = option("", "")  # the folder that the model was downloaded to, if it was; see `hub.find_model`
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = option(
        "auto", "type of weights, activations and KV cache; auto: the checkpoint's, but on a CPU never float16"
    )
    device: Literal["auto", "cuda", "cpu"] = option("auto", "where the model runs; auto takes a GPU if there is one")
    backend: Literal["auto", "triton", "cpu", "reference"] = option(
        "auto", "kernels.py, cpu/ops.py or reference.py; auto is triton on cuda, cpu on cpu"
    )
    max_model_len: int | None = option(
        None, "tokens of a prompt and its output together (default: what the model allows)", 2, MAX_CONTEXT
    )
    max_num_seqs: int = option(256, "sequences in one step", 1, 65536)
    max_num_batched_tokens: int | None = option(
        None,
        "tokens in one step (default: 2048, on a GPU 8192, on one of 80 GB 16384, and at least max_num_seqs)",
        1,
        2**20,
    )
    block_size: int = option(64, "tokens in one KV block; on cuda 16, 32, 64 or 128", 1, 4096)
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that the engine may use", 0.01, 1.0)
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, instead of what fits", 1, 2**31)
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prompt beginnings")
    num_state_snapshots: int | None = option(
        None,
        "for models with recurrent states: how many the prefix cache keeps (default: as many as max_num_seqs, but on a "
        "CPU no more than half of the free memory holds beside theirs)",
        0,
        2**20,
    )
    enable_chunked_prefill: bool = option(
        True, "cut long prompts and run them beside decodes; else whole prompts first, and alone"
    )
    scheduling_policy: Literal["auto", "fcfs", "priority", "fair"] = option(
        "auto",
        "fcfs: first come first served; priority: the lowest value first; fair: the client that has had the fewest "
        "tokens first, where a client is its API key, else its address; auto: fair with several API keys, else fcfs",
    )
    scheduler_delay_factor: float = option(
        0.0, "without chunked prefill: wait this times the last prefill's seconds before the next one", 0.0, 1000.0
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = option(
        "auto", "a preempted request computes its tokens again, or its KV blocks wait in host memory; auto: the cheaper"
    )
    swap_space: float | None = option(
        None,
        "GiB of host memory for swapped KV blocks and for cached prefixes that the device has no room for; default: 4, "
        "or on a CPU, where it is the same memory, none unless preemption_mode is swap",
        0.0,
        2.0**20,
    )
    schedule_conservativeness: float = option(
        1.0,
        "share of the running requests' expected growth that admission keeps free; 0 admits whatever fits now",
        0.0,
        10.0,
    )
    tensor_parallel_size: int = option(1, "devices that each hold a share of every weight", 1, 64)
    pipeline_parallel_size: int = option(
        1, "stages, each of which holds some of the layers on devices of its own; steps follow each other through them",
        1, 64,
    )  # fmt: skip
    pipeline_layer_partition: str | None = option(
        None, "how many layers each stage holds, like 12,16 (default: so that all stages read as many bytes)"
    )
    data_parallel_size: int = option(
        1, "engines, each with the whole model; the server divides requests among them", 1, 64
    )
    data_parallel_backend: Literal["mp", "ray"] = option(
        "mp",
        "who starts these engines: mp: this server, and each host that is headless, its own; ray: Ray, on nodes of the "
        "cluster that this machine belongs to",
    )
    data_parallel_size_local: int | None = option(
        None, "how many of these engines run on this host (default: all); the others are on hosts that are headless",
        0, 64,
    )  # fmt: skip
    data_parallel_address: str | None = option(
        None, "address of the server's host, which listens there for the other hosts, and which they connect to"
    )
    data_parallel_rpc_port: int = option(29550, "port there", 1, 65535)
    data_parallel_secret_file: str | None = option(
        None, "file with the secret that all hosts share; MANTA_DATA_PARALLEL_SECRET is the other way to give it"
    )
    headless: bool = option(False, "run this host's engines for the server at data_parallel_address, without HTTP")
    data_parallel_start_rank: int | None = option(None, "with headless: the first of this host's engines", 0, 63)
    data_parallel_external_lb: bool = option(
        False, "serve one of these engines alone, data_parallel_rank; the others have servers of their own, and "
        "something before all of them divides requests",
    )  # fmt: skip
    data_parallel_rank: int = option(0, "with data_parallel_external_lb: which of the engines this is", 0, 63)
    data_parallel_size_max: int | None = option(
        None, "most engines that POST /scale may ask for (default: their number cannot be changed)", 1, 64
    )
    data_parallel_autoscale: float | None = option(
        None, "seconds that a request may wait before more engines are started, up to data_parallel_size_max; they end "
        "when fewer suffice, down to data_parallel_size",
        0.01, 3600.0,
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False, "divide a model's experts among all tensor and data ranks, each of which holds whole ones"
    )
    async_scheduling: bool | None = option(
        None,
        "plan a step before the previous step's result is in; by default on cuda, and where workers are processes",
    )
    expert_rendezvous: str = option("", "")  # a file by which the ranks of engines that share experts meet
    lockstep: bool = option(False, "")  # these engines step together in waves, as a model with experts needs it
    distributed_executor_backend: Literal["auto", "uni", "mp", "external_launcher", "torchrun", "ray"] = option(
        "auto",
        "uni: the worker in the engine's process; mp: each in its own; external_launcher: in those that torchrun or "
        "Slurm's srun starts, for several hosts (torchrun is another name for it); ray: in actors on any host of a Ray "
        "cluster; auto: uni on one device, but for a server mp, or ray where the ranks do not fit this host and Ray "
        "runs",
    )
    step_timeout: float | None = option(
        None,
        "seconds that a step may take before the workers are started anew (default: 20 times as long as warm-up says "
        "that the largest step takes, at least 30)",
        0.1,
        1e6,
    )
    startup_timeout: float = option(1800.0, "seconds that workers, or an engine process, may take to start", 0.1, 1e6)
    max_worker_restarts: int = option(
        20, "times in a row, without a step that went through, that workers are started anew before the engine ends", 1
    )
    enforce_eager: bool = option(
        False,
        "on cuda: launch each kernel by itself, instead of a CUDA graph for all of a decode step; "
        "on a CPU: make no C++",
    )
    num_lookahead_slots: int = option(0, "KV slots that each sequence owns ahead of its tokens", 0, 1024)
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "the least important that is logged to stderr; info has a line for each request, without its text"
    )
    log_format: Literal["text", "json"] = option("text", "lines of plain words, or a JSON object on each line")
    disable_log_stats: bool = option(False, "log no line with the throughput every 10 s while there is work")
    log_scheduler: str | None = option(
        None, "file for a journal of JSON lines: what came to the scheduler and what it decided"
    )
    trace: str | None = option(
        None, "file for a timeline of each step's phases, in the engine and on the device, as Perfetto shows it"
    )
    torch_profiler_dir: str | None = option(
        None, "folder for what torch's profiler records from start_profile to stop_profile; without it there is none"
    )
    batch_invariant: bool = option(
        False, "logits bit-equal whatever runs beside a request, however it is chunked or cached; slower"
    )
    sanitize_kv: bool = option(False, "for debugging: check in every step that no request reads or writes another's KV")
    generation_config: Literal["auto", "none"] = option(
        "auto", "auto: requests that do not set a sampling parameter get it from the model's generation_config.json"
    )
    task: Literal["auto", "generate", "embed", "score", "classify"] = option(
        "auto",
        "what prompts are turned into; auto: classify for a model with a classification head, embed for a folder of "
        "sentence-transformers, else generate",
    )
    pooling_type: Literal["auto", "last", "mean", "cls"] = option(
        "auto", "which hidden states make an embedding; auto: what the model's folder says, else the last token's"
    )
    max_logprobs: int = option(20, "likeliest tokens whose log-probabilities a request may ask for", 0, 1024)
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and outputs are token ids alone")
    load_format: Literal["auto", "dummy"] = option("auto", "auto reads the safetensors; dummy makes up the weights")
    compile: bool = option(
        False,
        "on a CPU: make C++ of what is between the products before the first request, not while a large model serves; "
        "and keep a second copy of the weights, compressed without loss, for one sequence at a time",
    )
    threads: int | None = option(
        None,
        "torch's threads in each rank on a CPU (default: one per core, but a small model leaves the server a core)",
        1,
        4096,
    )
    beside_server: bool = option(False, "")  # whether a server's processes share the cores; set where they start
    num_host_blocks: int | None = option(None, "")  # instead of what fits; set where workers are started anew,
    num_host_states: int | None = option(None, "")  # as is this
    weights: str = option("", "")  # folder or file that `update_weights` has put in the place of the model's own,
    weights_stamp: str = option("", "")  # what it looked like then; see `stamp_of`
    weights_version: int = option(0, "")  # how often weights were updated
    runs_functions: bool = option(False, "")  # whether the engine's clients may name functions for workers to run
    seed: int = option(0, "seed of requests that bring none, and of dummy weights", 0, 2**63 - 1)

    @property
    def folder(self) -> str:
        """Where the model's files are."""
        return self.snapshot or self.model

    @property
    def model_name(self) -> str:
        """The model's id on the hub, or the name of its folder."""
        return self.model if self.snapshot else os.path.basename(os.path.abspath(self.model))

    @property
    def token_budget(self) -> int:
        """Tokens in one step at most. On a GPU `memory.settle_tokens` must have been called."""
        return self.max_num_batched_tokens or max(STEP_TOKENS, self.max_num_seqs)

    @property
    def world_size(self) -> int:
        """Ranks of one engine: those of all its stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_engines(self) -> int:
        """How many engines there can be in all."""
        return max(self.data_parallel_size, self.data_parallel_size_max or 1)

    @property
    def data_parallel_sizes(self) -> range | None:
        """How many engines there may be; None: their number is fixed.

        One that shares experts has memory for the part of them that it starts with, so there cannot be fewer.
        """
        if self.data_parallel_size_max is None:
            return None
        return range(self.data_parallel_size if self.enable_expert_parallel else 1, self.max_engines + 1)

    @property
    def local_engines(self) -> int:
        """How many of them can be on this host, which they share."""
        if self.data_parallel_external_lb:
            return 1
        if self.data_parallel_backend == "ray":
            return 0
        return self.max_engines if self.data_parallel_size_local is None else self.data_parallel_size_local

    @property
    def first_rank(self) -> int:
        """The first of this host's engines."""
        return self.data_parallel_rank if self.data_parallel_external_lb else self.data_parallel_start_rank or 0

    @property
    def pools(self) -> bool:
        """Whether prompts are turned into vectors, and nothing is sampled. `pooling.settle` must have been called."""
        return self.task in ("embed", "score", "classify")

    def __post_init__(self) -> None:
        check_fields(self)
        for name, others in (("dtype", DTYPE_NAMES), ("distributed_executor_backend", BACKEND_NAMES)):
            given = getattr(self, name)
            object.__setattr__(self, name, others.get(given, given))
        if self.token_budget < self.max_num_seqs:  # else the last of them would never get a token
            raise ValueError(
                f"max_num_batched_tokens is {self.token_budget}; it must be at least max_num_seqs, {self.max_num_seqs}"
            )
        if self.num_state_snapshots and not self.enable_prefix_caching:
            raise ValueError(
                f"num_state_snapshots is {self.num_state_snapshots}; without prefix caching it must be 0 or left out"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.distributed_executor_backend == "uni" and (size := getattr(self, name)) > 1:
                raise ValueError(
                    f"{name} is {size}; with distributed_executor_backend 'uni', which has one worker, it must be 1"
                )
        self._check_stages()
        if self.batch_invariant and self.tensor_parallel_size > 1:  # which rank adds first depends on a message's size
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; with batch_invariant, which a sum over ranks is "
                "not, it must be 1"
            )
        if self.enable_expert_parallel and self.max_engines > 1:
            if self.distributed_executor_backend not in ("auto", "mp"):
                raise ValueError(
                    f"distributed_executor_backend is {self.distributed_executor_backend!r}; with "
                    "enable_expert_parallel and several engines, whose workers must be replaced together, it must be "
                    "'auto' or 'mp'"
                )
            if self.batch_invariant:  # on a CPU it runs token by token, and then engines would not keep step
                raise ValueError(
                    "batch_invariant is True; with enable_expert_parallel and several engines it must be False"
                )
        self._check_hosts()
        if self.scheduler_delay_factor and self.enable_chunked_prefill:  # it would do nothing
            raise ValueError(
                f"scheduler_delay_factor is {self.scheduler_delay_factor}; it must be 0 with chunked prefill"
            )

    def _check_stages(self) -> None:
        stages, listed = self.pipeline_parallel_size, self.pipeline_layer_partition
        if stages > self.max_num_seqs:
            raise ValueError(
                f"pipeline_parallel_size is {stages}; it must be at most max_num_seqs, {self.max_num_seqs}, because "
                "each stage works for other sequences"
            )
        if stages > 1 and self.enable_expert_parallel and self.max_engines > 1:
            raise ValueError(
                f"pipeline_parallel_size is {stages}; with enable_expert_parallel and several engines, which meet in "
                "every step, it must be 1"
            )
        if listed is not None and not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", listed, re.ASCII):
            raise ValueError(f"pipeline_layer_partition is {listed!r}; it must be counts of layers, like 12,16")
        if listed is not None and (count := len(listed.split(","))) != stages:
            raise ValueError(
                f"pipeline_layer_partition is {listed!r}, {count} counts; there must be one for each stage, and "
                f"pipeline_parallel_size is {stages}"
            )

    def _check_hosts(self) -> None:
        size, local, most = self.data_parallel_size, self.data_parallel_size_local, self.data_parallel_size_max
        by_ray = self.data_parallel_backend == "ray"
        several = by_ray or self.headless or (local is not None and local < size)
        if by_ray and (self.headless or local is not None or self.data_parallel_external_lb):
            raise ValueError(
                "data_parallel_backend is 'ray', which chooses nodes and starts engines there; headless, "
                "data_parallel_size_local and data_parallel_external_lb must not be given"
            )
        if by_ray and self.distributed_executor_backend in ("ray", "external_launcher"):
            raise ValueError(
                "data_parallel_backend is 'ray', so the ranks of an engine are on one node; "
                f"distributed_executor_backend is {self.distributed_executor_backend!r} and must be auto, mp or uni"
            )
        if local is not None and not self.headless <= local <= size:
            raise ValueError(
                f"data_parallel_size_local is {local}; it must be from {int(self.headless)} to data_parallel_size, "
                f"{size}"
            )
        if several and not by_ray and self.data_parallel_address is None:
            raise ValueError("data_parallel_address is not given; engines on several hosts need it")
        if self.headless:
            first = self.data_parallel_start_rank or 0
            if first + (size if local is None else local) > size:
                raise ValueError(
                    f"data_parallel_start_rank is {first}, with {size if local is None else local} engines here "
                    f"(data_parallel_size_local); the last one must be below data_parallel_size, {size}"
                )
        elif self.data_parallel_start_rank is not None:
            raise ValueError(
                f"data_parallel_start_rank is {self.data_parallel_start_rank}; it is for --headless: on the server's "
                "host it is 0"
            )
        if self.data_parallel_external_lb and (several or local is not None or most is not None):
            raise ValueError(
                "data_parallel_external_lb is True, so this host serves one engine; headless, data_parallel_size_local "
                "and data_parallel_size_max must not be given"
            )
        if self.data_parallel_rank >= max(size, most or 0):
            raise ValueError(f"data_parallel_rank is {self.data_parallel_rank}; it must be below {size}")
        if most is not None and most < size:
            raise ValueError(f"data_parallel_size_max is {most}; it must be at least data_parallel_size, {size}")
        if most is not None and (several or local is not None):
            raise ValueError(
                f"data_parallel_size_max is {most}; with data_parallel_size_local, or engines on several hosts, which "
                "start and end there, it must not be given"
            )
        if self.data_parallel_autoscale is not None and most is None:
            raise ValueError(
                f"data_parallel_autoscale is {self.data_parallel_autoscale}; it needs data_parallel_size_max"
            )
        if self.enable_expert_parallel and (several or self.data_parallel_external_lb):
            raise ValueError(
                "enable_expert_parallel is True; engines that share experts must be on one host, behind one server: "
                "headless, a smaller data_parallel_size_local and data_parallel_external_lb must not be given"
            )
        if self.local_engines > 1 and self.distributed_executor_backend == "external_launcher":
            raise ValueError(
                f"data_parallel_size is {self.data_parallel_size}; with distributed_executor_backend "
                "'external_launcher', whose ranks are those of one engine, it must be 1"
            )


def weights_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an engine's options, or facts, by which another engine has the same weights."""
    return {name: options[name] for name in ("weights", "weights_stamp", "weights_version")}


def stamp_of(source: str) -> str:
    """Stands for the state of the safetensors in a folder, or of one such file: names, sizes and times.

    Raises:
        ValueError: there are none.
    """
    path = Path(source)
    try:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors*"))
        states = [(file.name, (state := file.stat()).st_size, state.st_mtime_ns) for file in files]
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}") from None
    if not states:
        raise ValueError(f"there are no safetensors in {source!r:.200}; it must be a folder with them, or such a file")
    return hashlib.sha256(repr(states).encode()).hexdigest()


def read_json(folder: str, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in `folder/name`, or `default` where there is no such file.

    Raises:
        ValueError: the folder is missing, the file is missing with no default, or it holds no JSON object.
    """
    path = os.path.join(folder, name)
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}; {MODEL_TAKES}")
    if not os.path.isfile(path):
        if default is None:
            raise ValueError(f"{folder} has no {name}; {MODEL_TAKES}")
        return default
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    return content
