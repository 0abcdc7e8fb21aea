"""Tells how much memory models need, before they are loaded: a process of its own, so that a server imports no torch.

It reads a model's name and options from each line of standard input, and writes a line of JSON: the memory of this
machine for models, the bytes that this one needs, awake and asleep, where its files are, and options by which its
engine takes just that much; or why it cannot be loaded, as far as its files tell. The arithmetic is that of `--plan`. A
model of the hub is downloaded first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from checkpoints.hub import checkpoint_files, find_model
from checkpoints.storage import opened
from config import EngineConfig
from cpu import machine
from device.coded import FP8_CAPABILITY
from device.memory import CONTEXT, CPU_KV_SHARE, MemoryPlan, check_pool, fit_pool, gpu_bytes, gpu_capability
from device.pools import SWAP_SPACE
from device.startup import pick_device, pick_ops, plan_stages
from executor import end_with_parent, name_process
from model import Transformer
from model_config import ModelConfig
from observe.logs import set_up
from tokenizer import Tokenizer

OWN = 640 * 2**20  # bytes, an allowance for an engine process and its worker on a CPU: Python, torch, a step's tensors
CONTEXTS_SHARE = 16  # of a GPU's memory for models, at most one in so many bytes is for contexts of those that sleep


def machine_room(config: EngineConfig, memory: int | None, host: int | None, others: int) -> tuple[int, int, int]:
    """Bytes for models: `memory` (None: what a GPU's engine may use of it, or what a CPU has free); `host`, the host's
    memory for those that sleep (None: half of what is free beside a GPU); and of the former, for their contexts."""
    total = 0 if config.device == "cpu" else gpu_bytes()
    memory = memory or int(total * config.gpu_memory_utilization) or machine.available_bytes()
    host = machine.available_bytes() // 2 * (total > 0) if host is None else host
    return memory, host, min(memory // CONTEXTS_SHARE, others * CONTEXT) if total and host else 0


def need_of(config: EngineConfig, memory: int, budget: int | None) -> tuple[int, list[MemoryPlan], dict[str, Any]]:
    """Bytes that a model takes of a device, the plans of its stages, and the options by which it takes no more.

    Args:
        memory: bytes that all models may take.
        budget: bytes that this one may take; None: on a GPU as `gpu_memory_utilization` says, else a share of what
            `memory` has beside the weights.

    Raises:
        ValueError: it cannot be loaded.
    """
    total = 0 if config.device == "cpu" else gpu_bytes()
    model_config = ModelConfig.from_folder(config.folder, config.hf_overrides)
    ops = pick_ops("triton" if total else "reference", "cuda")
    config, stages = plan_stages(config, model_config, ops, total, bool(total) and gpu_capability() >= FP8_CAPABILITY)
    pools = [fit_stage(config, model, plan, total, memory, budget) for model, plan, *_ in stages]
    blocks = min(count for _, count in pools)
    need = max(base + blocks * plan.block for (base, _), (_, plan, *_) in zip(pools, stages, strict=True))
    model, plan = stages[0][:2]
    options = {"num_gpu_blocks_override": blocks or None, "max_model_len": model.max_model_len, "task": config.task}
    if model.state_size and config.enable_prefix_caching:
        options["num_state_snapshots"] = plan.states // (4 * model.state_size) - config.max_num_seqs
    return need * (1 if total else config.world_size), [plan for _, plan, *_ in stages], options


def need_asleep(config: EngineConfig, plans: Sequence[MemoryPlan], host: int, contexts: int) -> int:
    """Bytes of the host's memory that a model takes while it sleeps, for its weights and swap space; or more, so that
    all that fit into `host` fit into `contexts`, too. On a CPU all that it still takes."""
    weights = sum(plan.weights + plan.draft for plan in plans) * config.world_size // len(plans)
    if not plans[0].context:
        return weights + OWN * config.world_size
    swap = SWAP_SPACE if config.swap_space is None else config.swap_space
    context = max(plan.context + plan.adapters for plan in plans)
    return max(weights + int(swap * 2**30), host * context // max(1, contexts))


def fit_stage(
    config: EngineConfig, model: Transformer, plan: MemoryPlan, total: int, memory: int, budget: int | None
) -> tuple[int, int]:
    """Bytes of a rank without its KV pool, and the number of blocks of that. For the rest see `need_of`."""
    weights = plan.weights + plan.draft + plan.adapters
    if total:
        base = weights + plan.context + plan.step + plan.state + plan.states + plan.graphs
        room = (min(memory, int(total * config.gpu_memory_utilization)) if budget is None else budget) - base
    else:
        base = weights + plan.step + plan.state + plan.states + OWN
        base += int((config.swap_space or 0) * 2**30)
        free = (budget or memory) // config.world_size - base
        room = free if budget or free <= 0 else int(CPU_KV_SHARE * free)
    check_pool(config, model, plan, room)
    return base, fit_pool(config, model.layout.windows, plan.blocks(max(0, room)), model.max_model_len)[0]


def main(out: TextIO) -> None:
    """Answer the lines of standard input until it ends."""
    end_with_parent(signal.SIGKILL)
    name_process("plan")
    for line in sys.stdin:
        message = json.loads(line)
        config = EngineConfig(**message["options"])
        set_up(config.log_level, config.log_format)
        memory, host, contexts = machine_room(config, message["memory"], message["host"], message["others"])
        answer: dict[str, Any] = {"name": message["name"], "memory": memory, "host": host, "contexts": contexts}
        try:
            pick_device(config.device)
            config = find_model(config)
            Tokenizer(config.folder)  # and headers of weights, which are checked against the sizes of their files
            for path in [] if config.load_format == "dummy" else checkpoint_files(config.folder):
                with opened(path):
                    pass
            need, plans, options = need_of(config, memory - contexts, message["budget"])
            options |= {name: getattr(config, name) for name in ("model", "snapshot", "speculative_config")}
            answer |= {"need": need, "asleep": need_asleep(config, plans, host, contexts), "options": options}
        except ValueError as error:
            answer["failure"] = str(error)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the parent reads answers there, and nothing that a module prints
    main(answers)
