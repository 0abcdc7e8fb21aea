"""What a model needs before it is loaded, and the options that keep its engine to that."""

from __future__ import annotations

import pytest

from config import DEMO, EngineConfig
from device import needs
from device.needs import OWN, machine_bytes, need_of

GIB = 2**30
BLOCK = 4 * 64 * 768  # bytes of a KV block of the demo: 64 tokens


def test_on_a_cpu_the_pool_has_what_the_weights_leave_of_a_budget() -> None:
    config = EngineConfig(DEMO, device="cpu", dtype="float32")
    need, options = need_of(config, 4 * GIB, GIB)
    assert GIB - BLOCK < need <= GIB
    assert need - options["num_gpu_blocks_override"] * BLOCK > OWN
    less, fewer = need_of(config, 4 * GIB, GIB * 3 // 4)
    saved = options["num_gpu_blocks_override"] - fewer["num_gpu_blocks_override"]
    assert need - less == saved * BLOCK > 0


def test_without_a_budget_it_has_a_share_of_that() -> None:
    config = EngineConfig(DEMO, device="cpu", dtype="float32")
    need, options = need_of(config, 2 * GIB, None)
    beside = need - options["num_gpu_blocks_override"] * BLOCK
    assert options["num_gpu_blocks_override"] == (2 * GIB - beside) // 4 // BLOCK
    few = need_of(EngineConfig(DEMO, device="cpu", dtype="float32", max_num_seqs=4), 64 * GIB, None)[1]
    assert few == {"num_gpu_blocks_override": 4 * 1024 // 64}  # more than four sequences would never use


def test_a_given_pool_is_taken_as_it_is_and_swap_space_counts() -> None:
    config = EngineConfig(DEMO, device="cpu", dtype="float32", num_gpu_blocks_override=100, max_num_seqs=4)
    need, options = need_of(config, GIB, None)
    assert options == {"num_gpu_blocks_override": 100}
    swaps = EngineConfig(DEMO, device="cpu", dtype="float32", num_gpu_blocks_override=100, max_num_seqs=4, swap_space=1)
    assert need_of(swaps, 4 * GIB, None)[0] - need == GIB


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"the weights take 0.01 GiB, [\d.]+ more than there is room for"):
        need_of(EngineConfig(DEMO, device="cpu", dtype="float32"), 4 * GIB, GIB // 4)


@pytest.mark.full
def test_on_a_gpu_a_model_takes_its_utilization_or_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(needs, "gpu_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(needs, "gpu_capability", lambda: (9, 0))
    config = EngineConfig(
        DEMO, gpu_memory_utilization=0.25, max_model_len=1024, max_num_seqs=1024, max_num_batched_tokens=1024
    )
    assert machine_bytes(config) == 2 * GIB
    need, options = need_of(config, 2 * GIB, None)
    assert 2 * GIB - BLOCK < need <= 2 * GIB and options["num_gpu_blocks_override"] > 0
    assert need_of(config, 2 * GIB, GIB * 3 // 2)[0] < need
