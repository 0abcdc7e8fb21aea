"""The engine's options, users' classes by their names, and how processes start and read JSON.

Standard library only: every process reads this file, and most of them never import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from speculation.options import SpeculativeConfig

T = TypeVar("T")
VERSION = "0.2.0"
PROG = "manta" if __package__ else "server.py"  # the command: installed, this file is in a package
DEMO = str(Path(__file__).parent / "demo")
MAX_CONTEXT = 2**24  # tokens
STEP_TOKENS = 2048  # of a step, by default; on a GPU there are more, see device/memory.py
LIMITS = re.compile(r'\w+=\d{1,4}|\{(\s*"\w+"\s*:\s*\d{1,4}\s*(,|(?=\})))+\}')  # of limit_mm_per_prompt
OTHER_NAMES = {  # of values, which vLLM takes, too
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "distributed_executor_backend": {"torchrun": "external_launcher"},
}
TENSORS = "tensors"  # as the option `weights`: they came as tensors, and cannot be loaded again
POLICY_NAMES = ("auto", "fcfs", "priority", "fair")
FAIR_STEP = 0.1  # seconds that a step takes at most, by default, where clients share the engine (`fair`)
MOST_DRAFTING = 32  # sequences; in a step with more of them none has drafts, so that its logits have room
NAMED = re.compile(r"[\w.]+:\w+")  # MODULE:CLASS, see `load_named`
# Methods of users' classes whose failure leaves the engine whole.
REFUSING = "__init__", "__call__", "propose", "arrived", "rank", "account", "instead"
Check = Callable[..., str]  # see `load_named`
MODEL_TAKES = "--model takes a folder in Hugging Face layout, a GGUF file, or an id on the hub, like Qwen/Qwen3-0.6B"
PACKAGES = ("torch", "safetensors", "tokenizers", "jinja2", "numpy", "psutil", "tqdm")  # that every engine needs


def lacking(packages: Iterable[str]) -> str:
    """What to do where some of these packages are not installed; empty if all are."""
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    how = "activate the environment that has them, as by `. .venv/bin/activate`, or `pip install -r requirements.txt`"
    return f"{sys.executable} has no {named}: {how}" if missing else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of the message that refuses an unknown name: the known name that is most like it, if one is."""
    return "".join(f"; the nearest is {near}" for near in difflib.get_close_matches(name, names, 1))


def naming_nearest(cls: type[T]) -> type[T]:
    """Let a dataclass refuse an unknown field by a ValueError with the one that is most like it, or with all."""
    init: Callable[..., None] = cls.__init__
    names = sorted(inspect.signature(cls).parameters)

    @functools.wraps(init)
    def checked(self: T, *args: Any, **fields: Any) -> None:
        if unknown := [name for name in fields if name not in names]:
            hint = nearest(unknown[0], names) or f"; there are {', '.join(names)}"
            raise ValueError(f"{cls.__name__} has no {unknown[0]}{hint}")
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


def option(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    """A field with its default, one line of help and a number's range; with help it is also a command-line flag."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


def check_fields(record: Any) -> None:
    """Check each field of a dataclass of `option`s against its annotation and range; a ValueError if one is wrong."""
    hints = get_type_hints(type(record))
    for f in dataclasses.fields(record):
        value, hint = getattr(record, f.name), hints[f.name]
        low, high = f.metadata["low"], f.metadata["high"]
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


@naming_nearest
@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine; the names are vLLM's. `LLM(model, **fields)` and the command line take the same ones."""

    GROUPS: ClassVar[dict[str, str]] = {  # titles in the help, and the first option of each
        "model": "model", "device": "device", "memory and batches": "max_model_len", "scheduling": "scheduling_policy",
        "several devices, and processes": "tensor_parallel_size",
        "engines on several hosts": "data_parallel_size_local", "adapters": "enable_lora",
        "limits of a request, and changes of its logits": "max_logprobs", "diagnostics": "log_level",
    }  # fmt: skip
    model: str = option(
        DEMO, "folder in Hugging Face layout, GGUF file, or id on the hub, like Qwen/Qwen3-0.6B (default: the demo)"
    )
    _: KW_ONLY
    revision: str | None = option(None, "branch, tag or commit of a model on the hub (default: its main branch)")
    download_dir: str | None = option(None, "folder of downloaded models (default: the hub's cache, see HF_HOME)")
    hf_overrides: str | None = option(None, "JSON object of fields of config.json with other values; null drops one")
    quantization: Literal["auto", "int8", "int8_per_channel_weight_only", "int4", "fp8"] = option(
        "auto", "auto keeps matrices as they are saved; others round plain ones; int8 rounds products' inputs, too"
    )
    load_format: Literal["auto", "dummy"] = option("auto", "auto reads the safetensors; dummy makes up the weights")
    model_plugin: tuple[str, ...] = option((), "modules that add model families, parts of layers or weight schemes")
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and outputs are token ids alone")
    max_image_pixels: int = option(40_000_000, "width times height of one image", 1, 89_478_485)  # Pillow warns beyond
    limit_mm_per_prompt: str = option('{"image": 16}', "images in one prompt, as JSON, or like image=16")
    task: Literal["auto", "generate", "embed", "score", "classify"] = option(
        "auto",
        "what prompts are turned into; auto: classify for a model with a classification head, embed for a folder of "
        "sentence-transformers, else generate",
    )
    pooling_type: Literal["auto", "last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"] = option(
        "auto", "which hidden states make an embedding; auto: what the model's folder says, else the last token's"
    )
    generation_config: Literal["auto", "none"] = option(
        "auto", "auto: requests that do not set a sampling parameter get it from the model's generation_config.json"
    )
    seed: int = option(0, "seed of requests that bring none, and of dummy weights", 0, 2**63 - 1)
    device: Literal["auto", "cuda", "cpu"] = option("auto", "where the model runs; auto takes a GPU if there is one")
    backend: Literal["auto", "triton", "cpu", "reference"] = option(
        "auto", "kernels.py, cpu/ops.py or reference.py; auto is triton on cuda, cpu on cpu"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = option(
        "auto", "type of weights, activations and KV cache; auto: the checkpoint's, or one that a CPU is fast with"
    )
    enforce_eager: bool = option(False, "on cuda: make no CUDA graphs of decode steps; on a CPU: make no C++")
    compile: bool = option(
        False,
        "on a CPU: make C++ of what is between the products before the first request, not while the model serves",
    )
    threads: int | None = option(None, "CPU threads a rank (default: one a core; small models leave one free)", 1, 4096)
    batch_invariant: bool = option(False, "bit-equal logits however a request is batched, chunked or cached; slower")
    max_model_len: int | None = option(None, "tokens of prompt and output (default: the model's limit)", 2, MAX_CONTEXT)
    max_num_seqs: int = option(256, "sequences in one step", 1, 65536)
    max_num_batched_tokens: int | None = option(
        None, "tokens in a step, max_num_seqs at least (2048; GPU 8192, 80 GB 16384; policy fair: 0.1 s)", 1, 2**20
    )
    block_size: int = option(64, "tokens in one KV block; on cuda 16, 32, 64 or 128", 1, 4096)
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = option(
        "auto", "the KV cache's type; auto: that of activations; fp8: e4m3, half as large, with the checkpoint's scales"
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that the engine may use", 0.01, 1.0)
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, instead of what fits", 1, 2**31)
    swap_space: float | None = option(
        None,
        "GiB of host memory for swapped KV blocks and for cached prefixes that the device has no room for; default: 4, "
        "or on a CPU, where it is the same memory, none unless preemption_mode is swap",
        0.0,
        2.0**20,
    )
    kv_disk: str | None = option(None, "folder for the KV blocks of cached prefixes, which outlive the server there")
    kv_disk_size: float = option(16.0, "GiB that the files in kv_disk may take, of all engines together", 1e-6, 2.0**30)
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prompt beginnings")
    num_state_snapshots: int | None = option(
        None, "recurrent states the prefix cache keeps (default: max_num_seqs; CPU: in half of free memory)", 0, 2**20
    )
    scheduling_policy: str = option(
        "auto",
        "fcfs: first come first served; priority: the lowest value first; fair: the client that has had the fewest "
        "tokens first, where a client is its API key, else its address; auto: fair with several API keys, else fcfs; "
        "MODULE:CLASS: a Policy of your own",
    )
    scheduler_delay_factor: float = option(
        0.0, "without chunked prefill: wait this times the last prefill's seconds before the next one", 0.0, 1000.0
    )
    enable_chunked_prefill: bool = option(True, "run long prompts in parts, beside decodes; else whole and alone")
    preemption_mode: Literal["auto", "recompute", "swap"] = option(
        "auto", "a preempted request computes its tokens again, or its KV blocks wait in host memory; auto: the cheaper"
    )
    schedule_conservativeness: float = option(1.0, "share of expected growth to keep free; 0: none", 0.0, 10.0)
    async_scheduling: bool | None = option(None, "plan before results are in (default: cuda or worker processes)")
    num_lookahead_slots: int = option(0, "KV slots that each sequence owns ahead of its tokens", 0, 1024)
    speculative_config: str | None = option(
        None,
        'JSON object: {"method": M, "num_speculative_tokens": N} guesses up to N tokens, which one step verifies; M is '
        'ngram (what followed the latest tokens before), suffix, mtp (the model\'s own head), with "model": FOLDER '
        "draft_model, eagle, eagle3, or MODULE:CLASS of one's own",
    )
    tensor_parallel_size: int = option(1, "devices that each hold a share of every weight", 1, 64)
    pipeline_parallel_size: int = option(1, "stages that each hold some of the layers, on their own devices", 1, 64)
    pipeline_layer_partition: str | None = option(None, "layers by stage, like 12,16 (default: as many bytes in each)")
    data_parallel_size: int = option(1, "engines that each have the whole model, and share the requests", 1, 64)
    enable_expert_parallel: bool = option(False, "divide the experts, as whole ones, among all tensor and data ranks")
    distributed_executor_backend: Literal["auto", "uni", "mp", "external_launcher", "torchrun"] = option(
        "auto",
        "uni: the worker in the engine's process; mp: each in its own; external_launcher: in those that torchrun "
        "starts, for several hosts (torchrun is another name for it); auto: uni on one device, but for a server mp",
    )
    startup_timeout: float = option(1800.0, "seconds that workers, or an engine process, may take to start", 0.1, 1e6)
    step_timeout: float | None = option(
        None, "seconds a step may take before workers restart (default: 20 times the largest, at least 30)", 0.1, 1e6
    )
    max_worker_restarts: int = option(20, "restarts of workers without a step between, before the engine ends", 1)
    data_parallel_size_local: int | None = option(
        None, "engines on this host (default: all); the others are on headless hosts", 0, 64
    )
    data_parallel_address: str | None = option(None, "address of the server's host, to which the other hosts connect")
    data_parallel_rpc_port: int = option(29550, "port there", 1, 65535)
    data_parallel_secret_file: str | None = option(None, "file of the shared secret, or set MANTA_DATA_PARALLEL_SECRET")
    headless: bool = option(False, "run this host's engines for the server at data_parallel_address, without HTTP")
    data_parallel_start_rank: int | None = option(None, "with headless: the first of this host's engines", 0, 63)
    enable_lora: bool = option(False, "serve LoRA adapters of the model beside it")
    max_loras: int = option(4, "adapters that requests of one step may have", 1, 1024)
    max_cpu_loras: int | None = option(None, "adapters kept in host memory (default: four times max_loras)", 1, 65536)
    max_lora_rank: int = option(16, "the highest rank of an adapter", 1, 256)
    max_logprobs: int = option(20, "likeliest tokens whose log-probabilities a request may ask for", 0, 1024)
    logits_processors: tuple[str, ...] = option((), "MODULE:CLASS of one's own that changes logits, or several")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "the least important that is logged to stderr; info has a line for each request, without its text"
    )
    log_format: Literal["text", "json"] = option("text", "lines of plain words, or a JSON object on each line")
    disable_log_stats: bool = option(False, "log no line with the throughput every 10 s while there is work")
    log_scheduler: str | None = option(None, "file of JSON lines: what came to the scheduler and what it decided")
    trace: str | None = option(None, "file for Perfetto: when each step's phases ran, in the engine and on the device")
    torch_profiler_dir: str | None = option(None, "folder for torch's profiler, from start_profile to stop_profile")
    sanitize_kv: bool = option(False, "for debugging: check in every step that no request reads or writes another's KV")
    snapshot: str = option("", "")  # the folder that the model was downloaded to, if it was; see `hub.find_model`
    data_parallel_rank: int = option(0, "")  # which of the engines this is
    expert_rendezvous: str = option("", "")  # a file by which the ranks of engines that share experts meet
    lockstep: bool = option(False, "")  # these engines step together in waves, as a model with experts needs it
    beside_server: bool = option(False, "")  # whether a server's processes share the cores; set where they start
    served_as: str = option("", "")  # the name of this engine, where there are several, in the log and in `ps`
    num_host_blocks: int | None = option(None, "")  # instead of what fits; set where workers are started anew,
    num_host_states: int | None = option(None, "")  # as is this
    weights: str = option("", "")  # folder or file that `update_weights` has put in the place of the model's own,
    weights_stamp: str = option("", "")  # what it looked like then; see `stamp_of`
    weights_version: int = option(0, "")  # how often weights were updated
    runs_functions: bool = option(False, "")  # whether the engine's clients may name functions for workers to run

    @classmethod
    def of(cls, model: str | EngineConfig, **fields: Any) -> EngineConfig:
        """The options of this model, or options that are there, with these fields; a ValueError names unknown ones."""
        return dataclasses.replace(model, **fields) if isinstance(model, EngineConfig) else cls(model, **fields)

    @property
    def folder(self) -> str:
        """Where the model's files are."""
        return self.snapshot or self.model

    @property
    def model_name(self) -> str:
        """The model's id on the hub or in Ollama's store, or the name of its folder, or of its GGUF file."""
        if self.snapshot and not os.path.isabs(self.model):
            return self.model.removeprefix("ollama:")
        return os.path.basename(os.path.abspath(self.model)).removesuffix(".gguf")

    @property
    def token_budget(self) -> int:
        """Tokens in one step at most; on a GPU `device.memory.settle_tokens` comes first."""
        return self.max_num_batched_tokens or max(STEP_TOKENS, self.max_num_seqs)

    @property
    def host_loras(self) -> int:
        """Adapters that are kept in the host's memory."""
        return self.max_cpu_loras or 4 * self.max_loras

    @property
    def checkpoint(self) -> str:
        """Folder or file of the weights; empty where they are made up."""
        return self.weights or ("" if self.load_format == "dummy" else self.folder)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What `speculative_config` says."""
        return SpeculativeConfig.of(self.speculative_config) if self.speculative_config is not None else None

    @property
    def num_drafts(self) -> int:
        """Drafts that a step verifies for a sequence, at most."""
        return self.speculation.num_speculative_tokens if self.speculation else 0

    @property
    def max_samples(self) -> int:
        """Tokens that a step samples at most: one for each sequence, and one after each draft."""
        return self.max_num_seqs + min(self.max_num_seqs, MOST_DRAFTING) * self.num_drafts

    @property
    def lookahead(self) -> int:
        """KV slots that each sequence owns ahead of its tokens."""
        after = 2 if self.speculation and self.speculation.by_model else 1  # drafts that follow taken ones
        return max(self.num_lookahead_slots, after * self.num_drafts)

    @property
    def makes_vectors(self) -> bool:
        """Whether prompts are turned into vectors, and nothing is sampled; `models.pooling.settle_task` comes first."""
        return self.task in ("embed", "score", "classify")

    @property
    def max_images(self) -> int:
        """Images that a prompt may have."""
        return int((re.findall(r"\bimage\W+(\d+)", self.limit_mm_per_prompt) or [16])[0])

    @property
    def world_size(self) -> int:
        """Ranks of one engine: those of all its stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_engines(self) -> int:
        """How many engines are on this host, which they share."""
        return self.data_parallel_size if self.data_parallel_size_local is None else self.data_parallel_size_local

    @property
    def first_rank(self) -> int:
        """The first of this host's engines."""
        return self.data_parallel_start_rank or 0

    def __post_init__(self) -> None:
        for name in ("hf_overrides", "speculative_config", "limit_mm_per_prompt"):
            if isinstance(getattr(self, name), Mapping):
                object.__setattr__(self, name, json.dumps(getattr(self, name)))
        for name in ("logits_processors", "model_plugin"):
            if isinstance(value := getattr(self, name), list):  # of a script, or as JSON had it
                object.__setattr__(self, name, tuple(value))
        check_fields(self)
        for module in self.model_plugin:
            load_module("model_plugin", module)
        if self.model == "demo" and not os.path.isdir(self.model):  # of any folder
            object.__setattr__(self, "model", DEMO)
        for name, others in OTHER_NAMES.items():
            if (value := getattr(self, name)) in others:
                object.__setattr__(self, name, others[value])
        if self.scheduling_policy not in POLICY_NAMES and not NAMED.fullmatch(self.scheduling_policy):
            self.refuse("scheduling_policy", f"allowed: {', '.join(POLICY_NAMES)}, or MODULE:CLASS")
        if not LIMITS.fullmatch(self.limit_mm_per_prompt):
            self.refuse("limit_mm_per_prompt", 'it must be like {"image": 4} or image=4, with numbers from 0 to 9999')
        if misnamed := [name for name in self.logits_processors if not NAMED.fullmatch(name)]:
            raise ValueError(f"logits_processors has {misnamed[0]!r:.80}; it must be MODULE:CLASS")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            self.refuse("max_cpu_loras", f"it must be at least max_loras, {self.max_loras}")
        if self.token_budget < self.max_num_seqs:  # else the last of them would never get a token
            self.refuse("max_num_batched_tokens", f"it must be at least max_num_seqs, {self.max_num_seqs}")
        self._check_stages()
        self._check_pairs()
        self._check_hosts()

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise a ValueError about an option's value."""
        raise ValueError(f"{name} is {getattr(self, name)!r}; {why}")

    def allow(self, when: str, name: str, *values: Any) -> None:
        """Refuse another value of an option than these; the error says `when` that holds."""
        if getattr(self, name) not in values:
            words = ("left out" if value in (None, ()) else repr(value) for value in values)
            self.refuse(name, f"{when} it must be {' or '.join(words)}")

    def _check_pairs(self) -> None:
        """Refuse options that do not go together."""
        if not self.enable_prefix_caching:
            self.allow("without prefix caching", "num_state_snapshots", 0, None)
        if self.kv_disk is not None:
            self.allow("with kv_disk", "enable_prefix_caching", True)
            self.allow("with kv_disk, on the engine's own host,", "distributed_executor_backend", "auto", "uni", "mp")
            self.allow("with kv_disk, whose files no replay has,", "log_scheduler", None)
        if self.enable_chunked_prefill:  # it would do nothing
            self.allow("with chunked prefill", "scheduler_delay_factor", 0)
        if self.makes_vectors:
            vectors = f"with task {self.task!r}, which"
            self.allow(f"{vectors} has no logits,", "logits_processors", ())
            self.allow(f"{vectors} samples nothing,", "speculative_config", None)
        if self.distributed_executor_backend == "uni":
            for name in ("tensor_parallel_size", "pipeline_parallel_size"):
                self.allow("with distributed_executor_backend 'uni', which has one worker,", name, 1)
        if self.batch_invariant:  # which rank adds first depends on a message's size
            self.allow("with batch_invariant, which a sum over ranks is not,", "tensor_parallel_size", 1)
        if self.enable_expert_parallel and self.data_parallel_size > 1:
            several = "with enable_expert_parallel and several engines"
            together = f"{several}, whose workers must be replaced together,"
            self.allow(together, "distributed_executor_backend", "auto", "mp")
            self.allow(f"{several}, which meet in every step,", "pipeline_parallel_size", 1)
            self.allow(several, "batch_invariant", False)  # on a CPU it runs token by token, out of step with others
            self.allow(several, "speculative_config", None)
        if self.speculation:
            drafts = "with speculative_config"
            self.allow(f"{drafts}, whose drafts their state does not have,", "logits_processors", ())
            self.allow(drafts, "batch_invariant", False)
            if self.speculation.by_model:
                why = f"{drafts} whose method is {self.speculation.method!r}, which needs a model in one place,"
                self.allow(why, "pipeline_parallel_size", 1)

    def _check_stages(self) -> None:
        stages, listed = self.pipeline_parallel_size, self.pipeline_layer_partition
        if stages > self.max_num_seqs:
            why = f"it must be at most max_num_seqs, {self.max_num_seqs}, because each stage works for other sequences"
            self.refuse("pipeline_parallel_size", why)
        if listed is not None and not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", listed, re.ASCII):
            self.refuse("pipeline_layer_partition", "it must be counts of layers, like 12,16")
        if listed is not None and (count := len(listed.split(","))) != stages:
            why = f"these are {count} counts; there must be one for each stage, and pipeline_parallel_size is {stages}"
            self.refuse("pipeline_layer_partition", why)

    def _check_hosts(self) -> None:
        """Refuse options about engines and hosts that do not go together."""
        size, local = self.data_parallel_size, self.data_parallel_size_local
        several_hosts = self.headless or (local is not None and local < size)
        if several_hosts and self.data_parallel_address is None:
            raise ValueError("data_parallel_address is not given; engines on several hosts need it")
        if local is not None and not self.headless <= local <= size:
            why = f"it must be from {int(self.headless)} to data_parallel_size, {size}"
            self.refuse("data_parallel_size_local", why)
        here = size if local is None else local
        if not self.headless:
            self.allow("on the server's host, without headless,", "data_parallel_start_rank", None)
        elif (first := self.data_parallel_start_rank or 0) + here > size:
            raise ValueError(
                f"data_parallel_start_rank is {first}, with {here} engines here (data_parallel_size_local); the last "
                f"one must be below data_parallel_size, {size}"
            )
        if several_hosts:
            self.allow("with engines on several hosts,", "enable_expert_parallel", False)
        if self.local_engines > 1 and self.distributed_executor_backend == "external_launcher":
            why = "with distributed_executor_backend 'external_launcher', whose ranks are of one engine, it must be 1"
            self.refuse("data_parallel_size", why)


class HookError(ValueError):
    """A user's class has failed, and so a start, a step or a request has; the message is of `blame`."""


class FatalHookError(RuntimeError):
    """A user's class has failed where the engine cannot go on; the message is of `blame`."""


def blame(owner: type, method: str, what: str | Exception) -> str:
    """Name a method, what it did ("returned None") or raised, and the last line of the class's file that led there."""
    code, lines = getattr(inspect.unwrap(getattr(owner, method)), "__code__", None), []
    file = getattr(sys.modules.get(owner.__module__), "__file__", None) or getattr(code, "co_filename", "no file")
    if isinstance(what, Exception):
        lines = [frame.lineno for frame in traceback.extract_tb(what.__traceback__) if frame.filename == file]
        what = f"raised {type(what).__name__}: {what}".partition("\n")[0]
    line = lines[-1] if lines else getattr(code, "co_firstlineno", 0)
    return f"{owner.__module__}:{owner.__qualname__}.{method} {what} ({file}, line {line})"


def load_module(option: str, name: str) -> Any:
    """What an option names as MODULE or MODULE:CLASS, for which the module is imported; a ValueError if that fails."""
    module, _, attribute = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        why = f"importing it raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            why = f"{error}; the module must be on PYTHONPATH"
        raise ValueError(f"{option} is {name!r:.80}: {why}") from error
    if attribute and not hasattr(loaded, attribute):
        raise ValueError(f"{option} is {name!r:.80}: module {module!r} has no attribute {attribute!r}")
    return getattr(loaded, attribute) if attribute else loaded


def reference_to(function: Callable[..., Any]) -> str:
    """`module:name` of a function, as sockets carry no pickles; a ValueError if another program does not find it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    reference = f"{module}:{name}"
    try:
        resolved = pkgutil.resolve_name(reference) if module != "__main__" else None
    except (AttributeError, ImportError, ValueError):
        resolved = None
    if resolved is not function:
        raise ValueError(
            f"method is {function!r:.200}, which the engine's process cannot import; it must be the name of a method "
            "of the worker, or a function of a module other than the script itself"
        )
    return reference


def load_named(option: str, name: str, checks: Mapping[str, Check | None], base: type = object) -> Any:
    """The class that an option names as MODULE:CLASS, whose methods raise nothing but a `HookError` or its fatal kind.

    Args:
        option, name: the option and its value.
        checks: the methods that this is for; and where one must return something, what says whether it is wrong, and
            then what is right. It is called with what was returned and the method's arguments.
        base: the class must be this or a subclass; methods that it has from there are left alone.

    Raises:
        ValueError: the module cannot be imported, or has no such class.
    """
    loaded = load_module(option, name)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        must = "a class" if base is object else f"a subclass of {base.__module__}.{base.__qualname__}"
        raise ValueError(f"{option} is {name!r:.80}; it must be {must}")
    if missing := [method for method in checks if not any(method in vars(cls) for cls in loaded.__mro__)]:
        raise ValueError(f"{option} is {name!r:.80}; it must have a method {missing[0]}")
    overridden = [method for method in checks if getattr(loaded, method) is not getattr(base, method, None)]
    guards = {method: guarded(loaded, method, checks[method]) for method in overridden}
    names = {"__module__": loaded.__module__, "__qualname__": loaded.__qualname__}
    return type(loaded.__name__, (loaded,), guards | names)


def wrong_tensor(returned: Any, like: Any, what: str) -> str:
    """For `load_named`: `what` of the shape, dtype and device of a tensor, unless `returned` is that."""
    same = all(getattr(returned, name, None) == getattr(like, name) for name in ("shape", "dtype", "device"))
    return "" if same else f"{what} {[*like.shape]} {like.dtype} on {like.device}"


def guarded(owner: type, name: str, check: Check | None) -> Callable[..., Any]:
    """Wrap a user's method, to blame it for what it raises, or for what the `check` finds wrong in what it returns."""
    method, kind = getattr(owner, name), HookError if name in REFUSING else FatalHookError

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            returned = method(self, *args, **options)
        except (HookError, FatalHookError):
            raise
        except Exception as error:
            raise kind(blame(owner, name, error)) from error
        if check and (right := check(returned, *args)):
            shape = getattr(returned, "shape", None)
            shown = repr(returned) if shape is None else f"{[*shape]} {returned.dtype}"
            raise kind(blame(owner, name, f"returned {shown:.80}; it must return {right}"))
        return returned

    return call


def private_folder(path: str) -> str:
    """A folder that is only ours; it is made if it is not there. A ValueError if others may write to it, or own it."""
    try:
        Path(path).mkdir(0o700, exist_ok=True)
        check_owner(path, "kv_disk")
    except OSError as error:
        raise ValueError(f"kv_disk is {path!r}: {error.strerror}") from None
    return path


def check_owner(path: str | Path, name: str) -> None:
    """A ValueError if others can have written a file or a folder of this `name`, an OSError if it cannot be seen."""
    state = os.stat(path)
    if not hasattr(os, "geteuid") or state.st_uid != os.geteuid() or state.st_mode & 0o022:  # Windows has none
        owner = f"is user {state.st_uid}'s, with mode {state.st_mode & 0o777:o}"
        raise ValueError(f"{name} is '{path}', which {owner}; nobody but this user may own it or write to it")


def stamp_of(source: str) -> str:
    """A hash of the names, sizes and times of a folder's safetensors, or of one file; a ValueError if it has none."""
    path = Path(source)
    try:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors*"))
        states = [(file.name, (state := file.stat()).st_size, state.st_mtime_ns) for file in files]
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}") from None
    if not states:
        raise ValueError(f"there are no safetensors in {source!r:.200}; it must be a folder with them, or such a file")
    return hashlib.sha256(repr(states).encode()).hexdigest()


def run_file(
    path: str, *args: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Run one of our own files as a program, with `environment` beside this process's, and `options` of `Popen`.

    It finds the modules that this process finds, and not those beside the file: installed, they have other names.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
    return subprocess.Popen([sys.executable, "-P", os.path.abspath(path), *args], env=variables, **options)


def visible_gpus(what: str = "") -> list[str] | None:
    """The GPUs by CUDA_VISIBLE_DEVICES or the driver's tool, or `what` that tells of each; None: it is missing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # torch takes seconds to load, and CUDA half a GiB of a GPU
    if visible is not None and not what:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    command = ["nvidia-smi", f"--query-gpu={what or 'index'}", "--format=csv,noheader,nounits"]
    command += [] if visible is None else [f"--id={visible}"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    return None


def sentence_file(folder: str) -> str:
    """The file of sentence-transformers' settings of a model; before version 6 its name had the model's kind."""
    names = (path.name for path in Path(folder).glob("sentence_*_config.json"))
    return min(names, default="sentence_bert_config.json")


def read_json(folder: str, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in `folder/name`, or `default` where there is no such file, or an empty one.

    Raises:
        ValueError: the folder is missing, the file is missing with no default, or it holds no JSON object.
    """
    path = os.path.join(folder, name)
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}; {MODEL_TAKES}")
    if default is None and not os.path.isfile(path):
        raise ValueError(f"{folder} has no {name}; {MODEL_TAKES}")
    if default is not None and not (os.path.isfile(path) and os.path.getsize(path)):
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


def step_tokens(config: EngineConfig, most: int, seconds: float) -> int:
    """Tokens of a step: `most`, which take `seconds`, or by default under `fair` as many as take FAIR_STEP.

    A decode gets its next token when the step ends, so the prompts of others must not make the step long.
    """
    is_set = config.max_num_batched_tokens is not None
    if config.scheduling_policy != "fair" or is_set or config.makes_vectors or not config.enable_chunked_prefill:
        return most
    return max(config.max_num_seqs, min(most, int(most * FAIR_STEP / max(seconds, FAIR_STEP))))
