"""The kinds of RoPE that a config.json asks for. Standard library only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from config import MAX_CONTEXT
from model_config import ModelConfig, Rope
from models.config_fields import number, typed, whole

if TYPE_CHECKING:
    from models.read_config import ConfigReader

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "ntk")
WINDOWED = ("sliding_attention", "chunked_attention")
LAYER_TYPES = ("full_attention", *WINDOWED)


def read_ropes(reader: ConfigReader) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The different kinds of RoPE, and which of them each layer has."""
    f, row, windows = reader.fields, reader.row, reader.windows
    if row.name("positions") or row.position_offset or row.alibi:
        for unused in ("rope_parameters", "rope_scaling", "rope_theta"):
            f.get(unused)
        return (Rope(1.0, 0, {}),), (0,) * reader.layers
    parameters = f.value("rope_parameters", dict)  # transformers 5, whose class may have its own where it is left out
    parameters = row.defaults.get("rope_parameters", {}) if parameters is None else parameters
    old = f.value("rope_scaling", dict) or {}  # transformers 4; where both are there, it stands for all of the other
    nested = parameters if set(parameters) & set(LAYER_TYPES) and (row.local_rope or not old) else None
    kinds = {kind: typed(kind, (nested or {}).get(kind), dict) or {} for kind in LAYER_TYPES}
    flat = kinds["full_attention"] | old if nested else old or parameters
    dims = dict(zip((window > 0 for window in windows), (dim for _, dim in reader.kv_shapes), strict=True))
    full = read_rope(reader, flat, head_dim=dims.get(False), layered=bool(nested or row.local_rope))
    if old and not nested and parameters.get("rope_theta", full.theta) != full.theta:
        lost = f"rope_theta is {full.theta:g}: rope_scaling stands for all of rope_parameters, where it is"
        reader.notes.append(f"{lost} {parameters['rope_theta']!r:.80}; say it in rope_scaling, too, to keep it")
    local = full
    if row.local_rope or nested:
        theta = "rope_local_base_freq" if row.local_rope == "rope_local_base_freq" else "rope_theta"
        local = read_rope(reader, kinds["sliding_attention"], theta, dims.get(True), True)
    growth = None
    if row.rope == "listed" and row.chunked:
        growth = f.number("attn_scale", 0, 1e3, 0.1), f.whole("floor_scale", 1, 2**31, 8192), 1
        growth = growth if f.truth("attn_temperature_tuning") else None
    none = Rope(1.0, 0, {}, growth)
    of_layers = [
        none if not has else local if window else full
        for window, has in zip(windows, reader.rope_layers(), strict=True)
    ]
    ropes = [rope for i, rope in enumerate(of_layers) if rope not in of_layers[:i]]
    return tuple(ropes), tuple(map(ropes.index, of_layers))


def read_rope(
    reader: ConfigReader, says: dict[str, Any], theta_field: str = "rope_theta", head_dim: int | None = None,
    layered: bool = False,
) -> Rope:  # fmt: skip
    """A kind of RoPE, as its own parameters say, and where these are silent the whole config.json: of the trained
    length that says more than they, unless kinds of layers have a RoPE each (`layered`)."""
    f = reader.fields
    theta = number("rope_theta", says.get("rope_theta"), 2, 1e15, f.number(theta_field, 2, 1e15, 10000))
    theta *= (ratio := f.number("rope_ratio", 1e-3, 1e6) if "rope_ratio" in f.row.defaults else 1)
    if 1 < ratio < 50:  # ChatGLM 2's; later ones have 50 and more
        raise ValueError(
            f"config.json: rope_ratio is {ratio:g}, by which ChatGLM 2 divides positions and others multiply theta; "
            f"say which: rope_ratio 1 and rope_scaling {{'rope_type': 'linear', 'factor': {ratio:g}}}, or rope_theta"
        )
    trained = f.whole("max_position_embeddings", 2, MAX_CONTEXT)
    kind = says.get("rope_type") or says.get("type") or "default"
    # Of models that also see: text has the same position in all its parts. And Phi-3's first name for LongRoPE.
    kind = {"mrope": "default", "xdrope": "dynamic", "su": "longrope"}.get(str(kind), kind)
    kind = "longrope" if kind == "yarn" and says.get("long_factor") else kind
    if kind not in ROPE_KINDS:
        raise ValueError(f"config.json asks for RoPE of type {kind!r:.80}; Manta has {', '.join(ROPE_KINDS)}")
    dim = rotary_dim(reader, says, head_dim or reader.head_dim, kind)
    if kind == "default":
        return Rope(theta, dim, {})
    if kind == "proportional":  # frequencies are those of the whole head, of which the last ones are 0
        factor = number("factor", says.get("factor"), 1e-3, 1e6, 1.0)
        return Rope(theta, head_dim or reader.head_dim, {"rope_type": kind, "factor": factor, "rotated": dim})
    longest = trained
    if kind in ("yarn", "longrope", "llama3"):
        above = None if layered else f.get("original_max_position_embeddings")
        name = "original_max_position_embeddings"
        trained = whole(name, says.get(name) if above is None else above, 2, MAX_CONTEXT, longest)
    grown = longest / trained if kind in ("yarn", "longrope") else None
    scaling: dict[str, Any] = {"rope_type": kind, "original_max_position_embeddings": trained}
    scaling["factor"] = number("factor", says.get("factor"), 1e-3, 1e6, grown)
    for name, low in (("beta_fast", 1e-3), ("beta_slow", 1e-3), ("attention_factor", 1e-3), ("mscale", 0),
                      ("mscale_all_dim", 0)):  # fmt: skip
        if says.get(name) is not None:
            scaling[name] = number(name, says[name], low, 1e3)
    if kind == "ntk" and says.get("mixed_b") is not None:
        raise ValueError(f"config.json: mixed_b is {says['mixed_b']!r:.80}; Manta has RoPE of type 'ntk' without it")
    if kind == "dynamic" and dim == 2:
        raise ValueError("config.json asks for dynamic RoPE of 2 elements of a head; it needs 4")
    if kind == "dynamic" and says.get("alpha"):  # HunYuan's: as if theta were larger, at any length
        theta *= number("alpha", says["alpha"], 1e-3, 1e9) ** (dim / (dim - 2))
        return Rope(theta, dim, {})
    if reader.row.qk_norm == "unit":
        scaling["attention_factor"] = 1.0  # the norm, which here is taken before, would undo any other
    if kind == "yarn":
        scaling["truncate"] = typed("truncate", says.get("truncate"), bool) is not False
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            scaling[name] = number(name, says.get(name), 1e-3, 1e6)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = typed(name, says.get(name), list) or []
            if len(factors) != dim // 2:
                raise ValueError(f"config.json: {name} has {len(factors)} numbers; it must have {dim // 2}")
            scaling[name] = [number(name, factor, 1e-3, 1e6) for factor in factors]
        for name in ("short_mscale", "long_mscale"):  # Phi-3.5-MoE's
            if says.get(name) is not None:
                scaling[name] = number(name, says[name], 1e-3, 1e3)
    growth = None
    if says.get("llama_4_scaling_beta"):
        growth = number("llama_4_scaling_beta", says["llama_4_scaling_beta"], 0, 1e3), trained, 0
    return Rope(theta, dim, scaling, growth)


def rotary_dim(reader: ConfigReader, says: dict[str, Any], head_dim: int, kind: str) -> int:
    """How many elements of a head are rotated."""
    f = reader.fields
    if reader.latent:
        return reader.latent.rope_dim
    if "partial_rotary_factor" not in f.row.defaults and kind != "proportional":
        return head_dim
    share = number(
        "partial_rotary_factor", says.get("partial_rotary_factor"), 0, 1,
        f.number("partial_rotary_factor", 0, 1, f.whole("rotary_dim", 0, head_dim, head_dim) / head_dim),
    )  # fmt: skip
    dim = int(head_dim * share)
    if dim % 2:
        raise ValueError(f"config.json: partial_rotary_factor is {share}; it must leave an even part of {head_dim}")
    return dim


def read_slopes(reader: ConfigReader) -> tuple[float, ...]:
    """ALiBi's slope of each head (Press et al., 2022), if there is ALiBi: with P, the power of two from their number
    on, these are 2^(-8 i / P) for i from 1 to P. Where there are fewer heads, they have the even i first."""
    heads, row = reader.heads, reader.row
    if not row.alibi:
        return ()
    power, most = 1 << (heads - 1).bit_length(), reader.fields.number("alibi_bias_max", 1, 1024, 8)
    steps = [*range(2, power + 1, 2), *range(1, power + 1, 2)]
    scale = reader.head_dim**-0.5 if row.scaled_slopes else 1.0
    return tuple(scale * 2 ** (-most * i / power) for i in (sorted(steps) if power == heads else steps[:heads]))


def notes_on(config: ModelConfig, length: int) -> tuple[str, ...]:
    """Lines for the start log about a model whose sequences may have `length` tokens."""
    notes = {
        "longrope": "LongRoPE has long_factor for prompts of any length; --max-model-len {} has short_factor",
        "dynamic": "dynamic RoPE is that of the longest sequence for all; --max-model-len {} has the trained one",
    }
    for scaling in (rope.scaling for rope in config.ropes):
        trained, note = scaling.get("original_max_position_embeddings", length), notes.get(scaling.get("rope_type", ""))
        if note and length > trained:
            return *config.notes, note.format(trained)
    return config.notes


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's factor, with which attention over a context that is `factor` times as long stays as sharp."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
