"""What a CPU is helped with gives the same results as plain torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cpu import machine
from cpu import weights as cpu_weights
from device.startup import pick_dtype
from engine import LLM, SamplingParams
from model import linear

ROOT = Path(__file__).parent.parent.parent
CHAT = [{"role": "user", "content": "What is 23 + 58?"}]


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
@pytest.mark.parametrize("rows", ["one", "several"])
def test_a_packed_weight_gives_the_plain_product(dtype, shape, rows):
    torch.manual_seed(0)
    weight, bias = torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype)
    packed = cpu_weights.pack(weight, rows)
    assert type(packed) is (cpu_weights.PanelLinear if rows == "one" else kind_of(dtype))
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


def test_a_weight_that_cannot_be_packed_stays_as_it_is(monkeypatch):
    weight = torch.randn(4, 4)
    for kind in (cpu_weights.HalfLinear, cpu_weights.PackedLinear):
        monkeypatch.setattr(kind, "__init__", lambda self, weight: torch.ops.mkldnn.there_is_no_such_operator(weight))
    assert cpu_weights.pack(weight, "several") is weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_sequence_at_a_time_gives_the_same_tokens(dtype):
    one, several = (LLM("demo", dtype=dtype, max_num_seqs=count) for count in (1, 2))
    answers = [llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0] for llm in (one, several)]
    assert [answer.text for answer in answers] == ["81", "81"]
    panels, packed = (llm.core.executor.worker.model.layers[0].attention.o for llm in (one, several))
    kind = kind_of(getattr(torch, dtype), short=True)
    assert type(panels) is (kind if kind is cpu_weights.HalfLinear else cpu_weights.PanelLinear)
    assert type(packed) is kind


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
