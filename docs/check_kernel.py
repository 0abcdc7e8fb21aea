"""Compares an op of kernels.py with its twin in reference.py, on any machine: `python docs/check_kernel.py rms_norm`.

Small random inputs run on a GPU, or else in Triton's interpreter. The error is |kernel - twin| / |twin| of the worst
result, or of integers the share that differs. The tests try many more shapes (`tests/test_kernels.py`, `tests/ops`). On
a GPU `python bench/bench.py kernels --ops rms_norm` checks the shapes of real models, and measures them.
"""

import difflib
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "bench"))
from config import lacking

if lack := lacking(("torch", "triton", "numpy")):
    sys.exit(lack)
import torch

os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))  # before Triton is imported
import bench_kernels as real
import kernel_cases as rare
import kernels
import reference
from kernel_cases import Case, Inputs, draw, ints

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = real.Shape("small", hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=300, norm=True)
PLANS = {"plan_decode": "attention_decode", "plan_experts": "expert_gate_up", "plan_lora": "lora_shrink"}  # their users


def coded(kind, device):
    """A weight [64, 128] in codes."""
    rounds = kind if kind in ("int8", "fp8") else ""
    return rare.coded(rare.random_codes(device, kind, 32 if kind == "int4" else 1 << 20, 64, 128), rounds)


def rotation(device):
    angle = torch.rand(5, 1, 16, device=device)
    return torch.cat((angle.cos(), angle.sin()), 1)


def layer_norm(device):
    x, residual, weight, bias = draw(device, 5, 64), draw(device, 5, 64), draw(device, 64), draw(device, 64)
    return Inputs(lambda ops: ops.layer_norm(x, weight, bias, 1e-6, residual), (residual,))


def square_sums(device):
    x = draw(device, 5, 8 * 32)
    return Inputs(lambda ops: ops.square_sums(x, 2, 32))


def act(device):
    x = draw(device, 5, 96)
    return Inputs(lambda ops: ops.act(x, "gelu_tanh"))


def round_inputs(device):
    x, weight = draw(device, 5, 128), coded("int8", device)
    return Inputs(lambda ops: ops.round_inputs(x, weight(ops)))


def quantized_rows(device):
    ids, weight = torch.arange(5, device=device), coded("int4", device)
    return Inputs(lambda ops: ops.quantized_rows(weight(ops), ids, torch.bfloat16))


def sigmoid_mul(device):
    x, gate = draw(device, 5, 64), draw(device, 5, 64)
    return Inputs(lambda ops: ops.sigmoid_mul(x, gate))


def pool(device):
    hidden, starts = draw(device, 9, 64), ints([0, 2, 9], device)
    return Inputs(lambda ops: ops.pool(hidden, starts, "weightedmean"))


def attention_encode(device):
    qkv, biases, starts = draw(device, 75, 4 + 2 * 2, 32), draw(device, 4, 41).float(), ints([0, 5, 75], device)
    q, k, v = qkv.split((4, 2, 2), dim=1)
    return Inputs(lambda ops: ops.attention_encode(q, k, v, (starts, 70), 0.2, 30, biases))


def rope_last(device):
    x, turn = draw(device, 5, 3, 48), rotation(device)
    return Inputs(lambda ops: ops.rope_last(x, turn), (x,))


def mask_words(device):
    bits = torch.full((1, 1, 10), -1, dtype=torch.int32, device=device)
    words, known, prompt = ints([[[-1, 9], [4, 7]]], device), ints([4], device), ints([2], device)
    ids, slots, kinds = ints([[1, 2, 3, 4, 0]], device), ints([0], device), ints([reference.BAD_WORDS], device)
    fields = kinds, *real.penalties(1, 300, device)[1:5], bits
    return Inputs(lambda ops: ops.mask_words(slots, ids, known, prompt, words, ops.Adjust(*fields)), (bits,))


MADE = (
    layer_norm, square_sums, act, round_inputs, quantized_rows, sigmoid_mul, pool, attention_encode, rope_last,
    mask_words,
)  # fmt: skip


def small_cases():
    """Cases of all ops that take no more than some hundred milliseconds in the interpreter."""
    yield from real.norm_cases(SMALL, (5,))
    yield from real.rope_cases(SMALL, (5,))
    yield from real.linear_cases(SMALL, (1, 5))
    yield from real.decode_cases(SMALL, [("70 and 130 tokens", [70, 130])], (2,))
    yield from real.prefill_cases(SMALL, [("40 tokens after 30, and 70", [(40, 30), (70, 0)])])
    yield from real.sample_cases(SMALL, 2)
    yield from real.state_cases(SMALL, 8, 1024)
    yield from real.block_cases(SMALL, 4)
    yield from rare.expert_cases(rare.Experts("small", 8, 2, 64, 32, "silu"), (5,))
    yield from rare.expert_cases(rare.Experts("small", 8, 2, 64, 32, "silu", "int4", 32), (5,))
    yield from rare.delta_cases(rare.Delta("small", 1, 2, 32), ((3, 1), (1, 70)))
    rows = [("70 and 128 tokens", [70, 128])]
    yield from rare.latent_cases(rare.Latent("small", 3, 32, 16, 64), rows, (5,))
    yield from rare.lora_cases(rare.Lora("small", (("qkv", 64, (0, 64, 96)),), 16, 3), (5,))
    for kind, rounds in (("int4", ""), ("int8", "int8")):
        group = 32 if kind == "int4" else 1 << 20
        yield from rare.coded_cases(rare.Coded(kind, ((kind, 128, 64),), kind, group, rounds), (5,))
    for make in MADE:
        yield Case(make.__name__, "small", 0, 0, make)


def main():
    """Check the op that the command line names; without one, or with one that there is not, list them."""
    known, given = {case.op for case in small_cases()} | PLANS.keys(), sys.argv[1:]
    if len(given) != 1 or given[0] not in known:
        near = difflib.get_close_matches(given[0], known, 1) if given else []
        said = f"NAME is {given[0]!r}" + (f"; did you mean {near[0]}?" if near else "") if given else "name an op"
        sys.exit(f"check_kernel.py: {said}\nops: {', '.join(sorted(known))}")
    (name,), wrong = given, 0
    warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, in whose infinities the interpreter computes
    for case in (case for case in small_cases() if case.op == PLANS.get(name, name)):
        try:
            error = real.check(case, kernels, reference, DEVICE)
            print(
                f"{case.op}, {case.size}: error {error:.1e}, right ({0 if case.exact else real.ALLOWED:g} is allowed)"
            )
        except AssertionError as error:
            print(f"{error}: WRONG")
            wrong = 1
    sys.exit(wrong)


if __name__ == "__main__":
    main()
