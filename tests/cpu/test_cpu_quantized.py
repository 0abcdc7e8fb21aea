"""A CPU's products with weights in codes are the specification's, whether there is C++ for them or not."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from cpu import compiled, experts, quantized
from cpu import ops as cpu_ops
from cpu.quantized import (
    FEW,
    ROWS,
    CodedKernels,
    CodedLinear,
    ExpertStack,
    Formula,
    IntegerLinear,
    RoundedLinear,
    SplitLinear,
    middle_of_bytes,
    pack_quantized,
)
from reference import BITS, Quantized

KINDS = list(BITS)
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


def drawn(kind: str, shape: tuple[int, ...], group: int, zeros: bool, dtype=torch.float32, seed: int = 0) -> Quantized:
    """A weight [.., N, K] of codes at random; each group has another scale and zero."""
    random = torch.Generator().manual_seed(seed)
    tables = (*shape[:-1], -(-shape[-1] // group))
    if kind == "int8":
        codes = torch.randint(-128, 128, shape, generator=random).to(torch.int8)
    elif kind == "fp8":  # with all exponents, and with numbers that are not normal
        exponents = torch.randint(-8, 7, shape, generator=random).float()
        codes = (torch.randn(shape, generator=random) * exponents.exp2()).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] * BITS[kind] // 8), generator=random).to(torch.uint8)
    scales = torch.rand(tables, generator=random).add(0.1).to(dtype)
    return Quantized(kind, codes, scales, torch.randn(tables, generator=random).to(dtype) if zeros else None, group)


def with_factors(weight: Quantized, small: torch.dtype, wide: int, seed: int = 0) -> Quantized:
    """The weight with scales and zeros of 8 bits, and factors at random."""
    random = torch.Generator().manual_seed(seed)
    zeros, inputs = weight.zeros, weight.codes.shape[-1] * 8 // BITS[weight.kind]
    tables = (table for table in (weight.scales, zeros) if table is not None)
    scales, *least = (torch.randint(1, 64, table.shape, generator=random).to(small) for table in tables)
    factors = torch.rand(*weight.codes.shape[:-1], -(-inputs // wide), 1 + len(least), generator=random).add(0.1) / 64
    return weight._replace(scales=scales, zeros=least[0] if least else None, factors=factors, wide=wide)


def uncompiled(weight: Quantized, dtype: torch.dtype = torch.float32) -> CodedKernels:
    """The functions themselves in the place of their C++."""

    def late(function, *settings):
        return SimpleNamespace(run=lambda tensors: [function(Formula.of(weight), *settings, *tensors)])

    product = late(quantized.multiply_codes)
    return CodedKernels(product, product, late(quantized.unpack_codes, dtype), dtype)


def check(
    got: torch.Tensor, x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None, rounding: float = 0
) -> None:
    """A product's error, in parts of the sizes that its terms add up to, is what float32 and the dtype of x cause."""
    numbers = reference.dequantize(weight).double()
    wanted = x.double() @ numbers.T + (0 if bias is None else bias.double())
    assert got.dtype == x.dtype and got.shape == wanted.shape
    sizes = x.double().abs() @ numbers.abs().T + (0 if bias is None else bias.double().abs())
    most = 16 * torch.finfo(torch.float32).eps + torch.finfo(x.dtype).eps + rounding
    assert ((got.double() - wanted).abs() <= most * sizes + 1e-30).all()


def check_products(weight: Quantized, forms: CodedKernels | None, counts: tuple[int, ...], dtype=torch.float32) -> None:
    """The products with some numbers of rows, every other one with a bias."""
    (outputs, inputs), packed = weight.codes.shape, CodedLinear(weight, forms)
    inputs = inputs * 8 // BITS[weight.kind]
    for i, count in enumerate(counts):
        x = torch.randn(count, 2 * inputs).to(dtype)[:, :inputs]  # not contiguous
        bias = torch.randn(outputs).to(dtype) if i % 2 else None
        check(packed(x, bias), x, weight, bias)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products as small as these only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


WEIGHTS = [  # outputs, inputs, inputs of a group
    (1, 32, 32), (48, 64, 16), (50, 96, 32), (130, 256, 128), (16, 64, 1024), (33, 96, 64), (17, 544, 512),
]  # fmt: skip
ODD = [(5, 7, 7), (40, 100, 16), (20, 99, 99), (3, 50, 32)]  # these take a kind of eight bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_in_codes_gives_the_product_of_its_numbers(kind):
    """With C++, before it is there, and without; also where groups, panels, rows and slabs do not end together."""
    torch.manual_seed(0)
    none, most = SimpleNamespace(run=None), FEW[torch.float32]
    for i, (outputs, inputs, group) in enumerate(WEIGHTS + (ODD if BITS[kind] == 8 else [])):
        weight = drawn(kind, (outputs, inputs), group, i % 2 == 1)
        check_products(weight, uncompiled(weight), (1, ROWS + 1, most + 1))
        check_products(weight, CodedKernels(none, none, none, torch.float32), (2,))
        check_products(weight, None, (0, 1))


FACTORED = [  # outputs, inputs, inputs of a group, inputs that share factors
    (1, 32, 32, 32), (50, 96, 32, 256), (130, 512, 32, 256), (17, 320, 16, 10**6), (33, 320, 16, 256),
    (20, 192, 32, 64),
]  # fmt: skip


@pytest.mark.parametrize("small", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["int4", "int6", "int8", "fp4", "iq4"])
def test_scales_are_multiplied_by_factors(kind, small):
    """Also where inputs that share factors are cut by the end of a row, and the last four groups are not whole."""
    torch.manual_seed(0)
    for i, (outputs, inputs, group, wide) in enumerate(FACTORED + ([(5, 50, 16, 64)] if kind == "int8" else [])):
        weight = with_factors(drawn(kind, (outputs, inputs), group, kind != "fp4" and i % 2 == 0), small, wide, i)
        if small != torch.uint8:
            signs = 1 - 2 * (torch.rand(weight.scales.shape) < 0.5).int()
            weight = weight._replace(scales=(weight.scales.float() * signs).to(small))
        check_products(weight, uncompiled(weight), (1, ROWS + 1))
        check_products(weight, None, (0, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_rounded_once_to_the_dtype_of_their_inputs(kind, dtype):
    torch.manual_seed(0)
    weight = drawn(kind, (50, 256), 128, True, torch.bfloat16)
    check_products(weight, uncompiled(weight), (1, 5), dtype)
    check_products(weight, None, (2,), dtype)


def test_a_slab_is_in_bfloat16_where_that_is_fast():
    """Then each number is rounded, too. A few rows are multiplied by the numbers as they are."""
    torch.manual_seed(0)
    weight = drawn("int4", (50, 256), 128, True)
    packed = CodedLinear(weight, uncompiled(weight, torch.bfloat16))
    for count in (1, FEW[torch.bfloat16], FEW[torch.bfloat16] + 1, 100):
        x, many = torch.randn(count, 256).bfloat16(), count > FEW[torch.bfloat16]
        check(packed(x), x, weight, rounding=torch.finfo(torch.bfloat16).eps if many else 0)


def test_all_codes_are_read_as_specified():
    """Each code at each place of a word, by rows that have a single input other than 0."""
    for kind in KINDS:
        every = torch.arange(256, dtype=torch.uint8)
        if kind == "fp8":
            every[127], every[255] = 126, 254  # instead of those that are not numbers
        columns = 32 * BITS[kind] // 8
        codes = every.repeat_interleave(columns).view(256, columns)
        if kind == "int6":
            codes[:, 16:] = codes[:, 16:].flip(0)  # so that each lower half meets other upper bits
        codes = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn) if columns == 32 else codes
        weight = Quantized(kind, codes, torch.ones(256, 1), None, 32)
        for forms in (None, uncompiled(weight)):
            assert torch.equal(CodedLinear(weight, forms)(torch.eye(32)).T, reference.dequantize(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_takes_little_more_than_its_codes(kind):
    """Tables of 16 bits become float32, which of four bits with zeros in groups of 32 makes 12 bytes out of 10."""
    for group, zeros in ((1024, False), (128, True), (32, True)):
        weight = drawn(kind, (256, 1024), group, zeros, torch.bfloat16)
        size = sum(tensor.nbytes for tensor in weight if isinstance(tensor, torch.Tensor))
        check_size(weight, size)
    if kind in ("int4", "int6", "fp4", "int8"):
        for group, wide, zeros in ((16, 1024, False), (32, 256, True)):  # with what GGUF and NVFP4 store
            weight = with_factors(drawn(kind, (256, 1024), group, zeros), torch.uint8, wide)
            check_size(weight, weight.codes.nbytes + weight.scales.nbytes * (1 + zeros) + weight.factors.nbytes / 2)


@pytest.mark.parametrize("group", [1024, 128])
def test_a_packed_weight_that_rounds_its_inputs_leaves_the_codes(group):
    weight = drawn("int8", (256, 1024), group, False)._replace(input_kind="int8")
    refs = weakref.ref(weight.codes.untyped_storage()), weakref.ref(weight.scales.untyped_storage())
    packed = pack_quantized(weight)
    del weight
    assert type(packed) is RoundedLinear
    assert all(ref() is None for ref in refs)


def check_size(weight: Quantized, given: float) -> None:
    packed = CodedLinear(weight)
    assert sum(tensor.untyped_storage().nbytes() for tensor in (packed.words, *packed.tables)) <= 1.2 * given


def test_codes_of_fp8_that_are_not_numbers_are_refused():
    weight = drawn("fp8", (20, 32), 32, False)
    weight.codes.view(torch.uint8)[19, 31] = 0xFF
    with pytest.raises(ValueError, match="fp8 that are not numbers"):
        pack_quantized(weight)


@pytest.mark.parametrize("kind", KINDS)
def test_the_op_takes_a_weight_as_it_is(monkeypatch, kind):
    torch.manual_seed(0)
    monkeypatch.setattr(quantized, "SLAB", 4 * 96 * 20)  # of 20 outputs, so that there are three parts
    for zeros in (False, True):
        weight, x, bias = drawn(kind, (50, 96), 32, zeros), torch.randn(3, 96), torch.randn(50)
        for b in (None, bias):
            check(cpu_ops.quantized_linear(x, weight, b), x, weight, b)
    weight = with_factors(drawn(kind, (50, 96), 32, True), torch.uint8, 256)
    check(cpu_ops.quantized_linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("zeros", [False, True])
def test_experts_in_codes_are_the_ones_of_their_numbers(zeros):
    torch.manual_seed(0)
    stacks = [drawn("int8", shape, 32, zeros) for shape in ((4, 64, 48), (4, 48, 32))]
    stacks = [stack._replace(scales=stack.scales / 64) for stack in stacks]
    packed = [pack_quantized(stack, find=uncompiled) for stack in stacks]
    assert [type(stack) for stack in packed] == [ExpertStack] * 2 and packed[0].shape == (4, 64, 48)
    x, weights = torch.randn(5, 48), torch.rand(5, 2)
    for ids in (torch.tensor([[0, 3], [3, 0], [0, 3], [2, 3], [3, 2]]), torch.full((5, 2), 9)):  # none is here
        plan = experts.plan_experts(weights, ids, 4)
        done = [
            experts.expert_down(experts.expert_gate_up(x, up, None, plan, "silu"), down, None, plan)
            for up, down in (packed, [reference.dequantize(stack) for stack in stacks])
        ]
        torch.testing.assert_close(*done, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("middle", [128, 64, None])
@pytest.mark.parametrize("weigh_inputs", [False, True])
@pytest.mark.parametrize("group", [1000, 16])
def test_experts_whose_inputs_are_rounded(monkeypatch, middle, weigh_inputs, group):
    """A token's inputs are rounded once, before weights of inputs multiply them. `weigh_inputs`: with static scales."""
    if middle and middle > (middle_of_bytes() or 0):
        pytest.skip("this CPU adds products of whole bytes in 16 bits, or this torch has none")
    monkeypatch.setattr(quantized, "middle_of_bytes", lambda: middle)
    torch.manual_seed(0)
    static = torch.tensor(0.03) if weigh_inputs else None
    stacks = [drawn("int8", shape, group, False) for shape in ((4, 64, 48), (4, 48, 32))]
    stacks = [stack._replace(scales=stack.scales / 64, input_kind="int8", input_scale=static) for stack in stacks]
    packed = [pack_quantized(stack, find=uncompiled) for stack in stacks]
    assert {type(expert) for stack in packed for expert in stack.experts} == {
        IntegerLinear if middle and group == 1000 else CodedLinear
    }
    x, weights, biases = torch.randn(5, 48), torch.rand(5, 2), (torch.randn(4, 64), torch.randn(4, 48))
    for first, ids in ((0, torch.tensor([[0, 3], [3, 0], [0, 3], [2, 3], [3, 2]])), (2, torch.full((5, 2), 9))):
        done = []
        for ops, (up, down) in ((experts, packed), (reference, stacks)):
            plan = ops.plan_experts(weights, ids + first, 4, first, weigh_inputs)
            h = ops.expert_gate_up(x, up, biases[0], plan, "silu")
            local = (ids < 4).flatten()
            inputs = torch.linspace(-3, 3, h.numel()).sin().view_as(h).masked_fill(~local[:, None], torch.nan)
            done.append((h[local], ops.expert_down(inputs, down, biases[1], plan)))
        torch.testing.assert_close(*done, atol=1e-4, rtol=1e-4)


def rounded_product(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the codes of x and of the weight, in whole numbers and float64."""
    codes, scales = reference.round_inputs(x, weight)
    y = (codes.double() @ weight.codes.double().T) * scales.double() * weight.scales.double().T
    return y if bias is None else y + bias.double()


needs_integers = pytest.mark.skipif(not middle_of_bytes(), reason="this torch has no product of integers")


@needs_integers
@pytest.mark.parametrize("middle", [128, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inputs_as_sums_of_integers(middle, dtype):
    """Beside the largest of a row they are as exact as float32 is, and those of 16 bits as 1 / 127 / 508 of it."""
    if middle > middle_of_bytes():
        pytest.skip("this CPU adds products of whole bytes in 16 bits")
    torch.manual_seed(0)
    for outputs, inputs in ((1, 32), (50, 96), (33, 1100), (20, 7)):
        weight = drawn("int8", (outputs, inputs), inputs, False)
        weight.codes[0] = -128
        packed, numbers = SplitLinear(IntegerLinear(weight, middle)), reference.dequantize(weight).double()
        for count in (0, 1, 9, 40):
            x = (torch.randn(count, 2 * inputs) * torch.randn(count, 1).exp()).to(dtype)[:, :inputs]
            if count == 9:
                x[0], x[1], x[2, 0] = 1, 0, 100
            bias = torch.randn(outputs).to(dtype) if count != 1 else None
            got = packed(x, bias)
            wanted = x.double() @ numbers.T + (0 if bias is None else bias.double())
            assert got.dtype == dtype and got.shape == wanted.shape
            finest = 1 / 127 / (508 if x.itemsize == 2 else 2 * 254**2)
            most = x.double().abs().amax(1, keepdim=True) * numbers.abs().sum(1) * (finest + 2**-22)
            assert ((got.double() - wanted).abs() <= most + torch.finfo(dtype).eps * wanted.abs() + 1e-30).all()


@needs_integers
@pytest.mark.parametrize("middle", [128, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_integers_are_exact(middle, dtype):
    """Up to the last multiplications, whose errors are of float32; also in two halves, which any CPU adds exactly."""
    if middle > middle_of_bytes():
        pytest.skip("this CPU adds products of whole bytes in 16 bits")
    torch.manual_seed(0)
    for i, (outputs, inputs) in enumerate([(1, 32), (50, 96), (33, 1100), (20, 7)]):
        weight = drawn("int8", (outputs, inputs), inputs, False)
        weight.codes[0] = -128
        weight = weight._replace(input_kind="int8", input_scale=torch.tensor(0.05) if i == 2 else None)
        packed = RoundedLinear(weight, IntegerLinear(weight, middle))
        for count in (0, 1, 9):
            x = (torch.randn(count, 2 * inputs) * torch.randn(count, 1).exp()).to(dtype)[:, :inputs]
            if count == 9:
                x[0], x[1] = 1, 0
            bias = torch.randn(outputs).to(dtype) if count != 1 else None
            got, wanted = packed(x, bias), rounded_product(x, weight, bias)
            assert got.dtype == dtype and got.shape == wanted.shape
            size = rounded_product(x, weight, None).abs() + (0 if bias is None else bias.double().abs())
            most = 4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
            assert ((got.double() - wanted).abs() <= most * size).all()


def test_a_cpu_is_asked_whether_its_sums_are_exact(monkeypatch):
    """One that adds two products of bytes in 16 bits gets bytes of 7 bits, and one that is always wrong gets none."""

    def exact(rows, middle, packed):
        return rows @ packed.float().T

    def saturating(rows, middle, packed):
        pairs = (rows + middle).unflatten(1, (-1, 2))[:, None] * packed.float().unflatten(1, (-1, 2))
        return pairs.sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1) - middle * packed.float().sum(1)

    def missing(rows, middle, packed):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(quantized, "pack_integers", lambda codes, scales: codes)
    monkeypatch.setattr(torch.backends.quantized, "engine", torch.backends.quantized.engine)  # is put back
    inexact = lambda *args: exact(*args) + 1  # noqa: E731
    for product, middle in ((exact, 128), (saturating, 64), (inexact, None), (missing, None)):
        monkeypatch.setattr(quantized, "multiply_integers", product)
        assert middle_of_bytes.__wrapped__() == middle


def test_weights_whose_inputs_are_rounded(monkeypatch):
    """Integers with a scale for each output have a product of their own where a CPU has one. Others are numbers."""
    torch.manual_seed(0)
    one = drawn("int8", (50, 300), 300, False)._replace(input_kind="int8")
    for middle, layout in ((128, IntegerLinear), (64, IntegerLinear), (None, CodedLinear)):
        monkeypatch.setattr(quantized, "middle_of_bytes", lambda middle=middle: middle)
        monkeypatch.setattr(quantized, "pack_integers", lambda codes, scales: None)
        assert type(pack_quantized(one, find=uncompiled).product) is layout
        plain, splits = one._replace(input_kind=""), SplitLinear if middle == 128 else CodedLinear
        assert type(pack_quantized(plain, find=uncompiled)) is CodedLinear
        assert type(pack_quantized(plain)) is type(pack_quantized(plain, True, uncompiled)) is splits
    x, bias = torch.randn(5, 300), torch.randn(50)
    for weight in (
        one, drawn("int8", (50, 300), 128, False)._replace(input_kind="int8"),
        drawn("fp8", (50, 300), 300, False)._replace(input_kind="fp8"),
        drawn("fp8", (50, 300), 128, False)._replace(input_kind="fp8", input_scale=torch.tensor(0.01)),
    ):  # fmt: skip
        codes, scales = reference.round_inputs(x, weight)
        numbers = codes.float() * scales.repeat_interleave(min(weight.group, 300), 1)[:, :300]
        coded = CodedLinear(weight), CodedLinear(weight, uncompiled(weight))
        for product in (*(RoundedLinear(weight, codes) for codes in coded), pack_quantized(weight)):
            check(product(x, bias), numbers, weight, bias)
            check(product(x), numbers, weight)
        check(cpu_ops.quantized_linear(x, weight, bias), numbers, weight, bias)


def test_cpp_is_asked_for_once_for_each_kind(monkeypatch):
    jobs = []
    builder = SimpleNamespace(ask=lambda job, of_codes: jobs.append(job) or SimpleNamespace(run=None))
    monkeypatch.setattr(compiled, "has_bfloat16", lambda: True)
    for dtype, slab in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ):
        find = compiled.coded_forms(builder, dtype)
        kinds = [drawn(kind, (16, 32), 32, zeros) for kind in KINDS for zeros in (False, True)]
        all_forms = [find(weight) for weight in kinds + kinds]
        assert all_forms[: len(kinds)] == all_forms[len(kinds) :] and {forms.dtype for forms in all_forms} == {slab}
        assert len(jobs) == 3 * len(kinds) == len({job.key() for job in jobs})
        jobs.clear()
    monkeypatch.setattr(compiled, "has_bfloat16", lambda: False)
    assert compiled.coded_forms(builder, torch.bfloat16)(kinds[0]).dtype == torch.float32


def test_the_cpp_of_codes_has_the_threads_of_the_steps_and_not_those_of_packing(monkeypatch):
    jobs, threads = [], 7
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    find = compiled.coded_forms(SimpleNamespace(ask=lambda job, of_codes: jobs.append(job)), torch.float32)
    threads = 1
    find(drawn("int4", (16, 32), 32, False))
    assert [job.threads for job in jobs] == [7] * 3


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.long), "int4"])
@pytest.mark.parametrize("zeros", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_cpp_of_a_product_with_codes_is_the_product(kind, zeros):
    from test_cpu_compiled import Here  # which imports much

    torch.manual_seed(0)
    find = compiled.coded_forms(Here(1), torch.float32)
    forms = find(drawn(kind, (16, 32), 32, zeros))
    for outputs, inputs, group in ((1, 32, 32), (17, 64, 16), (520, 1056, 1024), (1024, 512, 128)):
        check_products(drawn(kind, (outputs, inputs), group, zeros), forms, (1, 3, 4, 33, 60))


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "small"),
    [("int4", torch.uint8), pytest.param("fp4", torch.float8_e4m3fn, marks=pytest.mark.long),
     ("int6", torch.int8)],
)  # fmt: skip
def test_the_cpp_of_a_product_with_factors_is_the_product(kind, small):
    """Where any of the loops goes round once, too."""
    from test_cpu_compiled import Here  # which imports much

    torch.manual_seed(0)
    weights = [
        with_factors(drawn(kind, (outputs, inputs), group, kind == "int4"), small, wide)
        for outputs, inputs, group, wide in (
            (1, 32, 32, 32),
            (17, 96, 16, 64),
            (520, 1024, 32, 256),
            (40, 512, 16, 10**6),
        )
    ]
    forms = compiled.coded_forms(Here(1), torch.float32)(weights[0])
    for weight in weights:
        check_products(weight, forms, (1, 3, 4, 33, 60))


@pytest.mark.full
@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(KINDS), st.integers(1, 70), st.integers(1, 9), st.integers(0, 6), st.booleans(), st.integers(1, 60),
    st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99),
)  # fmt: skip
def test_drawn_weights_give_the_product_of_their_numbers(kind, outputs, pieces, group, zeros, count, dtype, seed):
    torch.manual_seed(seed)
    inputs = 32 * pieces - (seed % 32 if BITS[kind] == 8 else 0)
    weight = drawn(kind, (outputs, inputs), 16 * group or inputs, zeros, dtype, seed)
    for forms in (None, uncompiled(weight)):
        check_products(weight, forms, (1, count), dtype)
