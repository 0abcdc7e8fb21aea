"""A campaign by hand: each family in many drawn shapes, each against transformers.

    python campaigns/family_campaign.py [--count 200] [--seed 0] [--families LlamaConfig ...]
    python campaigns/family_campaign.py --table              writes docs/families.md's table anew

A drawn shape is a tiny random checkpoint of transformers': sizes, heads, biases, norms, activations, windows, kinds of
RoPE, experts and all else that its config class has a field for. Two prompts, one of them in two parts, must give
transformers' logits, and then its greedy tokens. What fails is printed with its shape, which can be given to `--shape`.
How many passed is written to bench_results/families.json.

Logits may be apart by TOLERANCE of the largest, or by four times as much as transformers' own change where it computes
in float64: some drawn shapes magnify any rounding. A token may differ where transformers' best two are that near.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from safetensors.torch import load_file

from config import EngineConfig
from device.startup import start_worker
from model_config import ModelConfig
from models.families import ALIASES, FAMILIES
from plan import NewRow, StepPlan
from random_checkpoints import RENAMED, of_transformers, rename

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "bench_results" / "families.json"
PAGE = ROOT / "docs" / "families.md"
NEW, CONTEXT = 8, 64  # greedy tokens, and tokens that a sequence may have
TOLERANCE = 1e-4  # of the largest logit
ABSENT = object()  # instead of a field that a class has not

Draw = Callable[[random.Random, dict[str, Any]], Any]


def flip(rng: random.Random, _: dict[str, Any]) -> bool:
    return rng.random() < 0.5


def one_of(*values: Any) -> Draw:
    return lambda rng, _: rng.choice(values)


def between(low: float, high: float) -> Draw:
    return lambda rng, _: round(rng.uniform(low, high), 3)


def maybe(draw: Draw) -> Draw:
    return lambda rng, so_far: None if rng.random() < 0.3 else draw(rng, so_far)


def kinds_of_layers(rng: random.Random, so_far: dict[str, Any]) -> list[str] | None:
    """None leaves them to the class's own rule."""
    if rng.random() < 0.4 or so_far.get("use_sliding_window") is False:
        return None
    return [rng.choice(("full_attention", "sliding_attention")) for _ in range(so_far["num_hidden_layers"])]


def delta_layers(rng: random.Random, so_far: dict[str, Any]) -> list[str]:
    """Layers with the gated delta rule, and one at least with attention."""
    kinds = [rng.choice(DELTA_TYPES) for _ in range(so_far["num_hidden_layers"])]
    kinds[rng.randrange(len(kinds))] = "full_attention"
    return kinds


def some_layers(share: float) -> Draw:
    return lambda rng, so_far: [i for i in range(so_far["num_hidden_layers"]) if rng.random() < share]


DELTA_TYPES = ("linear_attention", "linear_attention", "full_attention")
EXPERT_GATE = ("silu", "gelu_pytorch_tanh")
GATE, PLAIN = ("silu", "gelu", "gelu_pytorch_tanh", "relu"), ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
# How fields are drawn, in this order. A class gets those that it has.
FIELDS: dict[str, Draw] = {
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "bias",
         "use_bias", "enable_bias", "use_parallel_residual", "parallel_attn", "multi_query", "new_decoder_architecture",
         "use_qk_norm", "qk_layernorm", "norm_topk_prob", "rope_interleave", "attn_temperature_tuning",
         "use_sliding_window", "mup_enabled", "lm_head_bias", "alibi", "layer_norm_elementwise_affine"), flip),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
        one_of(1e-6, 1e-5, 1e-3, 1e-2)),
    "sliding_window": maybe(lambda rng, _: rng.randint(2, 24)),  # transformers' cache errs where it is 1
    **dict.fromkeys(("sliding_window_pattern", "global_attn_every_n_layers"), one_of(1, 2, 4)),
    "prefix_dense_sliding_window_pattern": one_of(1, 2),
    "prefix_dense_intermediate_size": maybe(one_of(40, 72)),
    "window_size": lambda rng, _: rng.randint(2, 24),
    "attention_types": lambda rng, so_far: [
        [[rng.choice(("global", "local"))], 1] for _ in range(so_far["num_hidden_layers"])
    ],
    "max_window_layers": lambda rng, so_far: rng.randint(0, so_far["num_hidden_layers"]),
    "layer_types": kinds_of_layers,
    "attention_chunk_size": lambda rng, _: rng.randint(2, 24),
    "no_rope_layer_interval": one_of(1, 2, 4),
    "no_rope_layers": maybe(lambda rng, so_far: [rng.randint(0, 1) for _ in range(so_far["num_hidden_layers"])]),
    "floor_scale": one_of(4, 8, 32),
    "attn_scale": between(0.05, 0.5),
    **dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "logit_scale", "routed_scaling_factor", "route_scale"),
        between(0.2, 3)),
    **dict.fromkeys(("residual_multiplier", "attention_multiplier"), between(0.1, 0.8)),
    "scale_emb": between(0.5, 12),
    "scale_depth": maybe(between(0.1, 1.4)),
    "dim_model_base": maybe(one_of(16, 40, 256)),
    "query_pre_attn_scalar": one_of(8, 24, 100),
    "attn_logit_softcapping": maybe(between(2, 50)),
    "final_logit_softcapping": maybe(between(2, 30)),
    "clip_qkv": maybe(between(0.2, 2)),
    "num_ln_in_parallel_attn": maybe(one_of(1, 2)),
    "ffn_hidden_size": maybe(one_of(40, 64, 96)),
    "n_inner": maybe(one_of(40, 64, 96)),
    "ffn_dim": one_of(40, 64, 96),
    "attn_config": lambda rng, _: {"clip_qkv": rng.choice((None, 0.5, 2.0))},
    "intermediate_size_mlp": one_of(24, 40, 72),
    "num_local_experts": one_of(2, 5, 8),
    "num_experts": one_of(2, 5, 8),
    "moe_num_experts": one_of(2, 5, 8),
    "n_routed_experts": one_of(4, 8, 12),
    "moe_intermediate_size": one_of(8, 24, 40),
    "shared_expert_intermediate_size": one_of(8, 24, 40),
    "shared_intermediate_size": one_of(0, 24, 40),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), one_of(1, 2)),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
        lambda rng, so_far: rng.randint(0, so_far["num_hidden_layers"])),
    "moe_layer_end_index": lambda rng, so_far: rng.randint(-1, so_far["num_hidden_layers"] - 1),
    "moe_layer_interval": one_of(1, 2),
    "mlp_layer_types": maybe(lambda rng, so_far: rng.choices(("dense", "sparse"), k=so_far["num_hidden_layers"])),
    "expert_selection_fn": one_of("softmax", "sigmoid"),
    "shared_expert_combination_strategy": one_of("average", "sum"),
    "decoder_sparse_step": one_of(1, 2),
    "mlp_only_layers": maybe(some_layers(0.3)),
    "interleave_moe_layer_step": one_of(1, 2),
    "moe_layers": maybe(some_layers(0.6)),
    "q_lora_rank": maybe(one_of(8, 24)),
    "kv_lora_rank": one_of(16, 32, 40),
    "qk_nope_head_dim": one_of(8, 16, 24),
    "qk_rope_head_dim": one_of(4, 8, 16),
    "v_head_dim": one_of(4, 8, 12),
    "linear_conv_kernel_dim": one_of(2, 3, 4, 7),
    "linear_key_head_dim": one_of(4, 8, 12),
    "linear_value_head_dim": one_of(4, 8, 10),
    "linear_num_key_heads": one_of(1, 2, 3),
    "linear_num_value_heads": lambda rng, so_far: so_far["linear_num_key_heads"] * rng.choice((1, 2, 3)),
}  # fmt: skip
QWEN_NEXT = ("Qwen3NextConfig", "Qwen3_5TextConfig", "Qwen3_5MoeTextConfig")
LEFT_ALONE = {  # what Manta has one value of, or what another field says
    "Ernie4_5Config": {"use_bias"}, "Ernie4_5_MoeConfig": {"use_bias"}, "Phi3Config": {"attention_bias"},
    "PhiConfig": {"qk_layernorm"}, "MiniMaxM2Config": {"use_qk_norm"}, "SmolLM3Config": {"layer_types"},
    "Llama4TextConfig": {"layer_types", "sliding_window"}, "DeepseekV2Config": {"mlp_bias", "norm_topk_prob"},
    "MptConfig": {"logit_scale"}, "OlmoeConfig": {"clip_qkv"},
    "GraniteMoeHybridConfig": {"layer_types", "num_local_experts", "shared_intermediate_size"},
    "Gemma3TextConfig": {"attn_logit_softcapping"}, **{name: {"layer_types"} for name in QWEN_NEXT},
}  # fmt: skip
PARTLY_ROTATED = {
    "GlmConfig", "Glm4Config", "Glm4MoeConfig", "GPTNeoXConfig", "PhiConfig", "Phi3Config", "NemotronConfig",
    "StableLmConfig", "MiniMaxM2Config", *QWEN_NEXT,
}  # fmt: skip


def draw(rng: random.Random, config: str, has: dict[str, Any]) -> dict[str, Any]:
    """A shape for a config class that has these fields."""
    heads = rng.choice((1, 2, 3, 4, 6, 8))
    dim, layers = rng.choice((8, 12, 16, 32)), rng.randint(1, 4)
    has_head_dim = "head_dim" in has
    sizes = [size for size in (24, 40, 48, 64, 72) if size % heads == 0]
    shape: dict[str, Any] = {
        "vocab_size": rng.randint(30, 200), "hidden_size": rng.choice(sizes) if has_head_dim else heads * dim,
        "num_attention_heads": heads, "num_hidden_layers": layers, "max_position_embeddings": rng.choice((64, 96, 256)),
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    keys = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if "kv_lora_rank" in has:
        shape["hidden_size"], shape["num_key_value_heads"] = rng.choice(sizes), heads
    elif "num_key_value_heads" in has:
        shape["num_key_value_heads"] = keys
    elif "num_kv_heads" in has:
        shape["num_kv_heads"] = keys
    if has_head_dim and "kv_lora_rank" not in has:
        shape["head_dim"] = dim
    if "intermediate_size" in has:
        shape["intermediate_size"] = rng.choice((24, 44, 72) if "num_experts_per_tok" in has else (24, 41, 72))
    for name, field in FIELDS.items():
        if name in has and name not in LEFT_ALONE.get(config, ()):
            shape[name] = field(rng, shape)
    if "layer_types" in has and not shape.get("sliding_window", 1):  # these classes look for one
        shape["sliding_window"] = rng.randint(2, 24)
    if config in QWEN_NEXT:
        shape["layer_types"] = delta_layers(rng, shape)
    if config == "CwmConfig":
        shape["bos_token_id"] = 0  # its class needs one
    if config == "HeliumConfig":
        shape["hidden_size"] = heads * dim
    if config == "InternLM3Config":
        shape["mlp_bias"] = shape["attention_bias"]
    if config == "GPTJConfig":
        shape["rotary_dim"] = rng.randrange(2, dim + 1, 2)
    if config == "FalconConfig":
        shape["parallel_attn"] |= shape["new_decoder_architecture"]
        if not shape["new_decoder_architecture"]:
            shape["num_ln_in_parallel_attn"] = shape["num_kv_heads"] = None
    if config == "DeciLMConfig":
        shape["intermediate_size"] = 512
    if config == "GraniteMoeHybridConfig":  # its classes look for Mamba's heads, although no layer has them
        shape |= {"layer_types": ["attention"] * layers, "num_local_experts": 0, "position_embedding_type": "rope",
            "shared_intermediate_size": rng.choice((24, 40)), "mamba_n_heads": 2}  # fmt: skip
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((shape[n] for n in counts if n in shape), 0)
    if experts:
        top_k = next((n for n in ("moe_k", "moe_topk") if n in has), "num_experts_per_tok")
        shape[top_k] = rng.randint(1, min(4, experts))
        if config == "PhimoeConfig":
            shape |= {top_k: 2, "router_jitter_noise": rng.choice((0.01, 0.1, 0.3))}
        if "n_group" in has:
            groups = rng.choice([n for n in (1, 2, 4) if experts % n == 0 and experts // n >= 2])
            shape["n_group"], shape["topk_group"] = groups, rng.randint(1, groups)
            shape["num_experts_per_tok"] = rng.randint(1, min(4, experts // groups * shape["topk_group"]))
            if "topk_method" in has:
                shape["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    act = next((n for n in ("hidden_act", "hidden_activation", "activation_function", "activation") if n in has), "")
    if act and config not in ("GptOssConfig", "ApertusConfig", *QWEN_NEXT):
        if "Gemma" in config:
            shape[act] = "gelu_pytorch_tanh"
        else:
            row = FAMILIES[architecture_of(config)]
            shape[act] = rng.choice(EXPERT_GATE if row.routing else GATE if row.gated else PLAIN)
    if "rope_parameters" in has:
        shape["rope_parameters"] = draw_rope(rng, config, shape, dim)
    if config == "Cohere2MoeConfig":  # where no epsilon of RMSNorm is said, it has LayerNorm
        shape |= {"rope_theta": rng.choice((100.0, 10000.0)), "rms_norm_eps": rng.choice((None, 1e-5, 1e-3))}
    if config == "Gemma4TextConfig":
        draw_gemma4(rng, shape)
    return shape


def draw_gemma4(rng: random.Random, shape: dict[str, Any]) -> None:
    """What only Gemma 4 has, some of which follows from other fields."""
    heads, layers = shape["num_attention_heads"], shape["num_hidden_layers"]
    types = shape["layer_types"] or ["sliding_attention"] * layers
    shape["layer_types"] = types = [*types[:-1], "full_attention"]
    shape["global_head_dim"] = rng.choice((8, 16, 24, 48))
    shape["attention_k_eq_v"] = rng.random() < 0.5
    shape["num_global_key_value_heads"] = rng.choice([None, *(n for n in range(1, heads + 1) if heads % n == 0)])
    shape["hidden_size_per_layer_input"] = rng.choice((0, 4, 8))
    shape["vocab_size_per_layer_input"] = shape["vocab_size"]
    if shared := [n for n in range(1, layers) if set(types[: layers - n]) == set(types)]:
        # transformers' class cannot generate with shared layers that have no inputs
        shape["num_kv_shared_layers"] = rng.choice(shared) if shape["hidden_size_per_layer_input"] else 0
        shape["use_double_wide_mlp"] = rng.random() < 0.5
    shape["enable_moe_block"] = rng.random() < 0.4
    shape["top_k_experts"] = shape.pop("num_experts_per_tok")
    if not shape["enable_moe_block"]:
        shape["num_experts"] = shape["top_k_experts"] = shape["moe_intermediate_size"] = None
    shape["rope_parameters"] = {
        "full_attention": rng.choice((
            {"rope_type": "default", "rope_theta": 10000.0},
            {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0))},
            {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0})),
        "sliding_attention": rng.choice((
            {"rope_type": "default", "rope_theta": 10000.0},
            {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0})),
    }  # fmt: skip


def architecture_of(config: str) -> str:
    """The family that a config class is of."""
    base = config.removesuffix("Config").removesuffix("Text")
    return next(name for name in (f"{base}ForCausalLM", f"{base}LMHeadModel") if name in FAMILIES)


def draw_rope(rng: random.Random, config: str, shape: dict[str, Any], dim: int) -> dict[str, Any]:
    """Parameters of RoPE, for each kind of layers where the class wants that."""
    if config == "Gemma3TextConfig" or (config == "Olmo3Config" and rng.random() < 0.8):
        kinds = ("full_attention", "sliding_attention")
        ropes = {kind: draw_rope(rng, "", shape, dim) for kind in kinds}
        for rope in ropes.values():  # transformers reads it where there is but one kind of layers
            rope.pop("truncate", None)
        return ropes
    dim = shape.get("qk_rope_head_dim", dim)
    rope: dict[str, Any] = {"rope_theta": rng.choice((100.0, 10000.0, 500000.0))}
    if config in PARTLY_ROTATED:
        turned = rng.randrange(2, dim + 1, 2)
        rope["partial_rotary_factor"], dim = turned / dim, turned
    kinds = ["default", "default", "linear", "yarn", "llama3", "longrope"]
    if config == "Ministral3Config":  # this class has no other
        kinds = ["yarn"]
    if config in ("FalconConfig", "MiniMaxM2Config") or dim < 4:
        kinds = ["default"]
    if config in ("DeepseekV2Config", "DeepseekV3Config", "Glm4MoeLiteConfig"):
        kinds = ["default", "yarn"]
    if config in ("Phi3Config", "PhimoeConfig"):
        kinds = ["default", "longrope"]
    if config == "Llama4TextConfig":  # its norm undoes what other kinds multiply q and k by, but for its epsilon
        kinds = ["default", "linear", "llama3"]
    rope["rope_type"] = kind = rng.choice(kinds)
    most = shape["max_position_embeddings"]
    if kind != "default":
        rope["factor"] = rng.choice((2.0, 4.0, 8.0))
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = rng.choice([n for n in (16, 32, 64) if n <= most])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((2.0, 4.0))}
    if kind == "longrope":
        # Which factors are used depends on the length so far, and in Manta on the most that there may be.
        rope["original_max_position_embeddings"] = rng.choice((4, 64))
        for name in ("short_factor", "long_factor"):
            rope[name] = [round(rng.uniform(1, 8), 2) for _ in range(dim // 2)]
        if config == "PhimoeConfig":  # in which transformers has the short factors at any length
            rope |= {"original_max_position_embeddings": 64, "short_mscale": 1.2, "long_mscale": 1.4}
        if config == "Phi3Config":
            shape["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
            del rope["factor"]
    if kind == "yarn":
        rope["factor"] = most / rope["original_max_position_embeddings"]
        extra = {"mscale": 1.0, "mscale_all_dim": rng.choice((0.5, 1.0)), "beta_fast": 16, "beta_slow": 2,
                 "truncate": rng.random() < 0.5, "attention_factor": 1.3}  # fmt: skip
        rope |= {name: value for name, value in extra.items() if rng.random() < 0.4}
        if ("mscale" in rope) != ("mscale_all_dim" in rope):
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if config == "Ministral3Config":
        rope |= {"llama_4_scaling_beta": rng.choice((0.1, 0.5)), "beta_fast": 16, "beta_slow": 1, "mscale": 1.0}
        rope |= {"mscale_all_dim": 1.0}
    return rope


class Oracle:
    """A process of transformers that answers as long as it is asked."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", str(ROOT / "tests" / "oracle.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/"
        )

    def ask(self, **what: Any) -> dict[str, Any]:
        """The answer to a line."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        with self.process:  # whose end closes its pipes
            pass


def compare(folder: Path, case: dict[str, Any], rng: random.Random) -> None:
    """Check a checkpoint's logits and greedy tokens.

    Raises:
        AssertionError: they differ.
    """
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 2, "swap_space": 0.0}
    sizes = {"max_model_len": CONTEXT, "max_num_batched_tokens": CONTEXT, "block_size": rng.choice((4, 16))}
    worker = start_worker(EngineConfig(str(folder), **options, **sizes), ModelConfig.from_folder(str(folder)))
    want, (short, long) = load_file(folder / "oracle.safetensors"), case["prompts"]
    seen, forward = [], worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]  # type: ignore
    kinds, _, per_seq = worker.state.block_tables.shape
    tables = torch.arange(2 * kinds * per_seq).view(2, kinds, per_seq).tolist()
    new = [NewRow(slot=i, token_ids=ids, blocks=tables[i]) for i, ids in enumerate(case["prompts"])]
    first = rng.randrange(2, len(long))
    plans = [[(0, len(short)), (1, first)], [(0, 1), (1, len(long) - first)], *[[(0, 1), (1, 1)]] * (NEW - 1)]
    results = [worker.step(StepPlan(i, rows=rows, new=[] if i else new)) for i, rows in enumerate(plans)]
    logits = worker.model.logits(torch.cat(seen[:2]))
    ours = logits[: len(short)], torch.cat((logits[len(short) : len(short) + first], logits[len(short) + first + 1 :]))
    tokens = [results[i].token_ids[0] for i in range(NEW)], [results[i].token_ids[1] for i in range(1, NEW + 1)]
    for i in range(2):
        theirs = want[f"logits{i}"]
        scale = float(theirs.abs().max())
        allowed = max(TOLERANCE * scale, 4 * float((want[f"exact{i}"] - theirs).abs().max()))
        error = float((ours[i] - theirs).abs().max())
        assert error <= allowed, f"logits of prompt {i} are apart by {error / scale:.2g} of the largest"
        for step, token in enumerate(want[f"tokens{i}"].tolist()):
            if tokens[i][step] != token:
                assert want[f"margins{i}"][step] <= 2 * allowed, f"token {step} of prompt {i} differs"
                break


def run(oracle: Oracle, case: dict[str, Any], folder: Path, rng: random.Random) -> tuple[str, str]:
    """The family of a case, and what is wrong with it; "" for nothing."""
    try:
        if error := oracle.ask(folder=str(folder), **of_transformers(case)).get("error"):
            return "", f"transformers: {error}"
        rename(folder, case)
        family = json.loads((folder / "config.json").read_text())["architectures"][0]
        try:
            compare(folder, case, rng)
        except Exception as error:
            return family, f"{type(error).__name__}: {error}"
        return family, ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="shapes of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="*", help="config classes of transformers; all by default")
    parser.add_argument("--shape", help="try this printed shape alone")
    parser.add_argument("--add", action="store_true", help="add to what bench_results/families.json has")
    parser.add_argument("--dry", action="store_true", help="leave bench_results/families.json alone")
    parser.add_argument("--table", action="store_true", help="write docs/families.md's table")
    args = parser.parse_args()
    if args.table:
        PAGE.write_text(with_table(PAGE.read_text()))
        return
    torch.set_num_threads(1)
    oracle, folder = Oracle(), Path(tempfile.mkdtemp())
    classes = args.families or config_classes()
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    failed = 0
    for config in classes:
        of = RENAMED.get(config, config)
        has, rng = oracle.ask(fields=of), random.Random(f"{args.seed} {config}")
        drawn = passed = 0
        for i in range(args.count):
            case = {"name": "a" * (i + 1), "config": config, "shape": draw(rng, config, has), "new": NEW, "exact": True}
            if args.shape:
                case["shape"] = json.loads(args.shape)
            vocab = case["shape"]["vocab_size"]
            case["prompts"] = [[rng.randrange(vocab) for _ in range(rng.randint(*n))] for n in ((5, 8), (9, 48))]
            _, error = run(oracle, case, folder / "model", rng)
            drawn, passed = drawn + 1, passed + (not error)
            if error:
                print(f"{config} {i}: {error}\n    {json.dumps(case['shape'])}", flush=True)
        print(f"{config}: {passed} of {drawn}", flush=True)
        failed += drawn - passed
        if not args.dry:
            before = results.get(architecture_of(config), {}) if args.add else {}
            results[architecture_of(config)] = {
                "drawn": drawn + before.get("drawn", 0), "passed": passed + before.get("passed", 0)
            }  # fmt: skip
            RESULT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    oracle.close()
    sys.exit(failed > 0)


KNOWN = {  # what people know a family by, where its name does not say it
    "BailingMoeForCausalLM": "Ling, Ring 1, 1.5", "BailingMoeV2ForCausalLM": "Ling, Ring 2",
    "BaichuanForCausalLM": "Baichuan, Baichuan 2", "BloomForCausalLM": "Bloom, BLOOMZ",
    "DeciLMForCausalLM": "Nemotron Super 49B",
    "BertModel": "BERT, MiniLM, BGE, E5, Arctic Embed", "XLMRobertaModel": "XLM-RoBERTa, BGE-M3, multilingual E5",
    "NewModel": "GTE v1.5, multilingual GTE", "NomicBertModel": "Nomic Embed", "ModernBertModel": "ModernBERT",
    "DeepseekV2ForCausalLM": "DeepSeek V2, V2.5, Coder V2", "DeepseekV3ForCausalLM": "DeepSeek V3, R1, Kimi K2",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 (dense)", "Exaone4ForCausalLM": "EXAONE 4.0", "GlmForCausalLM": "GLM-4-9B",
    "Glm4ForCausalLM": "GLM-4-0414", "Glm4MoeForCausalLM": "GLM-4.5, 4.6", "GptOssForCausalLM": "GPT-OSS",
    "GPT2LMHeadModel": "GPT-2", "GPTNeoXForCausalLM": "Pythia, GPT-NeoX", "GraniteForCausalLM": "Granite 3",
    "HunYuanDenseV1ForCausalLM": "Hunyuan (dense)", "LlamaForCausalLM": "Llama 1 to 3.3, Yi, Vicuna, Aquila, XVERSE",
    "Llama4ForCausalLM": "Llama 4 Scout, Maverick (text)", "MistralForCausalLM": "Mistral 7B, Nemo, Small",
    "Ministral3ForCausalLM": "Ministral 3", "CohereForCausalLM": "Command R",
    "Cohere2ForCausalLM": "Command R7B, Command A", "Gemma4ForCausalLM": "Gemma 4 (text)",
    "PhiForCausalLM": "Phi-1, 2", "Phi3ForCausalLM": "Phi-3, 3.5, 4", "Qwen2ForCausalLM": "Qwen 2, 2.5, QwQ, MiMo",
    "Gemma3ForCausalLM": "Gemma 3 (text)", "MiniMaxM2ForCausalLM": "MiniMax M2", "Olmo2ForCausalLM": "OLMo 2",
    "OlmoForCausalLM": "OLMo 1",
    "Olmo3ForCausalLM": "OLMo 3", "SmolLM3ForCausalLM": "SmolLM3", "SeedOssForCausalLM": "Seed-OSS",
    "Gemma2ForCausalLM": "Gemma 2", "GraniteMoeForCausalLM": "Granite 3 MoE", "OlmoeForCausalLM": "OLMoE",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-57B-A14B", "Qwen3MoeForCausalLM": "Qwen3 MoE",
    "Qwen3NextForCausalLM": "Qwen3-Next", "Qwen3_5ForCausalLM": "Qwen3.5 (text)",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 MoE (text)", "AfmoeForCausalLM": "Arcee Trinity", "Dots1ForCausalLM": "dots.llm1",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5", "ExaoneMoeForCausalLM": "K-EXAONE", "FlexOlmoForCausalLM": "FlexOlmo",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash", "HunYuanMoEV1ForCausalLM": "Hunyuan A13B",
    "PhimoeForCausalLM": "Phi-3.5-MoE", "SolarOpenForCausalLM": "Solar Open",
    "Cohere2MoeForCausalLM": "North Mini Code", "GraniteMoeHybridForCausalLM": "Granite 4 (dense)",
    "GraniteMoeSharedForCausalLM": "Granite MoE Shared",
    "ChatGLMForCausalLM": "ChatGLM 2, 3, GLM-4-9B (2024)", "CwmForCausalLM": "CWM",
    "ExaoneForCausalLM": "EXAONE 3, 3.5", "GPTBigCodeForCausalLM": "StarCoder, SantaCoder",
    "GPTJForCausalLM": "GPT-J", "GPTNeoForCausalLM": "GPT-Neo",
    "HyperCLOVAXForCausalLM": "HyperCLOVA X Think", "InternLM2ForCausalLM": "InternLM 2, 2.5",
    "InternLM3ForCausalLM": "InternLM 3", "IQuestCoderForCausalLM": "IQuest Coder", "Jais2ForCausalLM": "Jais 2",
    "MiniCPMForCausalLM": "MiniCPM 1, 2, 4", "MiniCPM3ForCausalLM": "MiniCPM 3", "QWenLMHeadModel": "Qwen (1)",
    "YiForCausalLM": "Yi (its first files)",
}  # fmt: skip
BEGIN, END = "<!-- the table: python campaigns/family_campaign.py --table -->", "<!-- its end -->"


def known_as(name: str) -> str:
    """What users call a family."""
    return KNOWN.get(name, re.sub("ForCausalLM$|LMHeadModel$|Model$", "", name))


def table() -> str:
    """The families by the names that users know, as a table in Markdown. A star: tested on one shape alone."""
    drawn = json.loads(RESULT.read_text())
    lines = ["| known as | `architectures` |", "|---|---|"]
    for name in sorted(FAMILIES, key=lambda name: known_as(name).lower()):
        architectures = [name, *(alias for alias, of in ALIASES.items() if of == name)]
        names = ", ".join(f"`{architecture}`" for architecture in architectures)
        star = "" if name in drawn or FAMILIES[name].encoder else "\\*"
        lines.append(f"| {known_as(name)}{star} | {names} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def config_classes() -> list[str]:
    """The config class of each family."""
    from random_checkpoints import FAMILIES as CASES

    return sorted({case["config"] for case in CASES.values()})


if __name__ == "__main__":
    main()
