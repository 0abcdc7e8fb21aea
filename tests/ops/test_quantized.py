"""The Triton kernel of products with weights in codes, against numbers that are unpacked one by one.

They run as those of test_kernels.py do. What the interpreter can't run, the instructions that unpack two bytes at a
time, is computed here for all of them.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import oracles
from examples import tried

pytest.importorskip("triton")

import kernels
import reference
from cpu import quantized as cpu_quantized
from ops import matmul, quantized
from reference import BITS, Quantized
from test_experts import check_experts, layer

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3 = torch.float8_e4m3fn


def number(kind: str, code: int) -> float:
    """The number of a code, counted from 0."""
    if kind in ("int4", "int6"):
        return code - (8 if kind == "int4" else 32)
    if kind == "int8":
        return code - 256 if code >= 128 else code
    if kind in ("nf4", "iq4"):
        return (reference.NF4 if kind == "nf4" else reference.IQ4)[code]
    exponent_bits, mantissa_bits, bias = (2, 1, 1) if kind == "fp4" else (4, 3, 7)
    sign, rest = code >> (exponent_bits + mantissa_bits), code % 2 ** (exponent_bits + mantissa_bits)
    exponent, mantissa = rest >> mantissa_bits, rest % 2**mantissa_bits / 2**mantissa_bits
    return (-1) ** sign * (2 ** (exponent - bias) * (1 + mantissa) if exponent else 2 ** (1 - bias) * mantissa)


def random_weight(
    kind: str,
    outputs: int,
    inputs: int,
    group: int,
    scale_type: torch.dtype = F16,
    with_zeros: bool = False,
    wide: int = 0,
) -> tuple[Quantized, torch.Tensor]:
    """A weight, and the numbers [outputs, inputs] float64 that it stands for. With `wide` its scales have 8 bits."""
    size, groups = 1 << BITS[kind], math.ceil(inputs / group)
    codes = torch.randint(0, size, (outputs, inputs))
    if kind == "fp8":
        codes = torch.where(codes % 128 == 127, 0, codes)  # NaN
    numbers = torch.tensor([number(kind, code) for code in range(size)], dtype=torch.float64)[codes]
    scales = (torch.rand(outputs, groups) * 0.1 + 0.01).to(scale_type)
    zeros = torch.randint(-8, 8, (outputs, groups)).to(scale_type) if with_zeros else None
    factors = None
    if wide:
        small = torch.uint8 if with_zeros else E4M3 if kind == "fp4" else torch.int8
        scales = torch.randint(1 if with_zeros else -63, 64, (outputs, groups)).float().to(small)
        zeros = torch.randint(0, 64, (outputs, groups)).to(small) if with_zeros else None
        factors = (torch.rand(outputs, math.ceil(inputs / wide), 1 + with_zeros) / 300 + 1e-3).half().float()
    for k in range(inputs):
        scale, shift = scales[:, k // group].double(), 0 if zeros is None else zeros[:, k // group].double()
        if factors is None:
            numbers[:, k] = (numbers[:, k] - shift) * scale
            continue
        f = factors[:, k // wide].double()
        lowest = {"int4": -8, "int6": -32}.get(kind, 0) if with_zeros else 0
        numbers[:, k] = (numbers[:, k] - lowest) * (scale * f[:, 0]) - shift * f[:, -1]
    if BITS[kind] < 8:
        packed = torch.zeros(outputs, inputs * BITS[kind] // 8, dtype=torch.uint8)
        for k in range(inputs):
            packed[:, k // 32 * 16 + k % 16] += (codes[:, k] % 16 << (4 if k % 32 >= 16 else 0)).to(torch.uint8)
            if kind == "int6":
                upper = codes[:, k] // 16 << k % 32 // 8 * 2
                packed[:, inputs // 2 + k // 32 * 8 + k % 8] += upper.to(torch.uint8)
    else:
        packed = codes.to(torch.uint8).view(torch.int8 if kind == "int8" else E4M3)
    return Quantized(kind, packed, scales, zeros, group, factors, wide), numbers


def random_stack(count: int, *args: Any) -> tuple[Quantized, torch.Tensor]:
    """As many of `random_weight` in one."""
    made = [random_weight(*args) for _ in range(count)]
    fields = zip(*(weight for weight, _ in made), strict=True)
    stacked = (torch.stack(x) if isinstance(x[0], torch.Tensor) else x[0] for x in fields)
    return Quantized(*stacked), torch.stack([numbers for _, numbers in made])


def there(device: str, weight: Quantized) -> kernels.Quantized:
    """A weight on a device, as the kernels keep it."""
    weight = weight._replace(codes=kernels.arrange(weight.kind, weight.codes))
    return kernels.Quantized(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in weight))


@tried(
    st.sampled_from([1, 16, 17, 65, 130]),
    st.sampled_from([(1, 32), (65, 320), (130, 640), (7, 1088)]),
    st.sampled_from([*BITS]),
    st.sampled_from([16, 32, 48, 64, 80, 128, 192, 256, 10**6]),
    st.sampled_from([F32, BF16, F16]),
    st.sampled_from([F32, BF16, F16, E4M3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 64]),
    on=[
        (3, (65, 320), "int4", 128, BF16, F16, False, True, 1),  # whose last group is partial
        (2, (7, 1088), "int4", 32, F16, F16, True, False, 64),
        (17, (70, 320), "fp4", 32, BF16, BF16, False, True, 1),
        (1, (7, 1088), "fp4", 16, BF16, E4M3, False, False, 64),
        (65, (130, 160), "nf4", 64, BF16, F32, False, False, 1),
        (2, (65, 320), "iq4", 32, BF16, F16, False, False, 1),
        (2, (65, 320), "int6", 16, BF16, F16, False, False, 1),
        (3, (7, 1088), "int6", 32, F16, F16, True, False, 64),
        (5, (7, 1088), "int8", 2000, BF16, F32, True, True, 64),
        (4, (9, 100), "fp8", 48, F32, BF16, False, False, 1),
        (70, (7, 1088), "int8", 192, F32, F32, True, False, 64),
        (150, (7, 1088), "int4", 64, BF16, F16, False, True, 64),  # two tiles of rows, each of several parts
        (512, (7, 320), "int4", 32, BF16, F16, True, True, 64),  # multiplied by a copy in 16 bits
    ],
    drawn=25,
)
def test_quantized_linear(
    device: str, rows: int, sizes: tuple[int, int], kind: str, group: int, dtype: torch.dtype,
    scale_type: torch.dtype, with_zeros: bool, with_bias: bool, programs: int,
) -> None:  # fmt: skip
    """With 64 programs few rows of 1,088 inputs have parts of K, whose counters must be 0 afterwards."""
    outputs, inputs = sizes
    weight, numbers = random_weight(kind, outputs, inputs, group, scale_type, with_zeros and scale_type.itemsize > 1)
    torch.testing.assert_close(reference.dequantize(weight).double(), numbers, rtol=1e-6, atol=1e-6)
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype) if with_bias else None
    counters = []

    def zeros(there: torch.device) -> torch.Tensor:
        counters.append(torch.zeros(matmul.LINEAR_COUNTERS, dtype=torch.int32, device=there))
        return counters[-1]

    with pytest.MonkeyPatch.context() as patch:
        home = sys.modules[kernels.quantized_linear.__module__]
        patch.setattr(home, "PROGRAMS", programs)
        patch.setattr(home, "LARGE_PROGRAMS", programs)
        patch.setattr(matmul, "_counters", zeros)
        on_device = x.to(device), there(device, weight), None if bias is None else bias.to(device)
        got = kernels.quantized_linear(*on_device).cpu()
    want, naive = x.double() @ numbers.T, (x @ numbers.to(dtype).T).double()
    shift = 0 if bias is None else bias.double()
    oracles.check_error(got, want + shift, naive + shift)
    assert got.dtype == dtype and not any(part.any() for part in counters)
    may_split = programs == 64 and rows < 512
    assert counters or not (may_split and inputs == 1088)
    assert may_split or not counters


@tried(
    st.sampled_from([1, 16, 17, 65]),
    st.sampled_from([(1, 32), (65, 320), (7, 1088), (20, 100)]),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([128, 256, 384, 10**6]),
    st.sampled_from([F32, BF16, F16]),
    st.booleans(),
    st.sampled_from([1, 64]),
    on=[
        (2, (7, 1088), "int8", 384, BF16, False, 1),
        (3, (65, 320), "int8", 10**6, BF16, False, 1),
        (17, (7, 1088), "int8", 10**6, F32, True, 64),
        (2, (7, 1088), "fp8", 128, BF16, False, 64),
        (65, (20, 100), "fp8", 10**6, F16, True, 1),
        (2, (7, 1088), "fp8", 10**6, BF16, False, 1),
        (65, (65, 320), "int8", 256, F32, False, 64),
    ],
    drawn=15,
)
def test_products_of_rounded_inputs(
    device: str, rows: int, sizes: tuple[int, int], kind: str, group: int, dtype: torch.dtype, more: bool,
    programs: int,
) -> None:  # fmt: skip
    """Inputs have the specification's codes, bit by bit, and products are theirs. `more`: a static scale and a bias."""
    outputs, inputs = sizes
    weight, numbers = random_weight(kind, outputs, inputs, group, F32)
    weight = weight._replace(input_kind=kind, input_scale=torch.tensor(0.01) if more else None)
    x, bias = (torch.randn(rows, inputs) * torch.randn(rows, 1).exp()).to(dtype), torch.randn(outputs).to(dtype)
    x[1:2] = 0  # a row without a scale of its own
    x[0, -1] = 2 * x.abs().max()  # the last input, which a program may read in a second go
    codes, scales = reference.round_inputs(x, weight)
    kernel_codes, kernel_scales = kernels.round_inputs(x.to(device), there(device, weight))
    assert torch.equal(kernel_codes.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(kernel_scales.cpu(), scales)
    spread = scales.double().repeat_interleave(min(group, inputs), 1)[:, :inputs]
    rounded = codes.double() * spread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[kernels.quantized_linear.__module__], "PROGRAMS", programs)
        got = kernels.quantized_linear(x.to(device), there(device, weight), bias.to(device) if more else None).cpu()
    shift = bias.double() if more else 0
    want, naive = rounded @ numbers.T + shift, (rounded.float() @ numbers.float().T).to(dtype).double() + shift
    oracles.check_error(got, want, naive)
    assert got.dtype == dtype


def test_a_half_goes_to_the_even_code(device: str) -> None:
    weight, _ = random_weight("int8", 3, 64, 64, F32)
    weight, x = weight._replace(input_kind="int8", input_scale=torch.ones(1)), torch.arange(-32, 32)[None] + 0.5
    for codes, _ in (reference.round_inputs(x, weight), kernels.round_inputs(x.to(device), there(device, weight))):
        assert codes.flatten().tolist() == [round(number) for number in x.flatten().tolist()]


def test_a_program_rounds_the_inputs_of_its_own_group(device: str) -> None:
    """The interpreter runs one program after the other, so a later one puts right what this one wrote too much."""
    x, codes, scales = torch.randn(3, 1088), torch.full((3, 1088), 99, dtype=torch.int8), torch.full((3, 3), -1.0)
    x[:, 384] = 9  # the first of the next group
    x, codes, scales = x.to(device), codes.to(device), scales.to(device)
    quantized.round_inputs_kernel[(3, 1)](x, None, codes, scales, 1088, 384, False, 512)
    assert (codes[:, 384:] == 99).all() and (scales[:, 1:] == -1).all()
    torch.testing.assert_close(scales[:, 0], x[:, :384].abs().amax(1) / 127)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [None, 0.02])
def test_a_product_shows_inputs_that_are_no_numbers(device: str, kind: str, scale: float | None) -> None:
    """Though int8 has no code for them: the row is NaN, and no other is."""
    weight, _ = random_weight(kind, 20, 64, 64, F32)
    weight = weight._replace(input_kind=kind, input_scale=None if scale is None else torch.tensor(scale))
    x = torch.randn(3, 64)
    x[1, 5] = math.nan
    for y in (
        reference.quantized_linear(x, weight), kernels.quantized_linear(x.to(device), there(device, weight)).cpu(),
        cpu_quantized.pack_quantized(weight)(x),
    ):  # fmt: skip
        assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [None, 0.02])
def test_inputs_have_the_nearest_codes(kind: str, scale: float | None) -> None:
    """The specification's, number by number: no other code is nearer, and a group's largest has the largest code."""
    inputs, group, most = 20, 16, {"int8": 127, "fp8": 448}[kind]
    weight, _ = random_weight(kind, 3, inputs, group, F32)
    x = torch.randn(4, inputs) * 3
    static = None if scale is None else torch.tensor(scale)
    codes, scales = reference.round_inputs(x, weight._replace(input_kind=kind, input_scale=static))
    every = torch.arange(-127.0, 128) if kind == "int8" else torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    every = every[every.isfinite()].double()
    for t in range(4):
        for begin in range(0, inputs, group):
            part = x[t, begin : begin + group].double()
            size = float(part.abs().max()) / most if scale is None else scale
            assert math.isclose(float(scales[t, begin // group]), size, rel_tol=1e-6)
            for number, code in zip(part, codes[t, begin : begin + group].double(), strict=True):
                nearest = (every - number / size).abs().min()
                assert code in every and abs(code - number / size) <= nearest + 1e-4
                assert scale is not None or abs(number) < part.abs().max() or abs(code) == most


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy tells of what is not a number
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_inputs_that_are_not_finite_or_are_zeros(kind: str) -> None:
    weight, _ = random_weight(kind, 5, 64, 10**6, F32)
    weight = weight._replace(input_kind=kind)
    x = torch.randn(4, 64)
    x[1], x[2, 3], x[3, 5] = 0, math.nan, math.inf
    for ops in (reference, kernels):
        y = ops.quantized_linear(x, ops.Quantized(*weight))
        assert y[0].isfinite().all() and not y[1].any() and not y[2:].isfinite().any()


@tried(
    st.sampled_from([(1, 32), (7, 1088), (130, 96)]),
    st.sampled_from([*BITS]),
    st.sampled_from([16, 32, 48, 10**6]),
    st.sampled_from([F32, BF16, F16]),
    st.sampled_from([F32, F16, E4M3]),
    st.booleans(),
    on=[
        ((7, 1088), "int4", 32, F32, F16, True), ((7, 1088), "int8", 2000, BF16, F32, False),
        ((130, 96), "fp8", 48, F16, F16, True), ((7, 1088), "fp4", 16, BF16, E4M3, False),
        ((130, 96), "nf4", 64, F32, BF16, False), ((130, 96), "iq4", 32, F32, F16, False),
        ((7, 1088), "int6", 16, F32, F16, True),
    ],
    drawn=25,
)  # fmt: skip
def test_quantized_rows(
    device: str, sizes: tuple[int, int], kind: str, group: int, dtype: torch.dtype, scale_type: torch.dtype,
    with_zeros: bool,
) -> None:  # fmt: skip
    weight, numbers = random_weight(kind, *sizes, group, scale_type, with_zeros and scale_type.itemsize > 1)
    ids = torch.randint(0, sizes[0], (9,))
    got = kernels.quantized_rows(there(device, weight), ids.to(device), dtype).cpu()
    assert got.dtype == dtype and torch.equal(reference.quantized_rows(weight, ids, dtype), got)
    oracles.check_error(got, numbers[ids], numbers[ids].to(dtype).double())


@tried(
    st.sampled_from([1, 17, 65]),
    st.sampled_from([(1, 32), (65, 320), (7, 1088)]),
    st.sampled_from(["int4", "int6", "fp4", "int8"]),
    st.sampled_from([16, 32]),
    st.sampled_from([32, 256, 10**6]),
    st.sampled_from([F32, BF16, F16]),
    st.booleans(),
    on=[
        (3, (65, 320), "int4", 32, 256, BF16, True), (2, (7, 1088), "fp4", 16, 10**6, F16, False),
        (65, (70, 320), "fp4", 16, 10**6, BF16, False),
        (65, (33, 96), "int6", 16, 256, F32, False), (3, (7, 1088), "int6", 32, 256, F16, True),
        (1, (7, 1088), "int8", 32, 32, BF16, True),
        (2, (20, 32), "int4", 32, 256, F32, True),
    ],
    drawn=15,
)  # fmt: skip
def test_factors(
    device: str, rows: int, sizes: tuple[int, int], kind: str, group: int, wide: int, dtype: torch.dtype,
    with_zeros: bool,
) -> None:  # fmt: skip
    """Scales and zeros are integers or e4m3 times factors that inputs share, of which the last ones may be fewer."""
    weight, numbers = random_weight(kind, *sizes, group, F16, with_zeros and kind != "fp4", wide)
    torch.testing.assert_close(reference.dequantize(weight).double(), numbers, rtol=1e-6, atol=1e-6)
    x, ids = torch.randn(rows, sizes[1]).to(dtype), torch.randint(0, sizes[0], (9,))
    got = kernels.quantized_linear(x.to(device), there(device, weight)).cpu()
    oracles.check_error(got, x.double() @ numbers.T, (x @ numbers.to(dtype).T).double())
    got = kernels.quantized_rows(there(device, weight), ids.to(device), dtype).cpu()
    assert torch.equal(reference.quantized_rows(weight, ids, dtype), got)


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize("group", [128, pytest.param(32, marks=pytest.mark.full)])
def test_a_row_ignores_the_others(device: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among up to 64 rows neither their number nor a row's place changes its bits, nor among up to 511."""
    monkeypatch.setattr(quantized, "PROGRAMS", 64)
    weight, _ = random_weight("int4", 70, 1088, group)
    weight, x = there(device, weight), torch.randn(130, 1088).to(BF16).to(device)
    few, many = kernels.quantized_linear(x[:64], weight), kernels.quantized_linear(x, weight)
    for begin, end in ((0, 1), (63, 64), (13, 45)):
        assert torch.equal(kernels.quantized_linear(x[begin:end].contiguous(), weight), few[begin:end])
    assert torch.equal(kernels.quantized_linear(x[1:].contiguous(), weight), many[1:])


def test_each_tile_of_outputs_counts_its_own_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs the parts of a tile one after the other, so one counter for all would do there."""
    counters = torch.zeros(matmul.LINEAR_COUNTERS, dtype=torch.int32, device=device)
    counters[0] = -99  # so the first tile waits for parts that never come
    monkeypatch.setattr(quantized, "PROGRAMS", 64)
    monkeypatch.setattr(matmul, "_counters", lambda _: counters)
    weight, numbers = random_weight("int4", 70, 1088, 128)
    x = torch.randn(2, 1088).to(F16)
    y = kernels.quantized_linear(x.to(device), there(device, weight)).cpu()
    assert y[:, :64].isnan().all()
    torch.testing.assert_close(y[:, 64:].double(), (x.double() @ numbers.T)[:, 64:], rtol=0.01, atol=0.1)


PLACES = 0, 16, 8, 24  # of 32 inputs, those of the four codes of a word of an arranged weight


@pytest.mark.parametrize("kind", [kind for kind in BITS if BITS[kind] < 8])
def test_an_arranged_weight_has_four_inputs_in_a_word(kind: str) -> None:
    """Eight inputs apart from each other; and its bytes of upper bits, and those of codes of eight bits, stay."""
    weight, _ = random_weight(kind, 3, 96, 32)
    words = kernels.arrange(kind, weight.codes).view(torch.int16)[:, :24].int() & 0xFFFF
    codes = torch.stack([words >> 4 * i & 15 for i in range(4)], 1).unflatten(2, (3, 8))
    lower = reference.apart(kind, weight.codes) & 15
    for b in range(3):
        for i, place in enumerate(PLACES):
            assert torch.equal(codes[:, i, b], lower[:, 32 * b + place : 32 * b + place + 8].int())
    assert torch.equal(kernels.arrange(kind, weight.codes)[:, 48:], weight.codes[:, 48:])
    assert kernels.arrange("int8", weight.codes) is weight.codes
    assert reference.arrange(kind, weight.codes) is weight.codes


def run_ptx(text: str, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """$0, $1 .. of these instructions, each [n], for the operands `values`."""
    example = next(iter(values.values()))

    def read(name: str) -> torch.Tensor:
        return values[name] if name in values else torch.full_like(example, int(name, 0))

    def permute(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
        both, made = a | b << 32, torch.zeros_like(a)
        for i in range(4):
            choice = selector >> 4 * i & 15
            byte = both >> 8 * (choice & 7) & 255
            made |= torch.where(choice >= 8, (byte >> 7) * 255, byte) << 8 * i
        return made

    def combine(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(a)
        for i in range(8):
            bits = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            made |= bits * (table >> i & 1)
        return made & 0xFFFFFFFF

    ops = {
        "mov.b32": lambda a: a,
        "cvt.u32.u16": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.b32": lambda a, b: a >> b,
        "prmt.b32": permute,
        "lop3.b32": combine,
    }
    lines = [line.split() for line in re.sub(r"{.*?;|[},]", " ", text).split(";") if line.split()]
    for op, target, *sources in lines:
        values[target] = ops[op](*map(read, sources))
    return [values[f"${i}"] for i in range(4) if f"${i}" in values]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", [*BITS])
def test_two_elements_are_unpacked_at_a_time(kind: str, dtype: torch.dtype) -> None:
    """For any two bytes, and any word and another one: what `_number` makes of these bits is the number of a code."""
    with torch.device("meta"):  # as in a dry run
        text = quantized._unpacking.__wrapped__(kind, dtype)
    bits, bias, size = (7, 127, 1 << BITS[kind]) if dtype == BF16 else (10, 15, 1 << BITS[kind])
    numbers = torch.tensor([number(kind, code) for code in range(size)]).to(dtype)
    if BITS[kind] == 8:
        pairs = torch.arange(1 << 16)
        made, codes = run_ptx(text, {"$2": pairs}), [torch.stack((pairs & 255, pairs >> 8))]
    else:
        words, upper = torch.stack((torch.arange(1 << 16), torch.randperm(1 << 16))), torch.randint(256, (2, 1 << 16))
        made = run_ptx(text, {"$4": words[0] | words[1] << 16, "$5": upper[0] | upper[1] << 8})
        codes = [words >> 4 * i & 15 for i in range(4)]
        if kind == "int6":
            codes = [code | (upper >> place // 4 & 3) << 4 for code, place in zip(codes, PLACES, strict=True)]
    got = [torch.stack((part & 0xFFFF, part >> 16)).to(torch.uint16).view(dtype) for part in made]
    if kind == "fp8":
        numbers[[127, 255]] = torch.tensor([480.0, -480.0]).to(dtype)
    for i, part in enumerate(codes):
        size = 16 if kind == "int4" and dtype == F16 and i % 2 else 1  # of the last bit
        shift = {"int4": 2.0**bits / size + 8, "int6": 2.0**bits + 32, "int8": got[1]}.get(kind, 0.0)
        factor = {"fp4": 2.0 ** (bias - 1), "fp8": 2.0 ** (bias - 7)}.get(kind, 1 / size)
        assert torch.equal(got[i] * factor - shift, numbers[part])


@tried(
    st.sampled_from([1, 20, 70]),
    st.sampled_from([(4, 2), (12, 1)]),
    st.sampled_from([(32, 16), (160, 33), (64, 140)]),
    st.sampled_from([("int4", 32), ("fp4", 32), ("int8", 48), ("int8", 1000), ("int4", -32), ("int6", -16)]),
    st.sampled_from([F32, BF16, F16]),
    st.sampled_from(["silu", "swigluoai"]),
    st.booleans(),
    on=[
        (3, (4, 2), (160, 32), ("fp4", 32), BF16, "swigluoai", True),
        (40, (2, 1), (64, 160), ("int4", 128), F16, "silu", False),
        (3, (4, 2), (64, 32), ("int4", -32), BF16, "silu", True),
    ],
    drawn=10,
)
def test_experts(
    device: str, tokens: int, router: tuple[int, int], sizes: tuple[int, int], coding: tuple[str, int],
    dtype: torch.dtype, activation: str, more: bool,
) -> None:  # fmt: skip
    """`more`: there are biases, zeros, and weights of inputs. With a group below 0 there are factors."""
    (count, k), (hidden, size), (kind, group) = router, sizes, coding
    group, wide = abs(group), 64 if group < 0 else 0
    if BITS[kind] < 8:
        size = math.ceil(size / 32) * 32
    args = layer(tokens, k, (count, hidden, size), dtype, more, (0, count))
    gate_up, gate_up_numbers = random_stack(count, kind, 2 * size, hidden, group, F16, more, wide)
    down, down_numbers = random_stack(count, kind, hidden, size, group, F16, more, wide)
    x = args[0] / (16 if BITS[kind] > 4 else 1)  # so that products of two large numbers fit into float16
    dense = (x, gate_up_numbers, args[2], down_numbers, *args[4:])
    coded = there(device, gate_up), there(device, down)
    check_experts(kernels, dense, 0, activation, more, False, device, coded)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy tells of what is not a number
@tried(
    st.sampled_from([1, 20, 70]),
    st.sampled_from([(4, 2, 0, 4), (12, 1, 0, 12), (6, 3, 2, 3)]),
    st.sampled_from([(32, 16), (160, 33), (300, 140)]),
    st.sampled_from([("int8", 1000), ("int8", 128), ("fp8", 1000), ("fp8", 128)]),
    st.sampled_from([F32, BF16, F16]),
    st.sampled_from(["silu", "swigluoai"]),
    st.booleans(),
    on=[
        (3, (4, 2, 0, 4), (160, 32), ("int8", 1000), BF16, "silu", False),
        (9, (6, 3, 2, 3), (32, 16), ("int8", 1000), F32, "swigluoai", True),
        (3, (6, 3, 2, 3), (160, 33), ("fp8", 128), BF16, "silu", False),
        (40, (2, 1, 0, 2), (32, 16), ("fp8", 1000), F16, "silu", True),
    ],
    drawn=10,
)
def test_experts_whose_inputs_are_rounded(
    device: str, tokens: int, router: tuple[int, int, int, int], sizes: tuple[int, int], coding: tuple[str, int],
    dtype: torch.dtype, activation: str, more: bool,
) -> None:  # fmt: skip
    """Of the experts those from `first` on are here. `more`: there are biases, static scales, and weights of inputs."""
    (count, k, first, held), (hidden, size), (kind, group) = router, sizes, coding
    x, _, up_bias, _, down_bias, weights, ids = layer(tokens, k, (count, hidden, size), dtype, more, (first, held))
    static = torch.tensor(0.02 if kind == "int8" else 0.005) if more else None
    gate_up, up_numbers = random_stack(held, kind, 2 * size, hidden, group, F32)
    down, down_numbers = random_stack(held, kind, hidden, size, group, F32)
    gate_up, down = (stack._replace(input_kind=kind, input_scale=static) for stack in (gate_up, down))
    here = (ids >= first) & (ids < first + held)
    local, owned = torch.where(here, ids - first, -1), here.flatten()

    def rounded(rows: torch.Tensor, weight: Quantized) -> torch.Tensor:
        codes, scales = reference.round_inputs(rows, weight)
        return codes.double() * scales.double().repeat_interleave(min(group, rows.shape[1]), 1)[:, : rows.shape[1]]

    dense = up_numbers, up_bias, down_numbers, down_bias, weights, local, activation, more
    want, _ = oracles.experts(rounded(x, gate_up), *dense)
    naive, _ = oracles.experts(rounded(x, gate_up).float(), *dense, naive=True)
    h = (torch.randn(tokens * k, size) * torch.randn(tokens * k, 1).exp()).to(dtype)
    pairs = torch.einsum("ths,ts->th", down_numbers[local.flatten()], rounded(h, down))
    pairs += 0 if down_bias is None else down_bias.double()[local.flatten()]
    pairs *= here.flatten()[:, None] if more else (weights * here).double().view(-1, 1)
    summed, size_of = pairs.view(tokens, k, -1).sum(1), pairs.view(tokens, k, -1).abs().sum(1).max()
    h[~owned] = math.nan  # rows of another rank's experts may be anything
    for ops, place in ((reference, "cpu"), (kernels, device)):
        put = lambda part, place=place: None if part is None else part.to(place)  # noqa: E731
        up, back = (ops.Quantized(*there(place, stack)) for stack in (gate_up, down))
        plan = ops.plan_experts(put(weights), put(ids), held, first, more)
        got = ops.expert_gate_up(put(x), up, put(up_bias), plan, activation).cpu()
        assert got.dtype == dtype
        if owned.any():
            # The sums: gate, its sigmoid, up.
            oracles.check_error(got[owned], want[owned], naive[owned].to(dtype).double(), sums=3)
        got = ops.expert_down(put(h), back, put(down_bias), plan).cpu()
        assert got.dtype == dtype
        assert ((got.double() - summed).abs() <= torch.finfo(dtype).eps * summed.abs() + 4e-7 * size_of).all()
