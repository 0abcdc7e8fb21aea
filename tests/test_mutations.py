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
import oracles
import test_delta
import test_expert_kernels
import test_kernels
import test_kernels_sampling
import test_latent
import test_matmul
from ops import delta, experts, latent, matmul, sampling

F32, BF16 = torch.float32, torch.bfloat16
HOMES = (delta, experts, kernels, latent, matmul, sampling)
# The kernel (and of what, where it has several), what stands in it, what is put there, and the test with one of the
# examples that it may draw.
MUTATIONS: dict[str, tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = {
    "norm": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_kernels.test_rms_norm, (3, 100, F32, True, False)),
    "norm, of deviations": (
        "tl.where(m_x, b_h - ", "tl.where(o_x >= 0, b_h - ",
        test_kernels.test_layer_norm, (3, 100, F32, True, True, False)),
    "qk_norm_rope_store": (
        "((H + 2 * KV) * D)", "((H + KV) * D)",
        test_kernels.test_qk_norm_rope_store, (3, (6, 2), (32, 32), F32, oracles.HeadNorm("rms"), False)),
    "qk_norm_rope_store, of deviations": (
        "b_partner -= b_mean", "b_partner -= 0.0",
        test_kernels.test_qk_norm_rope_store, (3, (6, 2), (32, 32), F32, oracles.HeadNorm("layer"), False)),
    "qk_norm_rope_store, of values": (
        "b_raw = _cast(b_x * b_scale", "b_raw = _cast(b_x",
        test_kernels.test_qk_norm_rope_store, (3, (6, 2), (32, 32), F32, oracles.HeadNorm("rms", values=True), False)),
    "qk_norm_rope_store, of what is rotated": (
        "_center_and_scale(b_y, ", "_center_and_scale(b_x, ",
        test_kernels.test_qk_norm_rope_store,
        (3, (6, 2), (32, 16), F32, oracles.HeadNorm("layer", True, True), False)),
    "square_sums": (
        "i_k * Q", "i_k * K",
        test_kernels.test_qk_norm_rope_store, (3, (6, 2), (32, 32), F32, oracles.HeadNorm("scales", True), False)),
    "act": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_kernels.test_act_mul, (2, 96, F32, "silu")),
    "act, without a gate": ("GATED else SIZE", "GATED else SIZE - 1", test_kernels.test_act, (2, 96, F32, "relu")),
    "linear": ("o_n < N", "o_n < N - 1", test_matmul.test_linear, (3, 65, 100, F32, False, 1)),
    "route": (
        "m_left & (o_e != i_e)", "m_left & (o_e > i_e)",
        test_expert_kernels.test_route, (4, (128, 8, 1, 1), "softmax", False, True, False)),
    "plan_experts": (
        "(b_id < i_e)", "(b_id <= i_e)", test_expert_kernels.test_plan_experts_sorts_the_pairs, ((40, 4, 6), 3)),
    "expert_gate_up": (
        "m_n = o_m < i_end, o_n < SIZE", "m_n = o_m < i_end, o_n < SIZE - 1",
        test_expert_kernels.test_experts, (20, (4, 4, 0, 4), (32, 16), F32, False, "silu", False, False)),
    "expert_down": (
        "m_n = o_m < i_end, o_n < H", "m_n = o_m < i_end - 1, o_n < H",
        test_expert_kernels.test_experts, (20, (4, 4, 0, 4), (32, 16), F32, False, "silu", False, False)),
    "expert_sum": (
        "(i_e < E)", "(i_e <= E)",
        test_expert_kernels.test_experts, (20, (8, 3, 2, 4), (32, 16), F32, False, "silu", False, False)),
    "plan_decode": (
        "tl.cdiv(b_len, ITEM)", "(b_len // ITEM)",
        test_kernels.test_plan_decode_counts_the_tiles_that_hold_a_key, (1, 0, 0)),
    "plan_decode, of chunks": (
        "WINDOW, CHUNKED)", "WINDOW, False)",
        test_kernels.test_plan_decode_counts_the_tiles_that_hold_a_key, (4, 150, 1)),
    "attention_decode": (
        "* BLOCK_N, i_len)", "* BLOCK_N, i_len - 1)",
        test_kernels.test_attention_decode, ([2], (6, 2, 32), F32, 0, 16, 1, 0.0, False, False, False, 2)),
    "attention_decode, of slopes": (
        "slopes + i_kv * G + o_q % G", "slopes + i_kv + o_q % G",
        test_kernels.test_attention_decode, ([2], (6, 2, 32), F32, 0, 16, 1, 0.0, False, True, False, 2)),
    "attention_prefill": (
        "i_len - i_count + o_token", "i_len - i_count + o_token - 1",
        test_kernels.test_attention_prefill, ([(20, 17)], (6, 2, 32), F32, 0, 16, 0.0, False, False, False)),
    "attention_prefill, of chunks": (
        "tl.maximum(i_end - 1, 0), WINDOW", "tl.maximum(i_low, 0), WINDOW",
        test_kernels.test_attention_prefill, ([(95, 70)], (6, 2, 32), F32, 100, 16, 0.0, False, False, True)),
    "mask_words": (
        "o_at < i_known", "o_at < i_known - 1", test_kernels_sampling.test_one_word_that_matches_bars_its_end, (1,)),
    "sample_chunks": (
        "o_v, o_v < V)", "o_v, o_v < V - 1)",
        test_kernels_sampling.test_sample, (True, 1000, 1.0, 40, 1.0, 0.0, "normal", F32, True, None)),
    "sample_pick": (
        "m_c = o_c < CHUNKS", "m_c = o_c < CHUNKS - 1",
        test_kernels_sampling.test_sample, (True, 1000, 1.0, 40, 1.0, 0.0, "normal", F32, True, None)),
    "logprobs": ("mask=o_v < V,", "mask=o_v < V - 1,", test_kernels_sampling.test_logprobs, (50, 5, "normal", F32)),
    "pool": ("o_t < i_end", "o_t < i_end - 1", test_kernels.test_pool, (F32, 128)),
    "apply_writes": ("o_x < n", "o_x < n - 1", test_kernels.test_apply_writes, ([5, 0, 3], 0)),
    "prepare_inputs": (
        "i_slot * table_stride", "i_slot * (table_stride - 1)",
        test_kernels.test_prepare_inputs_and_post_update, ([(True, 3), (True, 1), (True, 20)], 0)),
    "post_update": (
        "m_b = o_b < num_rows", "m_b = o_b < num_rows - 1",
        test_kernels.test_prepare_inputs_and_post_update, ([(True, 3), (True, 1), (True, 20)], 0)),
    "latent_store": (
        "m_r = o_r < R", "m_r = o_r < R - 1", test_latent.test_latent_store, (3, (24, 6), F32, True)),
    "rope_last": (
        "o_pair < P // 2)", "o_pair < P // 2 - 1)", test_latent.test_rope_last, (2, 3, (24, 6), F32, False, False)),
    "head_linear": (
        "m_m, m_n = o_m < tokens, o_n < N", "m_m, m_n = o_m < tokens, o_n < N - 1",
        test_latent.test_head_linear, (5, 2, (130, 24), F32, False)),
    "latent_decode": (
        "* BLOCK_N, i_len)", "* BLOCK_N, i_len - 1)",
        test_latent.test_latent_decode, ([130, 15], 3, (24, 6), F32, 16, 1, 5)),
    "latent_decode, of tiles": (
        "i_len - TOKENS + (i_tile * G + o_q) // H", "i_len - TOKENS + o_q // H",
        test_latent.test_latent_decode, ([40], 20, (24, 6), F32, 16, 2, 5)),
    "latent_prefill": (
        "i_len - i_count + o_m // H", "i_len - i_count + o_m // H - 1",
        test_latent.test_latent_prefill, ([(20, 17)], 3, (24, 6), F32, 16)),
    "conv_silu": (
        "o_t - K + 1 + i_j", "o_t - K + 2 + i_j", test_delta.test_conv_silu, ([3, 0], [(7, 2)], 4, 24, F32)),
    "conv_state": (
        "> i_count, 1 - K", ">= i_count, 1 - K", test_delta.test_conv_silu, ([], [(0, 2)], 4, 24, F32)),
    "delta_step": (
        "i_h // (HV // HK)", "i_h % HK",
        test_delta.test_delta_rule, ([3, 0, -1, 90], [], (2, 4, 8, 16), F32, "mild", False)),
    "delta_chunk": (
        "m_t = i_start + o_i < i_stop", "m_t = i_start + o_i < i_stop - 1",
        test_delta.test_delta_rule, ([], [(7, 17)], (2, 4, 8, 16), BF16, "mild", False)),
    "delta_scan": (
        "+ SIZE, i_stop) - 1", "+ SIZE, i_stop) - 2",
        test_delta.test_delta_rule, ([], [(70, 2)], (2, 4, 8, 16), BF16, "mild", False)),
    "gated_norm": ("o_r % H * D", "o_r % H", test_delta.test_gated_norm, (3, (3, 20), F32)),
    "sigmoid_mul": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_delta.test_sigmoid_mul, (2, 100, F32)),
    "move_blocks": ("m_x = o_x < SIZE", "m_x = o_x < SIZE - 1", test_kernels.test_copy_blocks, (F32,)),
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


@pytest.mark.interpreted  # on a GPU a wrong stride may end the process's context, and every later test with it
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_tests_catch_it(mutation: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel, (old, new, test, example) = mutation.partition(",")[0], MUTATIONS[mutation]
    plain = test.hypothesis.inner_test if hasattr(test, "hypothesis") else test
    fixtures = {"ops": kernels, "device": device, "place": device, "monkeypatch": monkeypatch}
    given = [value for name, value in fixtures.items() if name in inspect.signature(plain).parameters]
    plain(*given, *example)
    home = next(module for module in HOMES if hasattr(module, f"{kernel}_kernel"))
    module = mutant(tmp_path, home, kernel, old, new)
    monkeypatch.setattr(module, "PROCESSORS", 6, raising=False)
    for tests in (test_kernels, sys.modules[plain.__module__]):  # `run` is of the first one
        monkeypatch.setattr(tests, home.__name__, module, raising=False)
    for name, op in vars(kernels).items():  # which hands on the ops of the other files
        if home is not kernels and inspect.isfunction(op) and op.__module__ == home.__name__:
            monkeypatch.setattr(kernels, name, getattr(module, op.__name__))
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        plain(*given, *example)
