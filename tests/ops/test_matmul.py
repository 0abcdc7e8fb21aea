"""The Triton kernels of matrix products against the float64 formulas.

They run as those of test_kernels.py do.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

import oracles
from examples import tried

pytest.importorskip("triton")

from ops import matmul
from test_kernels import run

F32, BF16 = torch.float32, torch.bfloat16


@tried(
    st.sampled_from([1, 3, 64, 65, 70]),
    st.sampled_from([1, 65, 130]),
    st.sampled_from([7, 100, 530]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([1, 64]),
    on=[(3, 65, 100, F32, False, 1), (64, 130, 530, BF16, True, 64), (65, 1, 530, F32, True, 64)],
    drawn=20,
)
def test_linear(device: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool, programs: int):
    args, counters = oracles.product(rows, outputs, inputs, dtype, with_bias), []

    def zeros(there: torch.device) -> torch.Tensor:
        counters.append(torch.zeros(matmul.LINEAR_COUNTERS, dtype=torch.int32, device=there))
        return counters[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "LINEAR_PROGRAMS", programs)  # with 64 these weights have up to 4 splits, with 1 none
        patch.setattr(matmul, "_counters", zeros)
        got = run("linear", device, *args)
        splits = matmul._linear_tile(outputs, inputs, dtype)[2]
    oracles.check_error(got, oracles.linear(*args), oracles.linear(*args, naive=True))
    assert len(counters) == (splits > 1 and rows <= 64)
    assert not any(part.any() for part in counters)  # the next launch needs zeros


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=pytest.mark.full), BF16])
def test_a_row_of_linear_ignores_the_others(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the number of rows nor a row's place changes its bits. With 65 rows one program sums all parts of K."""
    monkeypatch.setattr(matmul, "LINEAR_PROGRAMS", 64)
    assert matmul._linear_tile(140, 1100, dtype)[2] > 1
    x, weight = torch.randn(67, 1100).to(dtype), torch.randn(140, 1100).to(dtype)
    whole = run("linear", device, x, weight)
    for begin, end in ((0, 1), (66, 67), (13, 45), (3, 67)):
        assert torch.equal(run("linear", device, x[begin:end].contiguous(), weight), whole[begin:end])


@pytest.mark.parametrize("capability, chip", [((8, 0), (80, False, True)), ((8, 6), (86, False, False))])
def test_a_kernel_is_for_the_gpu_of_its_tensors(monkeypatch, capability: tuple[int, int], chip: tuple[int, bool, bool]):
    """Tensors on the CPU, and all where there is no GPU, are for the one that is assumed."""
    matmul._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert matmul._chip(torch.device("cuda")) == matmul._chip(torch.device("meta")) == chip
    monkeypatch.setattr(matmul, "ARCH", 120)
    assert matmul._chip(torch.device("cpu")) == (120, False, False)
    matmul._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert matmul._chip(torch.device("meta")) == (120, False, False)
    matmul._capability.cache_clear()
