"""A KV cache in FP8: the same answers however they are computed, half of the bytes, and the checkpoint's scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from config import DEMO, EngineConfig
from cpu import ops as cpu_ops
from device import startup
from device.loader import load_weights
from integrity import check_integrity
from model import Transformer
from model_config import ModelConfig
from parallel import Group
from test_engine import tokens

FP8 = torch.float8_e4m3fn
TIGHT = {"num_gpu_blocks_override": 125, "block_size": 1, "schedule_conservativeness": 0.0}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def sure(work):
    """Conversations, in whose answers no token is near to another one: there rounding changes nothing."""
    return [some[:18:2] for some in work]


@pytest.fixture(scope="module")
def fp8_answers(make_llm, sure):
    return tokens(make_llm(kv_cache_dtype="fp8").generate(*sure, use_tqdm=False))


def test_fp8_hardly_changes_what_the_demo_says(llm, sure, fp8_answers):
    same = [a == b for a, b in zip(fp8_answers, tokens(llm.generate(*sure, use_tqdm=False)), strict=True)]
    assert sum(same) >= len(same) - 1


@pytest.mark.parametrize(
    ("fields", "happened"),
    [
        ({}, "prefix_cache_hits_total"),
        ({"max_num_batched_tokens": 32, "max_num_seqs": 32}, ""),
        pytest.param(TIGHT | {"preemption_mode": "recompute"}, "num_preemptions_total", marks=pytest.mark.full),
        (TIGHT | {"preemption_mode": "swap", "swap_space": 0.01}, "num_swapped_blocks_total"),
        pytest.param({"speculative_config": DRAFTS}, "spec_decode_num_accepted_tokens_total", marks=pytest.mark.full),
        pytest.param({"tensor_parallel_size": 2}, "", marks=pytest.mark.full),
        pytest.param({"sanitize_kv": True}, "", marks=pytest.mark.full),
    ],
    ids=["prefix cache", "chunks of 32", "recompute", "swap", "drafts", "two ranks", "sanitizer"],
)  # fmt: skip
def test_same_answers_however_they_are_computed(make_llm, sure, fp8_answers, fields, happened):
    llm = make_llm(kv_cache_dtype="fp8", **fields)
    for _ in range(1 + (not fields)):
        assert tokens(llm.generate(*sure, use_tqdm=False)) == fp8_answers
    assert not happened or llm.core.metrics()[happened] > 0
    check_integrity(llm.core.scheduler)


def test_a_block_has_one_byte_for_each_number(make_llm):
    facts = [make_llm(dtype=dtype, kv_cache_dtype=cache, num_gpu_blocks_override=64).core.facts
             for dtype, cache in (("float32", "auto"), ("float32", "fp8"), ("bfloat16", "fp8_e4m3"))]  # fmt: skip
    whole, quarter, same = (fact["kv_bytes"] for fact in facts)
    assert whole == 4 * quarter == 4 * same
    assert [fact["memory"]["block"] for fact in facts] == [whole // 64, quarter // 64, quarter // 64]
    assert [fact["cache_dtype"] for fact in facts] == ["float32", "float8_e4m3fn", "float8_e4m3fn"]


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", ""])
def test_another_dtype_is_refused_by_name(value):
    with pytest.raises(ValueError, match=f"kv_cache_dtype is '{value}'; allowed: auto, fp8, fp8_e4m3"):
        EngineConfig(kv_cache_dtype=value)


def test_a_gpu_that_does_not_convert_fp8_is_refused(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(startup, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(startup, "check_compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX A6000")
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8'; NVIDIA RTX A6000 .* capability 8.9 .* 'auto'"):
        startup.prepare(EngineConfig(kv_cache_dtype="fp8"), ModelConfig.from_folder(DEMO), 0, "")


def test_all_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)[torch.randperm(256)].view(4, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got, want = cpu_ops._numbers(codes, dtype), codes.to(dtype)
        assert got.dtype == dtype and torch.equal(got.nan_to_num(7), want.nan_to_num(7)) and int(got.isnan().sum()) == 2


def test_what_is_nan_stays_nan():
    found = reference._stored(torch.tensor([torch.nan, torch.inf, -1e9]), FP8, 2.0).float().tolist()
    assert str(found) == "[nan, 448.0, -448.0]"


# --- the checkpoint's scales ------------------------------------------------------------------------------------------


def loaded(folder: Path, cache: str = "fp8") -> Transformer:
    config = replace(ModelConfig.from_folder(str(folder)), kv_cache_dtype=cache)
    model = Transformer(config, reference, "cpu", torch.float32, 8, Group())
    load_weights(model, str(folder))
    return model


@pytest.fixture
def scaled(tmp_path):
    """Writes the demo with more tensors beside `self_attn` of its first layer; returns the folder."""
    weights = load_file(f"{DEMO}/model.safetensors")
    (tmp_path / "config.json").write_text(Path(DEMO, "config.json").read_text())

    def write(**scales: torch.Tensor) -> Path:
        scale_tensors = {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}
        save_file(weights | scale_tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("k_scale", "v_scale"), [0.25, 3.0]),
        (("attn.k_scale", "attn.v_scale"), [0.25, 3.0]),
        (("k_proj.k_scale", "v_proj.v_scale"), [0.25, 3.0]),
        (("k_proj.output_scale", "v_proj.output_scale"), [0.25, 3.0]),
        (("qkv_proj.k_scale", "qkv_proj.v_scale"), [0.25, 3.0]),
        (("kv_scale",), [0.25, 0.25]),
        (("v_scale",), [1.0, 0.25]),
    ],
)
def test_scales_are_found_under_any_of_their_names(scaled, names, found):
    folder = scaled(**dict(zip(names, (torch.tensor(0.25), torch.tensor([3.0])), strict=False)))
    model = loaded(folder)
    assert model.kv_scales.tolist() == [found] + [[1.0, 1.0]] * (model.config.num_layers - 1)
    save_file(load_file(f"{DEMO}/model.safetensors"), folder / "model.safetensors")
    load_weights(model, str(folder))  # other weights, without scales
    assert bool((model.kv_scales == 1).all())
    assert loaded(scaled(**{names[0]: torch.tensor(0.25)}), "auto").kv_scales is None


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(0.0), "layers.0.self_attn.k_scale is 0.0; a scale must be above 0"),
        (torch.tensor(-1.0), "layers.0.self_attn.k_scale is -1.0; a scale must be above 0"),
        (torch.tensor(torch.nan), "layers.0.self_attn.k_scale is nan; a scale must be above 0"),
        (torch.ones(2), r"layers.0.self_attn.k_scale has shape \[2\]; config.json asks for \[1\]"),
        (torch.ones(1, dtype=torch.int32), "layers.0.self_attn.k_scale is I32"),
    ],
)
def test_scales_that_are_none_are_refused_by_name(scaled, scale, message):
    with pytest.raises(ValueError, match=message):
        loaded(scaled(k_scale=scale))


def test_attention_reads_with_the_scales_that_were_used_to_store(scaled, make_llm, sure, fp8_answers):
    ask, right = [some[:2] for some in sure], fp8_answers[:2]
    llm = make_llm(kv_cache_dtype="fp8")
    scales = llm.core.executor.worker.model.kv_scales
    for k, v, same in ((0.5, 0.25, True), (2.0**-9, 2.0**-9, False)):  # by the last, most is stored as 448 or -448
        scales[:] = torch.tensor([k, v])
        assert (tokens(llm.generate(*ask, use_tqdm=False)) == right) == same
        llm.reset_prefix_cache()
