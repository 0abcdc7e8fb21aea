"""What adapters cost: steps with eight of them, and with hundreds that take turns, beside steps of the model alone."""

from __future__ import annotations

import functools
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine import LLM, LoRARequest, SamplingParams
from lora.adapter import CONFIG, WEIGHTS
from model_config import ModelConfig
from turns import in_turns, median_ratio, seconds_of, spread

Figures = list[dict[str, Any]]


def write_adapters(folder: Path, shape: ModelConfig, count: int, rank: int) -> list[LoRARequest]:
    """Random adapters for all linear layers of a model with Llama's names."""
    kv_heads, dim = shape.kv_shapes[0]
    q, kv, hidden, inner = shape.num_heads * dim, kv_heads * dim, shape.hidden_size, shape.mlp_sizes[0]
    sizes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    made = []
    for number in range(count):
        tensors, place = {}, folder / f"adapter-{number}"
        place.mkdir()
        for i in range(shape.num_layers):
            for name, (out, inputs) in sizes.items():
                module = f"base_model.model.model.layers.{i}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs).mul_(inputs**-0.5).bfloat16()
                tensors[f"{module}.lora_B.weight"] = torch.randn(out, rank).mul_(0.1).bfloat16()
        save_file(tensors, place / WEIGHTS)
        (place / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
        made.append(LoRARequest(place.name, number + 1, str(place)))
    return made


def lora_figures(
    model: str, sequences: int, new_tokens: int, slots: int, together: int, registered: int, rank: int, repeats: int
) -> Figures:
    """Tokens a second of `LLM.generate` with and without adapters, taking turns; "of base" is the median of the turns'
    ratios of seconds.

    Args:
        model: its folder; its layers are alike, and have Llama's names.
        sequences, new_tokens: of each turn.
        slots: adapters that a step may have; where a turn draws more, some of its sequences wait.
        together: adapters of one turn.
        registered: adapters of the other, whose popularity falls as 1 / n (Zipf's law).
        rank, repeats: of each adapter, and turns.
    """
    rng, shape = random.Random(0), ModelConfig.from_folder(model)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    prompts = [[rng.randrange(shape.vocab_size) for _ in range(16)] for _ in range(sequences)]
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(Path(folder), shape, registered, rank)
        base = LLM(model, enable_prefix_caching=False)
        options: dict[str, Any] = {"max_loras": slots, "max_cpu_loras": registered, "max_lora_rank": rank}
        llm = LLM(model, enable_prefix_caching=False, enable_lora=True, **options)
        weights = [1 / (n + 1) for n in range(registered)]
        draws: dict[str, Callable[[], list[LoRARequest | None]]] = {
            "base": lambda: [None] * sequences,
            "no adapter": lambda: [None] * sequences,
            f"{together} adapters": lambda: [adapters[i % together] for i in range(sequences)],
            f"{registered} by Zipf": lambda: list(rng.choices(adapters, weights, k=sequences)),
        }

        def measure(name: str, turn: int) -> float:
            if name == "base":
                return seconds_of(base.generate, prompts, params, use_tqdm=False)
            return seconds_of(llm.generate, prompts, params, use_tqdm=False, lora_request=draws[name]())

        seconds = in_turns({name: functools.partial(measure, name) for name in draws}, repeats)
    figures = []
    for name, times in seconds.items():
        rates = [sequences * new_tokens / taken for taken in times]
        figures.append({
            "adapters": name, "sequences": sequences, "rank": rank, "tok/s": round(statistics.median(rates), 1),
            **spread(rates, 1), "of base": median_ratio(times, seconds["base"]),
        })  # fmt: skip
    return figures
