"""Weights in codes as a CPU multiplies them: one layout for all kinds, whose codes become numbers in registers.

C++ that Inductor makes (`cpu.compiled`) multiplies a few rows by the codes as they lie. For many rows, and as long as
there is no C++, a slab of outputs is unpacked at a time, which the cache holds, and a plain product multiplies by it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import reference
from reference import BITS, LOWEST, TABLES, Quantized, round_inputs

LANES = 16  # outputs that lie side by side: one or two vectors of float32
STEP = 8  # inputs whose codes lie together, and whose products are added up before they are scaled; of int6 16
ROWS = 4  # that the C++ for several rows takes at a time: for so many one has enough registers
FEW = {torch.float32: 48, torch.bfloat16: 32}  # rows; for more, unpacking costs less than a product in float32
TOGETHER = 32  # rows; the integers of more are multiplied one after the other, to save memory
SLAB = 1 << 20  # bytes of numbers that are unpacked at a time
LOOKUPS = ("fp4", "nf4", "iq4")  # kinds whose numbers are those of a table
Product = Callable[..., torch.Tensor]  # what multiplies inputs, or their codes, by a weight
WARNINGS = threading.Lock()  # held while warnings are caught, which is for all threads


class Formula(NamedTuple):
    """The kind of a weight, as far as its formula depends on it."""

    kind: str
    has_zeros: bool
    small: str  # dtype of the scales and zeros that have factors; empty: they have none

    @classmethod
    def of(cls, weight: Quantized) -> Formula:
        """The formula of a weight."""
        small = "" if weight.factors is None else str(weight.scales.dtype).removeprefix("torch.")
        return cls(weight.kind, weight.zeros is not None, small)


class CodedKernels(NamedTuple):
    """The C++ for weights of a `Formula`. Each has a `run`, which is None until it is there."""

    one: Any  # `multiply_codes` for one row
    several: Any  # `multiply_codes` for ROWS at a time
    slab: Any  # `unpack_codes`
    dtype: torch.dtype  # what `slab` makes: float32, or bfloat16 where the CPU multiplies that fast


def step_of(kind: str) -> int:
    """How many inputs of a kind's codes lie together. They fill whole words of 32 bits."""
    return STEP * 2 if kind == "int6" else STEP


def words_of(kind: str) -> int:
    """How many words the codes of `step_of` inputs fill."""
    return step_of(kind) * BITS[kind] // 32


def choose(codes: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
    """table[codes & 15] by comparing bits, because vectors have no fast lookup."""
    candidates: list[Any] = [*table]
    for bit in range(4):
        odd = (codes & 1 << bit) != 0
        candidates = [torch.where(odd, *pair) for pair in zip(candidates[1::2], candidates[::2], strict=True)]
    return candidates[0]


def vector() -> int:
    """How many float32 numbers a vector has in the C++ of this CPU: LANES, or half of that."""
    return LANES if torch.backends.cpu.get_cpu_capability() == "AVX512" else LANES // 2


def e4m3(word: torch.Tensor) -> torch.Tensor:
    """The float32 of the upper eight bits of words: e4m3 has its order of bits, and an exponent that is 120 less."""
    return (word >> 4 & 0x07F00000 - (1 << 31)).view(torch.float32) * 2.0**120


def small_numbers(dtype: str, words: torch.Tensor) -> torch.Tensor:
    """The numbers [.., 4, 1, lanes] of eight bits in words [.., 1, 1, lanes], as float32; see `numbers`."""
    word = words.view(torch.int32) << 24 - 8 * torch.arange(4, dtype=torch.int32)[:, None, None]
    if dtype == "float8_e4m3fn":
        return e4m3(word)
    return ((word >> 24) if dtype == "int8" else (word >> 24 & 255)).float()


def numbers(kind: str, words: torch.Tensor) -> list[torch.Tensor]:
    """As many tensors of float32 as `step_of` says: the numbers of the codes in words [.., `words_of`, lanes].

    Words come as float32 because Inductor loads vectors of these fastest: with AVX2 it copies integers to the stack.
    """
    bits, result, parts = BITS[kind], list[torch.Tensor](), words.view(torch.int32).unbind(-2)
    for word in parts:
        for at in range(0, 33 - bits, bits):
            if kind == "fp8":
                result.append(e4m3(word << 24 - at))
            elif kind in LOOKUPS:
                result.append(choose(word >> at, tuple(TABLES[kind])))
            else:
                result.append((word << 32 - bits - at >> 32 - bits).float())
    if kind == "int6":  # five codes in each word, and the sixteenth in what is left of three
        result.append((parts[2] >> 30 << 4 | (parts[1] >> 30 & 3) << 2 | parts[0] >> 30 & 3).float())
    return result


def decoded(
    form: Formula, words: torch.Tensor, tables: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The numbers of the codes in words, less zeros, and the scale of their products; None: they are multiplied by it.

    tables: of a `CodedLinear`; `reference.Quantized` has the formulas.
    """
    result, count = numbers(form.kind, words), 1 + form.has_zeros
    if not form.small:
        for zero in tables[1:]:
            result = [number - zero for number in result]
        return result, tables[0]
    pairs = zip(tables[:count], tables[count:], strict=True)
    scale, *mins = (small_numbers(form.small, table) * factor for table, factor in pairs)
    if not mins:
        return result, scale
    shift = mins[0] + LOWEST.get(form.kind, 0) * scale
    return [number * scale - shift for number in result], None


def multiply_codes(form: Formula, x: torch.Tensor, words: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    """x W^T [P, B, R, LANES] for x [B, R, .., n, step] float32 and a `CodedLinear`'s tensors; to be compiled.

    B is a loop, whose rounds find a panel in the cache. The R rows are written out, so that a code becomes a number
    once for all of them. For several rows the vectors of the lanes are written out, too: an input is read once for all.
    A part of a vector would be many times as slow as a whole one.
    """
    width = LANES if x.shape[1] == 1 else vector()
    parts = []
    for begin in range(0, LANES, width):
        lanes = slice(begin, begin + width)
        parts.append(decoded(form, words[..., lanes], [table[..., lanes] for table in tables]))
    sums, inner = [], tuple(range(2, x.ndim - 1))
    for row in x.unbind(1):
        for codes, scale in parts:
            first, *rest = (number.unsqueeze(1) * row[..., i, None] for i, number in enumerate(codes))
            total = sum(rest, first)
            sums.append((total if scale is None else total * scale.unsqueeze(1)).sum(inner))
    return torch.stack(sums, 2).flatten(2).unflatten(2, (-1, LANES))


def unpack_codes(form: Formula, dtype: torch.dtype, words: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    """The numbers [.., n, step, P, LANES] of panels of a `CodedLinear`; to be compiled, or to serve as it is."""
    codes, scale = decoded(form, words, tables)
    scaled = codes if scale is None else [number * scale for number in codes]
    return torch.stack([number.to(dtype).movedim(0, -2) for number in scaled], -3)


def in_order(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """The bytes [N, ..] uint8 of a weight's codes in the order of inputs; int4 and int6 are numbers with a sign then. A
    ValueError if codes of fp8 are not numbers."""
    if BITS[kind] == 8:
        if kind == "fp8" and codes.float().isnan().any():
            raise ValueError("the weight has codes of fp8 that are not numbers")
        return codes.view(torch.uint8)
    if kind == "int6":
        sixteens = (reference.apart(kind, codes) ^ 32).unflatten(1, (-1, 16)).int()
        words = torch.zeros_like(sixteens[..., :3])
        for i, at in enumerate(range(0, 30, 6)):
            words |= sixteens[..., i:15:5] << at
        words |= (sixteens[..., 15:] >> torch.tensor([0, 2, 4])) << 30
        return words.flatten(1).view(torch.uint8)
    parts = []
    for half in (codes, codes >> 4):  # the first and the last 16 codes of 32, each in a byte
        pairs = half.view(torch.int16) & 0x0F0F
        eights = (pairs | pairs >> 4).to(torch.uint8)  # keeps the lower byte
        parts.append((eights ^ 0x88 if kind == "int4" else eights).view(torch.int64))
    return torch.stack(parts, 2).flatten(1).view(torch.uint8)


class CodedLinear:
    """A weight [out, in] in codes, in P panels of LANES outputs. A panel has G groups of n times `step_of` inputs.

        words   [P, G, n, 1 to 3, LANES]   the codes of a step, in words of 32 bits, whose lowest bits come first
        tables  [P, G, 1, LANES] float32   scales, and zeros if there are any

    If the weight has factors, G are three dimensions: F of inputs that share them, q, and 4 groups. A word has the 8
    bits of these four, [P, F, q, 1, 1, LANES], and after such tables come those of factors, [P, F, 1, 1, 1, LANES].

    The groups are the weight's own. If its last one is shorter, they are divided so that all have one size. Errors are
    those of `in_order`.

    Args:
        forms: C++ for this kind of weights, if there is or will be any.
    """

    def __init__(self, weight: Quantized, forms: CodedKernels | None = None):
        self.form, self.forms, self.outputs = Formula.of(weight), forms, len(weight.codes)
        self.inputs, self.step = weight.codes.shape[1] * 8 // BITS[weight.kind], step_of(weight.kind)
        factors = () if weight.factors is None else weight.factors.unbind(-1)
        # A group is a multiple of 16, or all inputs. Beside factors four are together.
        self.padding = -self.inputs % (4 * weight.group if factors else 2 * STEP)
        inputs = self.inputs + self.padding
        group, wide = (inputs if n >= self.inputs else math.gcd(n, inputs) for n in (weight.group, weight.wide))
        group = math.gcd(group, wide // 4) if factors else group
        panels, missing = -(-self.outputs // LANES), -self.outputs % LANES
        groups, steps = inputs // group, group // self.step
        self.shape = (panels, inputs // wide, wide // group // 4, 4, steps) if factors else (panels, groups, steps)

        def table(values: torch.Tensor, width: int, part: int) -> torch.Tensor:
            values, count = values.repeat_interleave(-(-min(width, inputs) // part), 1), inputs // part
            values = F.pad(values, (0, count - values.shape[1], 0, missing))
            return values.view(panels, LANES, count).mT.contiguous()

        small = [values for values in (weight.scales, weight.zeros) if values is not None]
        if factors:
            tables = (table(values.view(torch.uint8), weight.group, group) for values in small)
            fours = (values.view(panels, -1, 4, LANES).mT.contiguous().view(torch.float32) for values in tables)
            self.tables = [four.view(*self.shape[:3], 1, 1, LANES) for four in fours]
            for values in factors:
                self.tables.append(table(values, weight.wide, wide).view(*self.shape[:2], 1, 1, 1, LANES))
        else:
            self.tables = [table(values.float(), weight.group, group).unsqueeze(2) for values in small]
        words = torch.empty(panels, groups, steps, words_of(weight.kind), LANES, dtype=torch.int32)
        padding = self.padding * BITS[weight.kind] // 8  # bytes
        some = max(1, SLAB // (inputs * LANES))  # one by one, to save memory
        for part, codes in zip(words.split(some), weight.codes.split(some * LANES), strict=True):
            lines = F.pad(in_order(weight.kind, codes), (0, padding, 0, -len(codes) % LANES)).contiguous()
            lines = lines.view(torch.int32).view(len(part), LANES, groups, steps, -1)
            part.copy_(lines.movedim(1, 4))
        self.words = words.view(*self.shape, -1, LANES).view(torch.float32)  # see `numbers`

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out] in x's dtype."""
        rows, forms, form = x.shape[0], self.forms, None
        padded = F.pad(x, (0, self.padding)) if self.padding else x
        if forms and 0 < rows <= FEW[forms.dtype]:
            form = (forms.one if rows == 1 else forms.several).run
        y = self._multiply(padded, form) if form else self._by_slabs(padded)
        if y.shape[1] > self.outputs:
            y = y[:, : self.outputs]
        return (y if bias is None else y + bias).to(x.dtype)

    def _multiply(self, x: torch.Tensor, run: Any) -> torch.Tensor:
        """x W^T [T, P LANES] float32, by C++."""
        rows = x.shape[0]
        together = 1 if rows == 1 else ROWS
        x = F.pad(x.float(), (0, 0, 0, -rows % together)).contiguous()
        y = run([x.view(-1, together, *self.shape[1:], self.step), self.words, *self.tables])[0]
        return y.movedim(0, 2).reshape(x.shape[0], -1)[:rows]

    def _by_slabs(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T [T, P LANES] by plain products, in float32 or in what `forms` has."""
        run, dtype = (self.forms.slab.run, self.forms.dtype) if self.forms else (None, torch.float32)
        x = x.to(dtype)
        y = x.new_empty(x.shape[0], self.shape[0] * LANES)
        some = max(1, SLAB // (x.shape[1] * LANES * x.itemsize))
        for begin in range(0, self.shape[0], some):
            tensors = [tensor[begin : begin + some] for tensor in (self.words, *self.tables)]
            slab = run(tensors)[0] if run else unpack_codes(self.form, dtype, *tensors)
            out = y[:, begin * LANES : (begin + some) * LANES]
            torch.mm(x, slab.view(x.shape[1], -1), out=out)
        return y


class ExpertStack(NamedTuple):
    """The weights [E, out, in] of a layer's experts as a CPU multiplies them."""

    shape: tuple[int, ...]
    experts: list[Any]  # E products, or plain weights
    # If the products round their inputs: `rounded` does so with a token's, once for all of the token's experts.
    rounding: Quantized | None = None


def without_codes(weight: Quantized) -> Quantized:
    """The fields of a weight that `round_inputs` reads, without the memory of its codes."""
    return weight._replace(codes=weight.codes.new_empty(0), scales=weight.scales.new_empty(0))


def rounded(x: torch.Tensor, weight: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """x as a product takes it, see `round_inputs`: numbers [T, in] float32, and the scales [T, 1] of its results.

    The numbers are the codes of x. Where inputs are in groups, they are what the codes stand for, and it is 1.
    """
    if weight.input_kind == "int8" and weight.group >= x.shape[1]:  # in fewer steps
        rows, static = x.float(), weight.input_scale
        scales = rows.abs().amax(1, keepdim=True).div_(127)
        if static is not None:
            scales = torch.where(scales.isnan(), scales, static)  # a code cannot be NaN
        scales = scales.clamp(min=2**-64)
        return (rows / scales).clamp_(-127, 127).round_(), scales
    codes, scales = round_inputs(x, weight)
    if scales.shape[1] == 1:
        return codes.float(), scales
    return codes.float() * scales.repeat_interleave(weight.group, 1)[:, : x.shape[1]], scales.new_ones(len(x), 1)


class RoundedLinear:
    """A weight in codes whose products round their inputs, see `reference.round_inputs`.

    Args:
        product: multiplies `rounded` inputs by the weight. It is a `CodedLinear` for a CPU or a weight that has no
            product of integers, and multiplies codes as numbers.
    """

    def __init__(self, weight: Quantized, product: Product):
        self.rounding, self.product = without_codes(weight), product

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out] in x's dtype."""
        numbers, scales = rounded(x, self.rounding)
        y = self.product(numbers).mul_(scales)
        return (y if bias is None else y.add_(bias)).to(x.dtype)


class IntegerLinear:
    """A weight [out, in] of int8 with a scale for each output, for inputs that are integers, too.

    FBGEMM adds the products up in int32, so the result is exact before it is scaled. It takes an input as an unsigned
    byte, 128 + code. Without instructions for it (VNNI) it adds two products in 16 bits, where 2 x 255 x 127 does not
    fit. So there a code becomes 2 a + b with a from -64 to 63 and b 0 or 1, of which the bytes are 127 at most, and two
    rows are multiplied for each.

    Args:
        middle: what is added to a code to make it a byte, of `middle_of_bytes`: 128, or 64 for a and b.
    """

    def __init__(self, weight: Quantized, middle: int):
        self.middle, self.packed = middle, pack_integers(weight.codes, weight.scales[:, 0])

    def __call__(self, codes: torch.Tensor) -> torch.Tensor:
        """codes W^T [T, out] float32, of codes [T, in] float32 from -127 to 127."""
        if self.middle == 128:
            return multiply_integers(codes, 128, self.packed)
        upper = (codes / 2).floor_()
        both = multiply_integers(torch.cat((upper, codes - 2 * upper)), self.middle, self.packed)
        return 2 * both[: len(codes)] + both[len(codes) :]


class SplitLinear:
    """An `IntegerLinear` for inputs that are not rounded.

    An input is s (c + d / 254 + e / 254^2), with s = max |x| / 127 of its row and integers from -127 to 127: c and d
    are as fine as the numbers of 16 bits beside the largest of a row, and with e as those of 32. Each is a row of its
    own, because products of bytes are several times as fast as those of floats.
    """

    def __init__(self, product: IntegerLinear):
        self.product = product

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out] in x's dtype."""
        rows = x.float()
        scales = rows.abs().amax(1, keepdim=True).div_(127).clamp_(min=2**-64)
        rows = (rows / scales).clamp_(-127, 127)
        integers = [rows.round()]
        for _ in range(x.itemsize // 2):
            rows = (rows - integers[-1]).mul_(254)
            integers.append(rows.round())
        finer: Iterable[torch.Tensor]
        if len(x) > TOGETHER:
            y, finer = self.product(integers[0]), map(self.product, integers[1:])
        else:
            y, *finer = self.product(torch.cat(integers)).split(len(x))
        for i, part in enumerate(finer, 1):
            y += part.div_(254.0**i)
        y.mul_(scales)
        return (y if bias is None else y.add_(bias)).to(x.dtype)


def pack_integers(codes: torch.Tensor, scales: torch.Tensor) -> Any:
    """Codes [out, in] int8 and a scale for each output, as `multiply_integers` takes them."""
    with WARNINGS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation")  # a later torch will not have them
        weight = torch._make_per_channel_quantized_tensor(codes, scales.double(), torch.zeros(len(codes)).long(), 0)
    return torch.ops.quantized.linear_prepack(weight, None)


def multiply_integers(rows: torch.Tensor, middle: int, packed: Any) -> torch.Tensor:
    """rows W^T [T, out] float32 of whole numbers [T, in] float32 from -middle to 255 - middle."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, 1.0, middle, packed)


@functools.cache
def middle_of_bytes() -> int | None:
    """128 or 64, if FBGEMM's sums are exact on this CPU with bytes up to 255, or up to 127; see `IntegerLinear`.

    None: this torch has no such product. Products whose results are known tell.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        torch.backends.quantized.engine = "fbgemm"  # which packs; another one would take layouts of its own
        codes = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, 64).repeat(32, 1)
        packed = pack_integers(codes, torch.ones(len(codes)))
        for middle, most in ((128, 127), (64, 63)):
            rows = torch.full((5, 64), float(most))
            if torch.equal(multiply_integers(rows, middle, packed), rows @ codes.float().T):
                return middle
    return None


def pack_quantized(
    weight: Quantized, is_head: bool = False, find: Callable[[Quantized], CodedKernels] | None = None
) -> Product | ExpertStack:
    """A weight, or a layer's stack of experts, in a layout that serves any number of rows.

    Args:
        is_head: it is so large that a `SplitLinear` is as fast as C++, and does not have to wait for it.
        find: gives the C++ for a weight, as `cpu.compiled.coded_forms` does; None: there is none.
    """
    one_scale = weight.kind == "int8" and weight.zeros is None and weight.scales.shape[-1] == 1
    middle = middle_of_bytes() if one_scale else None
    splits = middle == 128 and (is_head or not find)  # with 64 a row would become four, or six
    middle = middle if weight.input_kind or splits else None
    forms = find(weight) if find and not middle else None

    def pack(part: Quantized) -> Product:
        if not middle:
            return CodedLinear(part, forms)
        return IntegerLinear(part, middle) if weight.input_kind else SplitLinear(IntegerLinear(part, middle))

    if weight.codes.dim() > 2:
        shape = *weight.codes.shape[:2], weight.codes.shape[2] * 8 // BITS[weight.kind]
        experts = [pack(weight.at(expert)) for expert in range(shape[0])]
        return ExpertStack(shape, experts, without_codes(weight) if weight.input_kind else None)
    return RoundedLinear(weight, pack(weight)) if weight.input_kind else pack(weight)


def quantized_linear(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a weight in codes (`reference.quantized_linear`), in parts whose numbers the cache holds."""
    some, done = max(1, SLAB // (4 * x.shape[1])), []
    for begin in range(0, len(weight.codes), some):
        part = slice(begin, begin + some)
        done.append(reference.quantized_linear(x, weight.at(part), None if bias is None else bias[part]))
    return torch.cat(done, 1)
