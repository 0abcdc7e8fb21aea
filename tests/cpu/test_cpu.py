"""What a CPU is helped with gives the same results as plain torch."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from batch_state import BatchState
from cpu import machine
from cpu import weights as cpu_weights
from device.startup import pick_dtype
from engine import LLM, SamplingParams
from model import linear
from plan import NewRow, StepPlan

ROOT = Path(__file__).parent.parent.parent
CHAT = [{"role": "user", "content": "What is 23 + 58?"}]

MULTIPLIED = SimpleNamespace(run=lambda tensors: [cpu_weights.multiply(*tensors)])  # what stands in for the C++ of it


def kind_of(dtype: torch.dtype, short: bool = False) -> type:
    """The kind of a weight for several rows; `short`: of one whose elements are floats of 16 bits, whatever its dtype.

    oneDNN packs no 16-bit weights on a CPU without instructions for them.
    """
    if short and dtype == torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines:
        return cpu_weights.HalfLinear
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(1, 1, dtype=dtype))
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 1, dtype=dtype), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return torch.Tensor
    return cpu_weights.PackedLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 48), (96, 64), (256, 32), (515, 257)], ids=str)
@pytest.mark.parametrize("rows", ["one", "several", "both"])
def test_a_packed_weight_gives_the_plain_product(dtype, shape, rows):
    torch.manual_seed(0)
    weight, bias = torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype)
    packed = cpu_weights.pack(weight, rows, MULTIPLIED)
    short = rows == "both" and dtype == torch.bfloat16 and shape[1] % 8 == 0
    assert type(packed) is (
        cpu_weights.PanelLinear if rows == "one" else cpu_weights.CompressedLinear if short else kind_of(dtype)
    )
    for count in (1, 2, 33, cpu_weights.PROMPT):
        x = torch.randn(count, 2 * shape[1], dtype=dtype)[:, : shape[1]]  # not contiguous
        for b in (None, bias):
            wanted = F.linear(x.double(), weight.double(), None if b is None else b.double())
            got = linear(x, packed, b)
            assert got.dtype == dtype and got.is_contiguous()
            error = 1e-4 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(got.double(), wanted, atol=error * shape[1] ** 0.5, rtol=error)


@pytest.mark.skipif(kind_of(torch.float32, short=True) is not cpu_weights.HalfLinear, reason="needs FBGEMM")
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 48), (515, 257), (2 * cpu_weights.OUTPUTS + 5, 24)], ids=str)
def test_a_float32_weight_of_16_bits_is_kept_in_16(short, shape):
    torch.manual_seed(0)
    drawn = torch.randn(shape) * torch.logspace(-1, -7, shape[1])  # float16 alone would round half of it to nothing
    weight, bias = drawn.to(short).float(), torch.randn(shape[0])
    for factor in (1.0, 2.0**-40, 2.0**20):
        packed = cpu_weights.pack(weight * factor, "one")
        assert type(packed) is cpu_weights.HalfLinear
        for count in (0, 1, 2, 33):
            x = torch.randn(count, 2 * shape[1])[:, : shape[1]] / factor  # not contiguous
            for b in (None, bias):
                wanted = F.linear(x.double(), (weight * factor).double(), None if b is None else b.double())
                got = linear(x, packed, b)
                assert got.shape == wanted.shape and got.is_contiguous()
                sizes = x.abs().double() @ (weight * factor).abs().double().T + 1  # a sum of so much rounds
                assert ((got - wanted).abs() <= sizes * shape[1] * 2.0**-24).all()


def test_a_float32_weight_of_more_bits_is_not_rounded():
    assert type(cpu_weights.pack(torch.tensor([[1.0, 1 + 2**-12]]), "several")) is not cpu_weights.HalfLinear
    if kind_of(torch.float32, short=True) is cpu_weights.HalfLinear:
        with pytest.raises(ValueError, match="floats of 16 bits"):
            cpu_weights.HalfLinear(torch.tensor([[1.0, 1 + 2**-12]]))


def test_several_rows_go_to_the_layout_for_several_and_so_does_one_without_cpp():
    both = cpu_weights.CompressedLinear(torch.randn(4, 8).bfloat16(), lambda x, bias: "packed", MULTIPLIED)
    x = torch.randn(2, 8).bfloat16()
    assert both(x) == "packed" and both(x[:1]).shape == (1, 4)
    both.multiplied = SimpleNamespace(run=None)
    assert both(x[:1]) == "packed"


@pytest.mark.parametrize("rows", ["several", "both"])
def test_a_weight_that_cannot_be_packed_stays_as_it_is(monkeypatch, rows):
    weight = torch.randn(4, 4)
    for kind in (cpu_weights.HalfLinear, cpu_weights.PackedLinear):
        monkeypatch.setattr(kind, "__init__", lambda self, weight: torch.ops.mkldnn.there_is_no_such_operator(weight))
    assert cpu_weights.pack(weight, rows) is weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_sequence_at_a_time_gives_the_same_tokens(dtype):
    one, several = (LLM("demo", dtype=dtype, max_num_seqs=count) for count in (1, 2))
    answers = [llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0] for llm in (one, several)]
    assert [answer.text for answer in answers] == ["81", "81"]
    panels, packed = (llm.core.executor.worker.model.layers[0].attention.o for llm in (one, several))
    kind = kind_of(getattr(torch, dtype), short=True)
    assert (
        type(panels) is (kind if kind is cpu_weights.HalfLinear else cpu_weights.PanelLinear) and type(packed) is kind
    )


@pytest.mark.parametrize("outputs", [1, 300, 3 * cpu_weights.PANEL])
def test_a_greedy_head_finds_the_largest_output(outputs):
    torch.manual_seed(0)
    weight = (torch.randn(96) + torch.randn(outputs, 96) / 20).bfloat16()
    weight[:: cpu_weights.PANEL] = 4.0  # makes bytes coarse
    weight[outputs // 3] = weight[-1]  # two that are equal
    head = cpu_weights.GreedyHead(weight)
    missed = 0
    for size in (1e-20, 1.0, 1e10):
        for i in range(200):
            x = size * torch.randn(1, 96).bfloat16()
            if i % 4 == 0:
                x = -size * weight.float().mean(0, keepdim=True).bfloat16()  # all outputs are below zero
            logits = F.linear(x, weight)[0]
            largest = (logits == logits.max()).nonzero()[0]
            assert head(x).tolist() == largest.tolist()
            lines = torch.ops.quantized.embedding_bag_byte_unpack(head.table).view(-1, 96, cpu_weights.PANEL)
            missed += int((cpu_weights.halves(x.float()) @ lines).flatten()[:outputs].argmax()) != largest
    assert missed > 10 or outputs == 1, "bytes alone find it, so that this shows nothing"


def test_a_greedy_head_says_so_where_it_cannot_tell():
    head = cpu_weights.GreedyHead(torch.ones(cpu_weights.CLOSE, 32).bfloat16())
    assert head(torch.ones(1, 32).bfloat16()) is None
    head = cpu_weights.GreedyHead(torch.ones(cpu_weights.CLOSE - 1, 32).bfloat16())
    assert head(torch.ones(1, 32).bfloat16()).tolist() == [0]
    assert head(torch.full((1, 32), float("nan")).bfloat16()) is None


def test_a_greedy_head_knows_that_logits_are_rounded():
    head = cpu_weights.GreedyHead(torch.tensor([[256.0, 0.0], [256.0, 1.0]]).bfloat16())
    assert head(torch.ones(1, 2).bfloat16()).tolist() == [0]  # 257 is 256 in bfloat16


def test_a_greedy_head_is_for_large_weights_in_bfloat16(monkeypatch):
    assert cpu_weights.greedy_head(torch.zeros(64, 32).bfloat16()) is None
    monkeypatch.setattr(cpu_weights, "SMALL", 64 * 32 * 2)
    assert cpu_weights.greedy_head(torch.zeros(64, 32)) is None
    assert cpu_weights.greedy_head(torch.zeros(64, 32).bfloat16())
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["none"]))
    assert cpu_weights.greedy_head(torch.zeros(64, 32).bfloat16()) is None


@pytest.fixture(scope="module")
def llm_with_head():
    """An `LLM` that looks for the likeliest token of one greedy row without computing all logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_weights, "SMALL", 0)
        return LLM("demo", dtype="bfloat16", max_num_seqs=1)


@pytest.mark.parametrize(
    "params, found",
    [({}, True), ({"temperature": 0.7}, False), ({"presence_penalty": 0.1}, False), ({"logit_bias": {5: 1.0}}, False)],
    ids=str,
)
def test_greedy_rows_that_come_one_by_one_need_no_logits(llm_with_head, monkeypatch, params, found):
    llm, calls, call = llm_with_head, [], cpu_weights.GreedyHead.__call__
    monkeypatch.setattr(cpu_weights.GreedyHead, "__call__", lambda self, x: calls.append(len(x)) or call(self, x))
    if found:
        monkeypatch.setattr(llm.core.executor.worker.model, "logits", None)
    answer = llm.chat(CHAT, SamplingParams(**{"temperature": 0, "max_tokens": 8} | params))[0].outputs[0]
    assert answer.text == "81" or params.get("temperature")
    assert set(calls) == ({1} if found else set())


def test_rows_whose_log_probabilities_are_wanted_are_not_only_greedy():
    state, head = (
        BatchState(4, 64, 4, 16, 1000, "cpu", writes=cpu_weights.DirectWrites),
        cpu_weights.GreedyHead(torch.eye(32).bfloat16()),
    )
    row = NewRow(slot=0, token_ids=[5, 6], blocks=[[0]])
    changed = {"num_logprobs": 0}, {"sampling": SamplingParams(temperature=0.5).columns}, {"logit_bias": {3: 1.0}}
    others = [dataclasses.replace(row, slot=slot, **fields) for slot, fields in enumerate(changed, 1)]
    state.enter(StepPlan(0, new=[row, *others]))
    hidden, slots = torch.arange(64).view(2, 32).bfloat16(), torch.arange(-1, 4, dtype=torch.int32)
    assert [head.find(hidden[:1], state, slots[i : i + 1]) is not None for i in range(5)] == [False, True] + [False] * 3
    assert head.find(hidden[:1], state, slots[1:2]).tolist() == [31] and head.find(hidden, state, slots[1:3]) is None


def test_where_too_many_outputs_are_close_all_logits_are_computed(monkeypatch):
    monkeypatch.setattr(cpu_weights, "SMALL", 0)
    monkeypatch.setattr(cpu_weights, "CLOSE", 1)  # no output can be the only one
    llm = LLM("demo", dtype="bfloat16", max_num_seqs=1)
    assert llm.core.executor.worker.greedy_head
    assert llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text == "81"


@pytest.mark.parametrize("shape", [(16, 8), (37, 64), (530_000, 8)], ids=str)  # the last one in two parts
@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.full) for size in (1e-30, 1e16)), 0.02])
def test_a_compressed_weight_loses_nothing(shape, size):
    torch.manual_seed(0)
    weight = size * torch.randn(shape)
    for value in (3e38, -1e-40, 7.0, 0.0, -(2.0**-20)):
        weight[torch.randint(0, shape[0], (3,)), torch.randint(0, shape[1], (3,))] = value
    weight = weight.bfloat16()
    short = cpu_weights.CompressedLinear(weight, None, MULTIPLIED)
    assert short.words.nbytes == -(-shape[0] // cpu_weights.LANES) * cpu_weights.LANES * shape[1] * 12 / 8
    for i in range(shape[1]):
        assert torch.equal(short(torch.eye(shape[1], dtype=weight.dtype)[i : i + 1])[0], weight[:, i])


def test_a_weight_of_many_sizes_is_not_compressed():
    weight = torch.logspace(-30, 30, 96 * 64).bfloat16().view(96, 64)
    with pytest.raises(ValueError, match="of an output are listed; "):
        cpu_weights.CompressedLinear(weight.T.contiguous(), None, MULTIPLIED)
    assert type(cpu_weights.pack(weight.T.contiguous(), "both")) is kind_of(torch.bfloat16)


def test_compile_is_refused_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"^compile is True; it needs a C\+\+ compiler"):
        LLM("demo", device="cpu", compile=True)


def test_auto_dtype_is_one_that_the_cpu_is_fast_with(monkeypatch):
    for native, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(machine, "has_bfloat16", lambda native=native: native)
        assert pick_dtype("auto", "bfloat16", "cpu") == pick_dtype("auto", "float16", "cpu") == wanted
        assert pick_dtype("auto", "float32", "cpu") == torch.float32
        assert pick_dtype("auto", "bfloat16", "cpu", small=True) == torch.float32
        assert pick_dtype("bfloat16", "bfloat16", "cpu", small=True) == torch.bfloat16
        assert pick_dtype("float16", "bfloat16", "cpu") == torch.float16
        assert pick_dtype("auto", "float16", "cuda", small=True) == torch.float16


SETTLED = [  # the threads that are asked for, cores, whether one stays free, ranks, and the threads that are used
    (3, 1, True, 1, 3), (None, 1, True, 1, 1), (None, 2, False, 1, 2), (None, 2, True, 1, 1), (None, 2, False, 2, 1),
    (None, 2, True, 4, 1), (3, 2, False, 4, 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def settled() -> list[int]:
    """The threads that torch uses in each case of SETTLED, one after the other in a process."""
    code = f"""import os, torch; from cpu import machine
mine = sorted(os.sched_getaffinity(0))
for asked, cores, spare, ranks, _ in {SETTLED}:
    os.sched_setaffinity(0, mine[:cores])
    machine.settle(asked, spare, ranks)
    print(torch.get_num_threads())"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [*map(int, run.stdout.split())]


@pytest.mark.parametrize("asked, cores, spare, ranks, wanted", SETTLED)
def test_threads_are_as_many_as_asked_for_or_as_there_are_cores(settled, asked, cores, spare, ranks, wanted):
    if len(os.sched_getaffinity(0)) < cores:
        pytest.skip(f"needs {cores} cores")
    assert settled[SETTLED.index((asked, cores, spare, ranks, wanted))] == wanted


def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, files: dict[str, str]) -> None:
    """Have this process be in cgroups that have these files."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mine").write_text(mine)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "MINE", tmp_path / "mine")


STAT = "anon 1\nactive_file 300\ninactive_file 20\ntotal_active_file 4000\ntotal_inactive_file 200\n"


@pytest.mark.parametrize(
    "mine, files, wanted",
    [
        # a container of its own, version 2 and version 1, whose path is the host's
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "2000\n", "memory.stat": STAT}, 3320),
        ("4:memory:/docker/7f\n0::/\n", {"memory/memory.limit_in_bytes": "5000\n", "memory/memory.stat": STAT,
                                          "memory/memory.usage_in_bytes": "4900\n"}, 4300),
        # the least of a group and those above; one that is over its limit
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "9\n", "a/b/memory.stat": STAT,
                       "a/memory.max": "700\n", "a/memory.current": "600\n", "a/memory.stat": STAT}, 420),
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "6000\n", "memory.stat": STAT}, 0),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "2000\n", "memory.stat": STAT}, None),
        ("0::/\n", {}, None),
    ],
)  # fmt: skip
def test_memory_is_the_containers(tmp_path, monkeypatch, mine, files, wanted):
    cgroup(tmp_path, monkeypatch, mine, files)
    free = machine.available_bytes()
    assert free == wanted if wanted is not None else free > 2**20


@pytest.mark.parametrize(
    "mine, files, wanted",
    [
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("1:cpu,cpuacct:/x\n", {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                               "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 2),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("0::/a\n", {"a/cpu.max": "max 100000\n", "cpu.max": "200000 100000\n"}, 2),
    ],
)  # fmt: skip
def test_cores_are_the_containers(tmp_path, monkeypatch, mine, files, wanted):
    cgroup(tmp_path, monkeypatch, mine, files)
    monkeypatch.setattr(machine.psutil.Process, "cpu_affinity", lambda process: range(8))
    assert machine.available_cores() == wanted


PREPARED = """
import ctypes, sys
sys.path[:0] = sys.argv[1:]
from engine import LLM

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used".split()]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]

llm = LLM("demo", dtype="float32", device="cpu", threads=1)
weight = llm.core.executor.worker.model.layers[0].attention.qkv

import torch
from cpu.weights import PackedLinear

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

def used(begin, end):
    for rows in range(begin, end):
        weight(torch.zeros(rows, 192), None)
    return libc.mallinfo2().used

if type(weight) is PackedLinear:
    first = used(1, 300)
    print((used(300, 700) - first) / 2**20)
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_products_of_many_sizes_are_not_all_kept():
    environment = {k: v for k, v in os.environ.items() if not k.endswith("CACHE_CAPACITY")}
    command = [sys.executable, "-c", PREPARED, str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert not done.stdout or float(done.stdout) < 25, "MiB that 400 more sizes took"
