"""Each kernel with a mistake put in, an off-by-one in a mask or a wrong stride: its own test must see it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import kernels
import test_delta
import test_drafts
import test_experts
import test_kernels
import test_kernels_sampling
import test_latent
import test_lora
import test_matmul
import test_quantized
import test_reference
from ops import delta, drafts, encode, experts, latent, lora, matmul, quantized, sampling

PLAN_DECODE = test_kernels.test_plan_decode_counts_the_tiles_that_hold_a_key
HOMES = (delta, drafts, encode, experts, kernels, latent, lora, matmul, quantized, sampling)
# The kernel (and of what, where it has several), what stands in it, what is put there, and the test whose chosen
# examples see it. Where a test has none, one of its cases follows.
MUTATIONS: dict[str, tuple[Any, ...]] = {
    "norm": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_reference.test_rms_norm),
    "norm, of deviations": ("tl.where(m_x, b_h - ", "tl.where(o_x >= 0, b_h - ", test_reference.test_layer_norm),
    "qk_norm_rope_store": ("((H + 2 * KV) * D)", "((H + KV) * D)", test_reference.test_qk_norm_rope_store),
    "qk_norm_rope_store, of deviations": (
        "b_partner -= b_mean", "b_partner -= 0.0", test_reference.test_qk_norm_rope_store),
    "qk_norm_rope_store, of values": (
        "b_raw = _cast(b_x * b_scale", "b_raw = _cast(b_x", test_reference.test_qk_norm_rope_store),
    "qk_norm_rope_store, of what is rotated": (
        "_center_and_scale(b_y, ", "_center_and_scale(b_x, ", test_reference.test_qk_norm_rope_store),
    "qk_norm_rope_store, in FP8": (
        "o_h >= H + KV).to", "o_h >= H).to", test_reference.test_a_pool_in_fp8_holds_the_nearest_numbers,
        (torch.float32,)),
    "square_sums": ("i_k * Q", "i_k * K", test_reference.test_qk_norm_rope_store),
    "act": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_reference.test_act_mul),
    "act, without a gate": ("GATED else SIZE", "GATED else SIZE - 1", test_reference.test_act),
    "linear": ("o_n < N", "o_n < N - 1", test_matmul.test_linear),
    "quantized_linear": ("_inside(o_n, N, BLOCK_N)", "o_n < N - 1", test_quantized.test_quantized_linear),
    "quantized_linear, of parts": (
        "i_part in range(SPLITS)", "i_part in range(1, SPLITS)", test_quantized.test_quantized_linear),
    "round_inputs": ("i_t * G + i_g, b_scale", "i_t * G, b_scale", test_quantized.test_products_of_rounded_inputs),
    "quantized_linear, of rounded inputs": (
        "m_m, m_n, i_s,", "m_m, m_n, 0,", test_quantized.test_products_of_rounded_inputs),
    "quantized_rows": ("o_k // GROUP", "o_k // K", test_quantized.test_quantized_rows),
    "quantized_rows, of factors": ("o_k // WIDE", "o_k // K", test_quantized.test_factors),
    "route": ("m_left & (o_e != i_e)", "m_left & (o_e > i_e)", test_experts.test_route),
    "plan_experts": ("(b_id < i_e)", "(b_id <= i_e)", test_experts.test_plan_experts_sorts_the_pairs),
    "expert_gate_up": (
        "m_n = o_m < i_end, o_n < SIZE", "m_n = o_m < i_end, o_n < SIZE - 1", test_experts.test_experts),
    "expert_down": ("m_n = o_m < i_end, o_n < H", "m_n = o_m < i_end - 1, o_n < H", test_experts.test_experts),
    "expert_gate_up, of rounded inputs": (
        "b_token, o_row, m_m", "b_token, o_gate, m_m", test_quantized.test_experts_whose_inputs_are_rounded),
    "expert_down, of rounded inputs": (
        "b_pair, i_e.to(tl.int64) * H + o_n", "b_pair, o_n", test_quantized.test_experts_whose_inputs_are_rounded),
    "expert_sum": ("(i_e < E)", "(i_e <= E)", test_experts.test_experts),
    "lora_ids": ("o_t < i_stop", "o_t < i_stop - 1", test_lora.test_plan_lora_sorts_the_tokens),
    "lora_shrink": ("m_n = o_m < i_end, o_n < N", "m_n = o_m < i_end, o_n < N - 1", test_lora.test_lora),
    "lora_shrink, of parts": ("i_s in range(SPLITS)", "i_s in range(1, SPLITS)", test_lora.test_lora),
    "lora_expand": ("o_n < i_high", "o_n < i_high - 1", test_lora.test_lora),
    "lora_expand, of slices": ("(G * R) + i_g * R", "(G * R) + i_g", test_lora.test_lora),
    "plan_decode": ("tl.cdiv(b_len, ITEM)", "(b_len // ITEM)", PLAN_DECODE, (1, 0, 0)),
    "plan_decode, of chunks": ("WINDOW, CHUNKED)", "WINDOW, False)", PLAN_DECODE, (4, 150, 1)),
    "attention_decode": ("* BLOCK_N, i_len)", "* BLOCK_N, i_len - 1)", test_reference.test_attention_decode),
    "attention_decode, of slopes": (
        "slopes + i_part * G + o_q % G", "slopes + i_part + o_q % G", test_reference.test_attention_decode),
    "attention_decode, in FP8": ("kv_scales + 1", "kv_scales", test_reference.test_attention_decode),
    "attention_decode, of tokens": ("TOKENS + o_q // G", "TOKENS + o_q % TOKENS", test_reference.test_attention_decode),
    "attention_decode, of parts": ("// (PARTS // KV)", "% KV", test_reference.test_attention_decode),
    "attention_prefill": (
        "i_len - i_count + o_token", "i_len - i_count + o_token - 1", test_reference.test_attention_prefill),
    "attention_prefill, in FP8": ("scale *= tl.load(kv_scales)", "scale *= 1.0", test_reference.test_attention_prefill),
    "attention_prefill, of chunks": (
        "tl.maximum(i_end - 1, 0), WINDOW", "tl.maximum(i_low, 0), WINDOW", test_reference.test_attention_prefill),
    "attention_encode": (
        "i_tile + TOKENS - 1 + WINDOW", "i_tile + TOKENS - 2 + WINDOW", test_reference.test_attention_encode),
    "attention_encode, of no prompt": ("i_start + i_tile, num_tokens", "i_start + i_tile, num_tokens - TOKENS",
        test_reference.test_attention_encode),
    "mask_words": (
        "o_at < i_known", "o_at < i_known - 1", test_kernels_sampling.test_one_word_that_matches_bars_its_end, (1,)),
    "mask_words, of drafts": ("i_slot * MASKS + n", "i_slot * MASKS", test_kernels_sampling.test_mask_words),
    "sample_chunks, of drafts": ("MASKS, DRAFTS\n", "MASKS, 0\n", test_kernels_sampling.test_sample_after_drafts),
    "sample_pick, of drafts": (
        "_num_drafts(drafts, i_r, DRAFTS)", "DRAFTS", test_kernels_sampling.test_sample_after_drafts),
    "sample_chunks": ("o_v, o_v < V)", "o_v, o_v < V - 1)", test_kernels_sampling.test_sample),
    "sample_pick": ("m_c = o_c < CHUNKS", "m_c = o_c < CHUNKS - 1", test_kernels_sampling.test_sample),
    "logprobs": ("mask=o_v < V,", "mask=o_v < V - 1,", test_reference.test_logprobs),
    "match": ("o_e >= i_l", "o_e > i_l", test_drafts.test_look_up),
    "follow": ("o_j % period", "o_j", test_drafts.test_look_up),
    "follow, of others": ("tl.load(num_known + i_u) - i_end", "MOST", test_drafts.test_look_up),
    "put_drafts": ("o_j < i_count)", "o_j <= i_count)", test_drafts.test_put_drafts),
    "put_drafts, of holes": ("(b_draft >= 0) &", "(b_draft >= -9) &", test_drafts.test_put_drafts),
    "match, of equals": ("b_length >= b_most", "b_length > b_most", test_drafts.test_look_up),
    "pool": ("o_t < i_end", "o_t < i_end - 1", test_kernels.test_pool, (torch.float32, 128)),
    "apply_writes": ("o_x < n", "o_x < n - 1", test_reference.test_apply_writes),
    "prepare_inputs": (
        "i_slot * table_stride", "i_slot * (table_stride - 1)", test_kernels.test_prepare_inputs_and_post_update),
    "post_update": (
        "m_b = o_b < num_rows", "m_b = o_b < num_rows - 1", test_kernels.test_prepare_inputs_and_post_update),
    "latent_store": ("m_r = o_r < R", "m_r = o_r < R - 1", test_latent.test_latent_store),
    "rope_last": ("o_pair < P // 2)", "o_pair < P // 2 - 1)", test_latent.test_rope_last),
    "latent_decode": ("* BLOCK_N, i_len)", "* BLOCK_N, i_len - 1)", test_latent.test_latent_decode),
    "latent_decode, of tiles": (
        "i_len - TOKENS + (i_tile * G + o_q) // H", "i_len - TOKENS + o_q // H", test_latent.test_latent_decode),
    "conv_silu": ("o_t - K + 1 + i_j", "o_t - K + 2 + i_j", test_delta.test_conv_silu),
    "conv_silu, of drafts": ("tl.load(taken + i_b)", "i_count", test_delta.test_conv_silu_after_drafts),
    "conv_state": ("> i_count, 1 - K", ">= i_count, 1 - K", test_delta.test_conv_silu),
    "delta_step": ("i_h // (HV // HK)", "i_h % HK", test_delta.test_delta_rule),
    "delta_step, of drafts": ("i_t + 1 - i_start", "i_t - i_start", test_delta.test_delta_rule_after_drafts),
    "delta_chunk": ("m_t = i_start + o_i < i_stop", "m_t = i_start + o_i < i_stop - 1", test_delta.test_delta_rule),
    "delta_scan": ("+ SIZE, i_stop) - 1", "+ SIZE, i_stop) - 2", test_delta.test_delta_rule),
    "gated_norm": ("o_r % H * D", "o_r % H", test_delta.test_gated_norm),
    "sigmoid_mul": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_delta.test_sigmoid_mul),
    "move_blocks": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_reference.test_copy_blocks, ()),
}  # fmt: skip


def mutant(folder: Path, home: ModuleType, kernel: str, old: str, new: str) -> ModuleType:
    """A file of kernels with `old` replaced in one kernel."""
    before, start, rest = inspect.getsource(home).partition(f"def {kernel}_kernel(")
    body, end, after = rest.partition("\n\n\n")
    assert old in body
    path = folder / "mutant.py"
    path.write_text(before + start + body.replace(old, new) + end + after)
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutant"] = module  # where inspect looks for the source
    spec.loader.exec_module(module)
    return module


def test_each_kernel_has_a_mutation() -> None:
    names = [name for module in HOMES for name in vars(module)]
    found = {name.removesuffix("_kernel") for name in names if name.endswith("_kernel")}
    assert found == {name.partition(",")[0] for name in MUTATIONS}


@pytest.fixture(scope="module")
def passed() -> set[Callable[..., None]]:
    """The checks that are known to pass without a mutation."""
    return set()


@pytest.mark.full
@pytest.mark.interpreted  # on a GPU a wrong stride may end the process's context, and every later test with it
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_tests_catch_it(
    mutation: str, passed: set[Callable[..., None]], device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel, (old, new, test, *case) = mutation.partition(",")[0], MUTATIONS[mutation]
    check, examples = (test, case) if case else (test.check, test.on)
    fixtures = {"ops": kernels, "device": device, "place": device, "monkeypatch": monkeypatch}

    def run() -> None:
        values = [value for name, value in fixtures.items() if name in inspect.signature(check).parameters]
        for example in examples:
            check(*values, *example)

    if check not in passed:
        run()
        passed.add(check)
    home = next(module for module in HOMES if hasattr(module, f"{kernel}_kernel"))
    module = mutant(tmp_path, home, kernel, old, new)
    monkeypatch.setattr(module, "PROCESSORS", 6, raising=False)
    if home is kernels:
        fixtures["ops"] = module
    for tests in (test_kernels, sys.modules[check.__module__]):  # `run` is of the first one
        monkeypatch.setattr(tests, home.__name__, module, raising=False)
    for name, op in vars(kernels).items():  # which hands on the ops of the other files
        if home is not kernels and inspect.isfunction(op) and op.__module__ == home.__name__:
            monkeypatch.setattr(kernels, name, getattr(module, op.__name__))
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        run()
