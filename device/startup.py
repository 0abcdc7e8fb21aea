"""Makes a worker ready: device, backend, weights, memory, compiled kernels, warm-up and CUDA graphs, in this order.

`start_worker` does all of it. Afterwards no kernel is compiled any more, and the device's memory is reserved.
`print_plan` does the same arithmetic without a device.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from checkpoints.tied_head import settle_head
from config import VERSION, EngineConfig, lacking, load_module
from cpu import machine
from cpu import weights as cpu_weights
from cpu.compiled import Builder, compile_ops
from device import kv_disk
from device.coded import FP8_CAPABILITY
from device.compile_guard import CompileGuard, check_compiler
from device.memory import (
    CPU_KV_SHARE,
    MemoryPlan,
    blocks_per_seq,
    check_room,
    gpu_bytes,
    gpu_capability,
    image_rows,
    largest_step,
    plan_stage,
    report,
    settle_tokens,
    stage_layers,
)
from device.pools import count_blocks, fit_states, new_host_pool, new_host_states
from device.start import Start
from device.upkeep import KeptWorker
from device.warmup import rehearse, run_tower, time_rows, warm_up
from model import Transformer
from model_config import ModelConfig
from models.expert_ranks import ExpertGroup
from models.pooling import settle_task
from parallel import Group, Pipeline
from speculation.options import MOST_DRAFTS
from worker import Worker

CUDA_BLOCK_SIZES = (16, 32, 64, 128)


def start_worker(config: EngineConfig, model_config: ModelConfig, rank: int = 0, rendezvous: str = "") -> KeptWorker:
    """A worker that is ready for its first step, the `rank`-th of `world_size`; `rendezvous` is for `Group.connect`. A
    ValueError says why the options, the device and the checkpoint do not go together, or what memory cannot hold."""
    start = prepare(config, model_config, rank, rendezvous)
    with start.phase("weights"):
        start.load()
    if start.builder and start.builder.urgent_threads:
        with start.phase("C++"):
            start.builder.wait_for_codes()
    # This is read before the KV pool takes some of it.
    start.cpu_room = int(CPU_KV_SHARE * machine.available_bytes() / start.sharers)
    start.num_snapshots = fit_states(start)
    if start.ops.BACKEND == "triton":
        start.guard = CompileGuard(start.ops)
        if start.device == "cuda":
            with start.phase("kernels"):
                rehearse(start)
    rows = start.config.max_num_seqs
    with start.phase("KV pool"):
        start.num_blocks = count_blocks(start)
        pool, states = start.new_pool(start.num_blocks), start.new_states(rows + start.num_snapshots)
        host_states = new_host_states(start)
        pools = pool, new_host_pool(start, host_states), states, host_states
        worker = KeptWorker(start, pools, start.new_state(rows))
    experts, pipeline = start.group.experts, start.group.pipeline
    if experts:
        experts.connect(start.config.expert_rendezvous, start.device, start.config.startup_timeout)
    with start.phase("warm-up"):
        speeds = warm_up(start, worker)
        worker.info = facts(start, worker, *speeds)
        worker.info["row_seconds"] = time_rows(start, worker)
    if experts:
        experts.exchange(0)
    worker.take_sampled()  # of the warm-up
    pipeline.live = pipeline.stages > 1
    if start.config.kv_disk:
        with start.phase("KV disk"):
            worker.info["kv_disk"] = add_disk(start, worker, speeds[0])
    worker.info["startup"] = start.seconds
    worker.sanitize()
    return worker


def prepare(config: EngineConfig, model_config: ModelConfig, rank: int, rendezvous: str) -> Start:
    """Choose device and backend, and meet the other ranks. Arguments and errors are those of `start_worker`."""
    config, model_config = settle_options(config, model_config)
    if config.weights or config.load_format != "dummy":
        model_config = settle_head(config.weights or config.folder, model_config)
    device = pick_device(config.device)
    ops = pick_ops(config.backend, device)
    if device == "cuda" and ops.BACKEND == "triton":
        check_compiler()
    builder = Builder.of(config, ops.BACKEND)
    if builder:
        ops = compile_ops(builder)
    dtype = pick_dtype(config.dtype, model_config.dtype, device, cpu_weights.is_small(config))
    max_model_len = check_sizes(config, model_config, device)
    check_drafts(config, model_config, ops, dtype)
    if device == "cuda" and config.kv_cache_dtype == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype is 'fp8'; {torch.cuda.get_device_name()} does not convert it, as GPUs from compute "
            "capability 8.9 on do, so it must be 'auto'"
        )
    stages = config.pipeline_parallel_size
    group = Group.connect(rank, config.tensor_parallel_size, rendezvous, device, stages, config.startup_timeout)
    group.experts = ExpertGroup.of(config, rank)
    if device == "cuda":
        config = settle_tokens(config, group.min(torch.cuda.mem_get_info()[1]))
    if stages > 1 or config.pipeline_layer_partition:
        group.pipeline.layers = stage_layers(config, model_config, ops, dtype)[group.pipeline.stage]
    check_room(config, model_config, ops, dtype, max_model_len, group.pipeline, device)
    return Start(config, model_config, device, dtype, ops, builder, group, max_model_len)


def settle_options(config: EngineConfig, model_config: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Let the modules of `model_plugin` add what they have, and settle the task and the cache's dtype."""
    for name in config.model_plugin:
        getattr(load_module("model_plugin", name), "in_worker", lambda: None)()
    config, model_config = settle_task(config, model_config)
    return config, replace(model_config, kv_cache_dtype=config.kv_cache_dtype)


def facts(
    start: Start, worker: Worker, token_seconds: float, swap_seconds: float, compile_seconds: float
) -> dict[str, Any]:
    """Facts for the engine and the start log.

    `windows` are of each kind of layers. `blocks_per_request` is how many a request holds at its full length.
    `swap_cost` is how many tokens are computed while one block goes out to the host and comes back; 0 where nobody has
    to choose between the two. `step_seconds` is what the largest step takes, by the speed of a prompt, on the slowest
    rank, and `tower_seconds` what the largest image takes. `states` is what `StateRoom` has, if the model has states.
    """
    step_seconds = token_seconds * max(start.config.token_budget, largest_step(start.config, start.max_model_len))
    auto, windows = start.config.preemption_mode == "auto", start.model.layout.windows
    states: dict[str, float] | None = None
    if start.model.state_size:
        size = worker.states[0].nbytes / start.memory.block
        states = {"snapshots": start.num_snapshots, "host": len(worker.host_states), "blocks": size}
    return {
        "max_model_len": start.max_model_len,
        "max_num_batched_tokens": start.config.token_budget,
        "vocab_size": start.model_config.vocab_size,
        "num_blocks": start.num_blocks,
        "num_host_blocks": len(worker.host_pool),
        "block_size": start.config.block_size,
        "dtype": str(start.model.dtype).removeprefix("torch."),
        "cache_dtype": str(worker.pool.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if start.device == "cuda" else "cpu",
        "backend": start.ops.BACKEND,
        "parameters": start.num_parameters,
        "kv_bytes": start.group.sum(worker.pool.nbytes),
        "memory": asdict(start.memory) | {"predicted": start.memory.step, "measured": start.measured},
        "windows": list(windows),
        "blocks_per_request": blocks_per_seq(start.config, windows, start.max_model_len),
        "states": states,
        "swap_cost": float(f"{swap_seconds / token_seconds:.4g}") if auto else 0.0,
        "compile_seconds": compile_seconds,
        "image_rows": image_rows(start.config, start.model),
        "tower_seconds": -start.group.min(-round(1e6 * run_tower(worker))) / 1e6,
        "step_seconds": -start.group.min(-round(1e6 * step_seconds)) / 1e6,
    }


def fingerprint_of(start: Start) -> str:
    """A hash of what must agree for the bytes of KV blocks to mean the same, but for the weights; a folder's name."""
    c, path = start.config, Path(start.config.folder) / "config.json"
    options = (
        c.block_size, c.tensor_parallel_size, c.pipeline_parallel_size, c.pipeline_layer_partition, c.quantization,
        c.hf_overrides, c.model_plugin, c.batch_invariant, c.sanitize_kv, c.speculative_config, start.max_model_len,
    )  # fmt: skip
    model = start.model_config.architecture, path.read_bytes() if path.is_file() else b""
    types = str(start.dtype), str(start.model.kv_dtype), start.ops.BACKEND, start.device
    return hashlib.sha256(repr((kv_disk.MAGIC, VERSION, options, model, types)).encode()).hexdigest()[:32]


def add_disk(start: Start, worker: KeptWorker, token_seconds: float) -> dict[str, Any]:
    """Give the worker its files of KV blocks; returns facts of them: the engine's folder, bytes of a block over all
    ranks, seconds to read a block of each kind of layers and to compute its tokens, and whether the former is less. A
    ValueError if the folder is not ours alone, or there is no host memory."""
    config, group, nbytes = start.config, start.group, worker.block_bytes()
    if not len(worker.host_pool):
        config.refuse("kv_disk", f"it needs host memory for blocks, and swap_space is {config.swap_space}")
    rank = group.pipeline.stage * group.size + group.rank
    worker.disk = disk = kv_disk.KVDisk(config, fingerprint_of(start), rank, worker.host_views)
    read, compute = disk.time_reads(nbytes) * len(start.model.layout.windows), token_seconds * config.block_size
    pays, folder = read < compute, str(disk.folder.parent)
    times = f"a block is read in {1000 * read:.3g} ms, and its tokens are computed in {1000 * compute:.3g} ms"
    note = f"  KV disk   {'' if pays else 'not used: '}{folder}: {times}\n"
    seconds = {"read": read, "compute": compute} if pays else {}
    return {"folder": folder, "bytes": group.sum(nbytes), "pays": pays, "note": note} | seconds


def check_sizes(config: EngineConfig, model_config: ModelConfig, device: str) -> int:
    """The `max_model_len` of a sequence. Options that do not go with the device or the model are ValueErrors."""
    if device == "cuda" and config.block_size not in CUDA_BLOCK_SIZES:
        raise ValueError(f"block_size is {config.block_size}; on cuda it must be one of {CUDA_BLOCK_SIZES}")
    if config.backend == "triton" and config.block_size.bit_count() > 1:
        raise ValueError(f"block_size is {config.block_size}; for backend 'triton' it must be a power of two")
    if config.num_state_snapshots and not model_config.delta:
        count, name = config.num_state_snapshots, model_config.architecture
        raise ValueError(f"num_state_snapshots is {count}; {name} has no recurrent states, so it must be 0 or left out")
    if config.kv_disk and model_config.delta:
        name = model_config.architecture
        config.refuse("kv_disk", f"{name} has recurrent states, which are not kept on disk, so it must be left out")
    if config.batch_invariant and model_config.latent:
        config.refuse("batch_invariant", f"{model_config.architecture} has latent attention, so it must be False")
    if model_config.row.encoder:
        check_encoder(config, model_config.architecture)
    drafts, most = config.num_drafts, model_config.max_position
    max_model_len = config.max_model_len or most
    if drafts and max_model_len < 4 + drafts:
        raise ValueError(
            f"max_model_len is {max_model_len}; for num_speculative_tokens {drafts} it must be at least {4 + drafts}"
        )
    if drafts and config.pipeline_parallel_size > 1 and model_config.delta:
        raise ValueError(
            f"pipeline_parallel_size is {config.pipeline_parallel_size}; with speculative_config and the recurrent "
            f"states of {model_config.architecture} it must be 1"
        )
    if max_model_len > most:
        raise ValueError(f"max_model_len is {max_model_len}; the model was made for at most {most}")
    return max_model_len


def check_encoder(config: EngineConfig, name: str) -> None:
    """A ValueError if an option is for keys and values that are kept, or for adapters."""
    for option, value in (("kv_cache_dtype", "auto"), ("num_gpu_blocks_override", None), ("sanitize_kv", False)):
        if getattr(config, option) not in (value, 0):
            config.refuse(option, f"{name} is an encoder, which has no KV cache, so it must be {value or 'left out'}")
    if config.enable_lora:
        config.refuse("enable_lora", f"{name} is an encoder, for which Manta has no adapters, so it must be False")


def check_drafts(config: EngineConfig, model_config: ModelConfig, ops: ModuleType, dtype: torch.dtype) -> None:
    """A ValueError if there are more drafts than Triton's kernels take in a row."""
    if ops.BACKEND != "triton" or not config.num_drafts:
        return
    c, most = model_config, [MOST_DRAFTS]
    most += [ops.CONV_TOKENS - 1] if c.delta else []
    if not c.latent:
        widest = max(16, 1 << (max(dim for _, dim in c.kv_shapes) - 1).bit_length())
        most.append((ops.FLOAT32_QUERIES if dtype.itemsize == 4 else ops.QUERY_BYTES // (2 * widest)) - 1)
    if config.num_drafts > min(most):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"num_speculative_tokens is {config.num_drafts}; with Triton's kernels, {c.architecture} in {name} takes "
            f"at most {min(most)}"
        )


def pick_device(name: str) -> str:
    """`cuda` or `cpu` for the config's `auto`, `cuda` or `cpu`; a ValueError if `cuda` is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda'; torch sees no CUDA device on this machine: use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def pick_dtype(name: str, checkpoint: str, device: str, small: bool = False) -> torch.dtype:
    """The dtype of this name; `auto` is the checkpoint's.

    On a CPU it is bfloat16 for one of 16 bits, or float32 where the CPU has no products of bfloat16, or the model is a
    `small` one, where converting takes longer than these products save.
    """
    if name == "auto" and device == "cpu" and checkpoint in ("bfloat16", "float16"):
        name = "bfloat16" if machine.has_bfloat16() and not small else "float32"
    return getattr(torch, checkpoint if name == "auto" else name)


def pick_ops(backend: str, device: str) -> ModuleType:
    """The one place where the ops are chosen: `kernels`, `cpu.ops` or `reference`; a ValueError if the backend does not
    run on this device."""
    if backend == "auto":
        backend = "triton" if device == "cuda" else "cpu"
    if backend == "triton":
        if lack := lacking(("triton",)):
            raise ValueError(f"backend is 'triton'; {lack}")
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("backend is 'triton'; on a CPU it runs in Triton's interpreter: set TRITON_INTERPRET=1")
        import kernels

        return kernels
    if backend == "cpu":
        if device != "cpu":
            raise ValueError(f"backend is 'cpu'; the device is {device}, where it must be triton or reference")
        from cpu import ops as cpu_ops

        return cpu_ops
    import reference

    return reference


def print_plan(config: EngineConfig, model_config: ModelConfig, gib: float | None = None) -> None:
    """Print what a worker would hold on a GPU of `gib` GiB, which is one that multiplies FP8, or on this machine.

    Nothing is allocated, and no GPU is touched. Raises a ValueError where a worker would not start.
    """
    if gib is not None and not 0 < gib <= 2**20:
        raise ValueError(f"plan is {gib}; it must be above 0 and at most {2**20} GiB, the memory of a GPU")
    if gib and config.device == "cpu":
        raise ValueError(f"plan is {gib}, the GiB of a GPU; with device 'cpu' it must be left out")
    total = int(gib * 2**30) if gib else gpu_bytes() if config.device != "cpu" else 0
    if config.device == "cuda" and not total:
        raise ValueError("device is 'cuda'; this machine has none: tell how many GiB it should have, as in --plan 80")
    ops = pick_ops("reference" if lacking(("triton",)) else "triton", "cuda")
    fp8 = bool(total) and (bool(gib) or gpu_capability() >= FP8_CAPABILITY)
    config, plans = plan_stages(config, model_config, ops, total, fp8)
    model, plan, room, where = min(plans, key=lambda planned: planned[1].blocks(planned[2]))
    for line in report(config, model, plan, room, where):
        print(line)


def plan_stages(
    config: EngineConfig, model_config: ModelConfig, ops: ModuleType, total: int, fp8: bool
) -> tuple[EngineConfig, list[tuple[Transformer, MemoryPlan, int, str]]]:
    """The options as they are settled, and what `plan_stage` says of each stage. A ValueError if none would start."""
    config, model_config = settle_options(settle_tokens(config, total), model_config)
    with contextlib.suppress(ValueError):  # weights that are not there yet
        model_config = settle_head(config.folder, model_config)
    max_model_len = check_sizes(config, model_config, "cuda" if total else "cpu")
    dtype = pick_dtype(config.dtype, model_config.dtype, "cuda" if total else "cpu", cpu_weights.is_small(config))
    if total and lacking(("triton",)):
        raise ValueError("the plan of a GPU is made with its kernels, which need Triton: `pip install triton`")
    stages = stage_layers(config, model_config, ops, dtype)
    pipelines = [Pipeline(i, len(stages), layers) for i, layers in enumerate(stages)]
    shape = model_config, ops, dtype, max_model_len
    return config, [plan_stage(config, *shape, stage, total, fp8) for stage in pipelines]
