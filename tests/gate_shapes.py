"""The shapes of models that test_compile_gate.py compiles kernels for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Shape(NamedTuple):
    """The sizes of a model and the settings of an engine that kernels are compiled for."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm: bool = False
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    chunked: bool = False
    tokens: int = 1  # that a decoding row computes in a step
    rank: int = 0  # of latents, whose keys have 64 numbers more; 0: the model has none
    cache: torch.dtype | None = None  # of keys and values, if it is not that of queries
    reach: bool = False  # tokens of an image see one another


QWEN = Shape("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, norm=True)
LLAMA = Shape("llama3-8b", 4096, 32, 8, 128, 14336, 128256)
DEMO = Shape("demo", 192, 6, 2, 32, 512, 1024, norm=True)
WHOLE = (QWEN, DEMO, LLAMA)
KEYS_FP8 = torch.float8_e4m3fn
EVERY: dict[str, Any] = {"window": 1024, "soft_cap": 30.0, "sinks": True, "slopes": True}
ATTENTION = (
    DEMO._replace(name="demo-fp32", dtype=torch.float32),
    QWEN._replace(name="qwen3-0.6b-fp16-16", block_size=16, dtype=torch.float16),
    LLAMA._replace(name="d64-window", heads=12, kv_heads=4, head_dim=64, window=4096),
    LLAMA._replace(name="d80", heads=32, kv_heads=32, head_dim=80, block_size=16),
    LLAMA._replace(name="d256", heads=16, kv_heads=8, head_dim=256),
    LLAMA._replace(name="qwen3-32b-tp4", heads=16, kv_heads=2),
    LLAMA._replace(name="d64-window-sinks", heads=64, kv_heads=8, head_dim=64, window=128, sinks=True),  # gpt-oss
    LLAMA._replace(name="d256-cap", heads=16, kv_heads=8, head_dim=256, soft_cap=50.0),  # Gemma 2 9B
    LLAMA._replace(name="d128-chunks", heads=40, window=8192, chunked=True),  # Llama 4
    LLAMA._replace(name="d64-slopes", heads=32, kv_heads=32, head_dim=64, slopes=True),  # Falcon-RW
    LLAMA._replace(name="d512-every", heads=16, kv_heads=2, head_dim=512, **EVERY),
    LLAMA._replace(name="d512", heads=32, kv_heads=4, head_dim=512),  # Gemma 4
    *(LLAMA._replace(name=f"d{d}-every", heads=16, kv_heads=8, head_dim=d, **EVERY) for d in (80, 96, 112, 192, 256)),
    LLAMA._replace(name="qwen3-next-attention", heads=16, kv_heads=2, head_dim=256),
    *(
        LLAMA._replace(name=f"{name}{suffix}", heads=heads, kv_heads=kv_heads, head_dim=256, window=window)
        for name, heads, kv_heads, size in (("gemma3-1b", 4, 1, 512), ("gemma3-4b", 8, 4, 1024))
        for suffix, window in (("", 0), ("-window", size))
    ),
    *(
        LLAMA._replace(name=f"gpt-oss-tp{tp}{suffix}", heads=64 // tp, kv_heads=8 // tp, head_dim=64, window=window)
        for tp in (2, 4, 8)
        for suffix, window in (("", 0), ("-window", 128))
    ),
    *(  # Llama 3.2 3B, Qwen3 14B, Qwen2.5 7B, GLM 4.5, Qwen3 235B
        LLAMA._replace(name=f"d128-g{group}", heads=group * kv_heads, kv_heads=kv_heads)
        for group, kv_heads in ((3, 8), (5, 8), (7, 4), (12, 8), (16, 4))
    ),
    *(
        LLAMA._replace(name=f"{name}{suffix}-reach", heads=heads, kv_heads=kv_heads, head_dim=d, reach=True, **more)
        for name, heads, kv_heads, d, cap in (
            *(("gemma3-4b", 8, 4, 256, 0.0), ("gemma3-27b", 32, 16, 128, 0.0), ("gemma4", 32, 4, 512, 0.0)),
            *(("paligemma", 8, 1, 256, 0.0), ("paligemma2", 16, 8, 256, 50.0), ("d64", 32, 8, 64, 0.0)),
        )
        for suffix, more in (("", {"soft_cap": cap}), ("-window", {"window": 1024}), ("-kv8", {"cache": KEYS_FP8}))
    ),
    LLAMA._replace(name="llama3-8b-tp8", heads=4, kv_heads=1),
    LLAMA._replace(name="llama3-70b-tp8", heads=8, kv_heads=1),
    *(
        LLAMA._replace(name=f"d{dim}-blocks-{size}", heads=16, kv_heads=8, head_dim=dim, block_size=size)
        for dim in (64, 128, 256)
        for size in (16, 32, 128)
    ),
    LLAMA._replace(name="llama3-8b-4-tokens", tokens=4),
    LLAMA._replace(name="g16-8-tokens", heads=32, kv_heads=2, tokens=8),
    *(
        LLAMA._replace(name=f"d{dim}-g{group}-5-tokens", heads=2 * group, kv_heads=2, head_dim=dim, tokens=5)
        for dim in (64, 128, 256)
        for group in (2, 4, 8)
    ),
    LLAMA._replace(name="d64-g16-9-tokens", heads=32, kv_heads=2, head_dim=64, tokens=9),  # in two parts
    LLAMA._replace(name="d128-g16-9-tokens", heads=32, kv_heads=2, tokens=9),  # in two parts
    LLAMA._replace(name="d512-g8-5-tokens", heads=16, kv_heads=2, head_dim=512, tokens=5),  # in two parts
    *(
        LLAMA._replace(name=f"d{dim}-every-5-tokens", heads=16, kv_heads=2, head_dim=dim, tokens=5, **EVERY)
        for dim in (128, 256)
    ),
    LLAMA._replace(  # gpt-oss
        name="d64-window-sinks-5-tokens", heads=64, kv_heads=8, head_dim=64, window=128, sinks=True, tokens=5
    ),
    *(
        DEMO._replace(name=f"d{dim}-fp32-5-tokens", heads=16, kv_heads=2, head_dim=dim, tokens=5, dtype=torch.float32)
        for dim in (32, 128, 256)
    ),
)
KV8 = tuple(  # chips before sm_89 do not convert FP8
    LLAMA._replace(name=f"d{dim}-kv8{name}", heads=16, kv_heads=4, head_dim=dim, cache=KEYS_FP8, **more)
    for dim in (64, 80, 128, 256)
    for name, more in (("", {}), ("-16", {"block_size": 16}), ("-every", EVERY), ("-5-tokens", {"tokens": 5}))
)
DEEPSEEK = QWEN._replace(name="deepseek-v3", hidden=7168, heads=128, kv_heads=1, head_dim=128, rank=512)
LATENT = (
    DEEPSEEK,
    DEEPSEEK._replace(name="deepseek-v3-tp8", heads=16),  # and V2-Lite
    DEEPSEEK._replace(name="deepseek-v3-tp8-2-tokens", heads=16, tokens=2, block_size=16),
    DEEPSEEK._replace(name="deepseek-v3-5-tokens", tokens=5),
    DEEPSEEK._replace(name="deepseek-v3-tp8-5-tokens", heads=16, tokens=5),
    DEEPSEEK._replace(name="deepseek-v3-tp4-blocks-32", heads=32, block_size=32),
    DEEPSEEK._replace(name="deepseek-v3-tp2-blocks-128", heads=64, block_size=128),
    DEEPSEEK._replace(name="deepseek-v3-kv8", cache=KEYS_FP8),
    DEEPSEEK._replace(name="deepseek-v3-tp8-kv8", heads=16, cache=KEYS_FP8),
    DEEPSEEK._replace(name="latent-fp32", heads=16, rank=64, dtype=torch.float32),
)


class Encoder(NamedTuple):
    """The sizes of an encoder's attention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    reach: int = 0  # of biases by distance; 0: there are none
    dtype: torch.dtype = torch.bfloat16


ENCODERS = (
    Encoder("minilm-l6", 12, 12, 32, dtype=torch.float16),
    Encoder("mpnet-base", 12, 12, 64, reach=128),
    Encoder("modernbert-base", 12, 12, 64, window=65),
    Encoder("embeddinggemma-300m", 3, 1, 256),
    Encoder("embeddinggemma-300m-window", 3, 1, 256, window=257),
    Encoder("encoder-fp32", 12, 12, 32, dtype=torch.float32),
    *(Encoder(f"encoder-d{d}", 16, 8, d) for d in (48, 72, 80, 96, 128)),
    *(Encoder(f"encoder-d{d}-every", 16, 8, d, 300, 128) for d in (32, 64, 80, 128, 256)),
    *(Encoder(f"encoder-d{d}-every-fp32", 16, 8, d, 300, 128, torch.float32) for d in (32, 64, 80, 128, 256)),
    *(Encoder(f"encoder-d{d}-fp32", 16, 8, d, 300, 0, torch.float32) for d in (64, 128, 256)),
)


class Experts(NamedTuple):
    """The sizes of a layer of experts and its router's arguments."""

    name: str
    experts: int
    hidden: int
    size: int
    k: int
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    activation: str = "silu"
    biased: bool = False
    weigh_inputs: bool = False
    dtype: torch.dtype = torch.bfloat16
    kind: str = ""  # of codes, and how many inputs share a scale
    group: int = 0
    wide: int = 0  # inputs that share factors of scales and zeros of 8 bits; 0: scales are bfloat16, without zeros
    rounding: str = ""


EXPERTS = (
    Experts("qwen3-30b-a3b", 128, 2048, 768, 8),
    Experts("qwen3-next-experts", 512, 2048, 512, 10),
    Experts("gpt-oss-20b", 32, 2880, 2880, 4, activation="swigluoai", biased=True),
    Experts("mixtral-8x7b", 8, 4096, 14336, 2),
    Experts("deepseek-v3", 256, 7168, 2048, 8, "sigmoid", 8, 4),
    Experts("kimi-k2", 384, 7168, 2048, 8, "sigmoid"),
    Experts("deepseek-v2", 160, 5120, 1536, 6, "softmax", 8, 3),
    Experts("llama4-scout", 16, 5120, 8192, 1, "sigmoid", weigh_inputs=True),
    Experts("gpt-oss-20b-mxfp4", 32, 2880, 2880, 4, activation="swigluoai", biased=True, kind="fp4", group=32),
    Experts("qwen3-30b-a3b-int4", 128, 2048, 768, 8, kind="int4", group=128),
    Experts("qwen3-30b-a3b-q4_k", 128, 2048, 768, 8, kind="int4", group=32, wide=256),
    Experts("qwen3-30b-a3b-q6_k", 128, 2048, 768, 8, kind="int6", group=16, wide=256),
    Experts("deepseek-v3-fp8", 256, 7168, 2048, 8, "sigmoid", 8, 4, kind="fp8", group=128),
    Experts("qwen3-30b-a3b-w8a8-int8", 128, 2048, 768, 8, kind="int8", group=2048, rounding="int8"),
    Experts("qwen3-30b-a3b-w8a8-fp8", 128, 2048, 768, 8, kind="fp8", group=2048, rounding="fp8"),
    Experts("qwen3-30b-a3b-w8a8-fp8-128", 128, 2048, 768, 8, kind="fp8", group=128, rounding="fp8"),
    Experts("deepseek-v3-w8a8-fp8-128", 256, 7168, 2048, 8, "sigmoid", 8, 4, kind="fp8", group=128, rounding="fp8"),
    Experts("experts-fp32", 8, 96, 80, 2, activation="gelu_tanh", dtype=torch.float32),
)


class Delta(NamedTuple):
    """The sizes of a gated delta-rule layer."""

    name: str
    key_heads: int
    heads: int
    dk: int = 128
    dv: int = 128
    hidden: int = 4096  # of the attention layers beside it, whose output has a gate
    dtype: torch.dtype = torch.bfloat16


DELTA = (
    Delta("qwen3-next-80b-a3b", 16, 32),
    Delta("qwen3.5-27b", 16, 48, hidden=6144),
    *(Delta(f"qwen3-next-tp{tp}", 16 // tp, 32 // tp, hidden=4096 // tp) for tp in (2, 4, 8)),
    *(Delta(f"qwen3.5-tp{tp}", 16 // tp, 48 // tp, hidden=6144 // tp) for tp in (2, 4, 8)),
    Delta("delta-fp32", 2, 4, 96, 80, dtype=torch.float32),
)


class Lora(NamedTuple):
    """A product that adapters change: its inputs, its slices' bounds, the highest rank, and how many adapters."""

    name: str
    inputs: int
    bounds: tuple[int, ...]
    rank: int = 16
    count: int = 8
    dtype: torch.dtype = torch.bfloat16


LORA = (
    Lora("qwen3-0.6b-qkv", 1024, (0, 2048, 3072, 4096)),
    Lora("qwen3-0.6b-gate_up", 1024, (0, 3072, 6144), 64),
    Lora("qwen2.5-7b-qkv", 3584, (0, 3584, 4096, 4608), 8, 1),
    Lora("llama3-8b-down", 14336, (0, 4096), 16, 32),
    Lora("llama3-8b-gate_up", 4096, (0, 14336, 28672), 128, 20),
    Lora("llama3-70b-tp8-qkv", 8192, (0, 1024, 1152, 1280), 256, 4),
    Lora("lora-odd", 1000, (0, 33, 100), 10, 3, torch.float16),
    Lora("lora-fp32", 192, (0, 192, 256, 320), 16, 4, torch.float32),
    Lora("lora-fp32-256", 2048, (0, 2048, 3072), 256, 4, torch.float32),
)


class Coded(NamedTuple):
    """A weight in codes."""

    name: str
    kind: str
    outputs: int
    inputs: int
    group: int
    scales: torch.dtype = torch.float16
    zeros: bool = False
    dtype: torch.dtype = torch.bfloat16
    rounding: str = ""
    wide: int = 0  # inputs that share factors; 0: there are none


CODED = (
    Coded("qwen3-0.6b-int4", "int4", 6144, 1024, 128, zeros=True),
    Coded("qwen3-0.6b-int8", "int8", 1024, 3072, 3072, torch.float32),
    Coded("llama3-8b-int4", "int4", 28672, 4096, 128, dtype=torch.float16),
    Coded("llama3-8b-int4-32", "int4", 4096, 14336, 32, zeros=True),
    Coded("llama3-8b-q4_k", "int4", 4096, 14336, 32, torch.uint8, zeros=True, wide=256),
    Coded("llama3-8b-q6_k", "int6", 4096, 14336, 16, torch.int8, dtype=torch.float16, wide=256),
    Coded("llama3-8b-q5_k", "int6", 28672, 4096, 32, torch.uint8, zeros=True, wide=256),
    Coded("llama3-8b-mxfp4", "fp4", 4096, 14336, 32, torch.bfloat16),
    Coded("llama3-8b-nvfp4", "fp4", 28672, 4096, 16, torch.float8_e4m3fn, wide=4096),
    Coded("llama3-8b-nf4", "nf4", 28672, 4096, 64, torch.bfloat16),
    Coded("llama3-8b-iq4_nl", "iq4", 28672, 4096, 32),
    Coded("llama3-8b-int8", "int8", 28672, 4096, 128, zeros=True),
    Coded("llama3-8b-fp8", "fp8", 4096, 14336, 14336, torch.float32),
    Coded("llama3-8b-fp8-128", "fp8", 28672, 4096, 128, torch.float32, dtype=torch.float16),
    Coded("llama3-8b-w8a8-int8", "int8", 4096, 14336, 14336, rounding="int8"),
    Coded("llama3-8b-w8a8-fp8", "fp8", 4096, 14336, 14336, torch.float32, rounding="fp8"),
    Coded("llama3-8b-w8a8-fp8-128", "fp8", 28672, 4096, 128, torch.float32, rounding="fp8"),
    Coded("coded-odd-w8a8", "int8", 100, 1000, 1000, dtype=torch.float32, rounding="int8"),
    Coded("coded-odd", "int8", 100, 1000, 48, dtype=torch.float16),
    Coded("coded-fp32", "int4", 320, 192, 32, zeros=True, dtype=torch.float32),
    Coded("coded-fp32-q5_k", "int6", 320, 192, 32, torch.uint8, zeros=True, dtype=torch.float32, wide=64),
    Coded("coded-fp32-nf4", "nf4", 320, 192, 16, dtype=torch.float32),
)
VOCABULARIES = {"gpt-oss-vocabulary": 201088, "qwen3.5-vocabulary": 248320, "gemma3-vocabulary": 262144}
# The numbers of a block over all layers, and of the states of a sequence.
PAGES = {
    "qwen3-0.6b-page": (28 * 2 * 8 * 64 * 128, torch.bfloat16),
    "llama3-8b-page": (32 * 2 * 8 * 64 * 128, torch.bfloat16),
    "llama3-70b-tp8-page": (80 * 2 * 64 * 128, torch.bfloat16),
    "gemma3-27b-page-of-128": (62 * 2 * 16 * 128 * 128, torch.bfloat16),
    "deepseek-v3-page-of-16": (61 * 16 * 576, torch.bfloat16),
    "qwen3-next-states": (36 * (32 * 128 * 128 + 3 * 8192), torch.float32),
}
