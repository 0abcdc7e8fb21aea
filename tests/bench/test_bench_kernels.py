"""The benchmark of the kernels counts right, and checks what it is about to time."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import bench
import bench_kernels
import kernels
import reference
from bench_kernels import Shape

TINY = Shape("tiny", 32, 4, 2, 16, 48, 100, True)
TINY8 = TINY._replace(cache=torch.float8_e4m3fn)
CASES = [
    *bench_kernels.norm_cases(TINY, (3,)),
    *bench_kernels.rope_cases(TINY, (70,)),
    *bench_kernels.linear_cases(TINY, (3,)),
    *bench_kernels.coded_cases(bench_kernels.Coded("tiny", (("down", 64, 24),), "fp8", 48), (3,)),
    *bench_kernels.coded_cases(bench_kernels.Coded("tiny", (("down", 64, 24),), "int4", 32), (3,)),
    *bench_kernels.expert_cases(bench_kernels.Experts("tiny", 3, 2, 32, 32, "silu", "fp4"), (3,)),
    *bench_kernels.expert_cases(bench_kernels.Experts("tiny", 3, 2, 32, 24, "silu", "int8", 1 << 20, "int8"), (3,)),
    *bench_kernels.expert_cases(bench_kernels.Experts("tiny", 6, 2, 32, 24, "silu"), (3,)),
    *bench_kernels.lora_cases(bench_kernels.Lora("tiny", (("qkv", 32, (0, 16, 24)),), 4, 3), (6,)),
    *bench_kernels.latent_cases(bench_kernels.Latent("tiny", 2, 32, 16, 24), (("two", [70, 5]),), (3,)),
    *bench_kernels.decode_cases(TINY8, (("e4m3", [70, 5]),), (3,)),
    *bench_kernels.prefill_cases(TINY8, (("e4m3", [(3, 66), (5, 0)]),)),
    *bench_kernels.decode_cases(TINY, (("drafts", [70, 5]),), (3,), 4),
    *bench_kernels.decode_cases(TINY, (("two", [70, 5]),), (3,)),
    *bench_kernels.prefill_cases(TINY, (("two", [(3, 66), (5, 0)]),)),
    *bench_kernels.encode_cases(bench_kernels.Encoded("tiny", 2, 24, (("tiles", 3, 21),))),
    *bench_kernels.sample_cases(TINY, 3),
    *bench_kernels.state_cases(TINY, 3, 600),
    *bench_kernels.block_cases(TINY, 2),
]


LONG = ("3 rows, the same, penalties", "3 rows, top-k 50, top-p 0.9", "3 rows, top-p 0.95")  # which sort, interpreted


def in_tier(case: Any) -> Any:
    return pytest.param(case, id=f"{case.op} {case.size}", marks=[pytest.mark.full] * (case.size in LONG))


@pytest.mark.interpreted
@pytest.mark.parametrize("case", [in_tier(case) for case in CASES])
def test_each_case_is_checked_against_its_twin(case):
    with np.errstate(all="ignore"):  # the interpreter computes in numpy, which warns of log(0)
        assert bench_kernels.check(case, kernels, reference, "cpu") <= 1e-2
    for i, value in enumerate((50, float("nan"))):
        result = bench_kernels.results(case.make("cpu"), reference)[-1].clone(memory_format=torch.contiguous_format)
        if i == 0 or result.is_floating_point():
            spoilt = result.clone()
            spoilt.view(-1)[len(spoilt) // 2] += value
            with pytest.raises(AssertionError, match=case.op):
                bench_kernels.relative_error(case, spoilt, result)


@pytest.mark.interpreted
def test_every_case_can_be_rehearsed(capsys):
    bench_kernels.rehearse(CASES)
    assert not capsys.readouterr().out


def test_decode_reads_pages_of_a_pool_of_many_layers():
    """Pages of one layer lie as far apart as those of all layers take."""
    apart = []
    read = {"plan_decode": lambda *_, **__: None, "attention_decode": lambda q, kv, *_: apart.append(kv.stride(0))}
    cases = list(bench_kernels.decode_cases(TINY, (("two", [70, 5]),)))
    for case in cases:
        case.make("cpu").run(SimpleNamespace(__name__="op", **read))
    assert apart == [layers * 2 * 2 * 64 * 16 for layers in (2, 28)]
    assert [case.size for case in cases] == ["two, 1 of 2 layers", "two, 1 of 28 layers"]


def test_bytes_and_operations_are_counted():
    counted = {case.op: (case.bytes, case.flops) for case in CASES}  # of an op's last case
    drafts = next(case for case in CASES if case.size.startswith("drafts"))
    keys = 67 + 68 + 69 + 70 + 2 + 3 + 4 + 5
    assert (drafts.bytes, drafts.flops) == (2 * (75 * 2 * 2 * 16 + 2 * 2 * 4 * 4 * 16), 2 * 2 * keys * 4 * 16)
    assert counted["rms_norm"] == (2 * (2 * 3 * 32 + 2 * 3 * 32 + 32), 0)  # x, y; the residual twice; the weight
    assert counted["act_mul"] == (2 * 3 * (48 + 48 + 48), 0)
    assert counted["attention_decode"] == (2 * (75 * 2 * 2 * 16 + 2 * 2 * 4 * 16), 2 * 2 * 75 * 4 * 16)
    weights, moved = 6 * (1 - (4 / 6) ** 3) * 32 * 24 * 2, 2 * (3 * 32 + 6 * 24)  # of the experts that are hit; x and h
    assert counted["expert_gate_up"] == (int(moved + 2 * weights), 2 * 6 * 2 * 32 * 24)
    assert counted["expert_down"] == (int(moved + weights), 2 * 6 * 32 * 24)
    assert counted["quantized_linear"] == (24 * 32 + 2 * 24 * 2 + 2 * 3 * (64 + 24), 2 * 3 * 64 * 24)
    coded = next(case for case in CASES if case.op == "expert_down")
    assert coded.bytes == int(2 * (3 * 32 + 6 * 32) + 3 * (1 - (1 / 3) ** 3) * (32 * 16 + 2 * 32))
    hit = 3 * (1 - (2 / 3) ** 6)  # adapters
    assert counted["lora_shrink"] == (int(2 * 6 * 32 + 2 * hit * 8 * 32 + 4 * 6 * 8), 2 * 6 * 8 * 32)
    assert counted["lora_expand"] == (int(4 * 6 * 8 + 2 * hit * 24 * 4 + 4 * 6 * 24), 2 * 6 * 4 * 24)
    pairs = 67 + 68 + 69 + 1 + 2 + 3 + 4 + 5
    assert counted["attention_prefill"] == (2 * (74 * 2 * 2 * 16 + 2 * 8 * 4 * 16), 2 * 2 * pairs * 4 * 16)
    assert counted["attention_encode"] == (2 * 3 * 21 * 4 * 48, 2 * 2 * 3 * 21**2 * 48)
    cached = next(case for case in CASES if case.size.startswith("e4m3"))
    assert (cached.bytes, cached.flops) == (75 * 2 * 2 * 16 + 2 * 2 * 2 * 4 * 16, counted["attention_decode"][1])
    assert counted["latent_decode"] == (2 * (75 * 48 + 2 * 2 * (48 + 32)), 2 * 75 * 2 * (48 + 32))
    assert counted["logprobs"] == (3 * 100 * 2, 0)
    assert counted["put_drafts"] == (3 * 4 * (1 + 1 + 4 + 4 + 1), 0)  # slot, length, drafts; these again, their number
    assert counted["look_up"] == (counted["put_drafts"][0] + 3 * 3 * 600 * 4, 0)  # of all rows
    assert counted["copy_blocks"] == (2 * counted["swap_blocks"][0], 0)


def test_few_queries_of_a_long_prompt_are_checked(monkeypatch):
    """The twin computes no others, and has what the op gives for these among all."""
    (case,) = bench_kernels.prefill_cases(TINY, (("long", [(1500, 100), (41, 0)]),))
    plain, queries = reference.attention_prefill, []
    op = SimpleNamespace(BACKEND="triton", attention_prefill=plain)
    monkeypatch.setattr(reference, "attention_prefill", lambda q, *more: queries.append(len(q)) or plain(q, *more))
    assert bench_kernels.check(case, op, reference, "cpu") <= 1e-2
    assert 150 < queries[0] <= 256 and len(queries) == 1
    inputs = case.make("cpu")
    assert torch.equal(bench_kernels.results(inputs, op)[0][[127, -1]], inputs.run(op)[[1499, -1]])


def test_floors_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (figure, *_) = figures = list(bench_kernels.kernel_figures(["copy_blocks", "swap_blocks"], ["qwen3-0.6b"]))
    assert [f["op"] for f in figures] == ["copy_blocks", "swap_blocks"] and "us" not in figure
    page = 28 * 2 * 8 * 64 * 128 * 2
    assert figure["floor us"] == round(2 * 64 * page / 4.3e12 * 1e6, 1)
    assert figures[1]["floor us"] == round(64 * page / 63e9 * 1e6, 1)
    assert "No CUDA device" in capsys.readouterr().out


def test_a_case_that_fails_loses_no_other(tmp_path, capsys, monkeypatch):
    """On a GPU that is made up: the device's part of each case is a stand-in, and the check of some raises."""

    def check(case, *_):
        shown = capsys.readouterr().out
        assert case.op != "swap_blocks" or shown.endswith(" torch 2.00x\n")  # the row before has been printed already
        if case.op == "swap_blocks":
            raise RuntimeError("indices should be on the CPU\nand more lines")
        return 0.0

    measured = {"us": 7.0, "GB/s": 1, "TFLOP/s": 0.0, "of limit": 0.5, "a library takes": "torch 2.00x"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")
    monkeypatch.setattr(bench_kernels, "rehearse", lambda cases: None)
    monkeypatch.setattr(bench_kernels, "measure_limits", lambda: bench_kernels.H200)
    monkeypatch.setattr(bench_kernels, "check", check)
    monkeypatch.setattr(bench_kernels, "measure", lambda *_: measured)
    out = tmp_path / "out.json"
    chosen = ["--ops", "copy_blocks", "swap_blocks", "--shapes", "qwen3-0.6b", "llama3-8b"]
    monkeypatch.setattr("sys.argv", ["bench.py", "--json", str(out), "kernels", *chosen])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1
    figures = json.loads(out.read_text())["figures"]
    assert [f["us"] for f in figures] == [7.0] * 4
    assert [f.get("failure") for f in figures] == [None, "RuntimeError: indices should be on the CPU"] * 2
    assert "failed: RuntimeError: indices should be on the CPU\n" in capsys.readouterr().out


def test_an_op_is_compared_with_its_twin_by_name(monkeypatch, capsys):
    """docs/check_kernel.py knows each op of the specification, and says where one is wrong."""
    monkeypatch.syspath_prepend(Path(bench_kernels.__file__).parent.parent / "docs")
    import check_kernel

    def said(*names: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["check_kernel.py", *names])
        with pytest.raises(SystemExit) as ended:
            check_kernel.main()
        return ended.value.code, capsys.readouterr().out

    assert said("rms_norm") == (0, "rms_norm, 5 x 64: error 0.0e+00, right (0.01 is allowed)\n")
    message, _ = said("rms_nrm")
    assert message.startswith("check_kernel.py: NAME is 'rms_nrm'; did you mean rms_norm?\nops: act, act_mul, ")
    made = {name for name, op in inspect.getmembers(reference, inspect.isfunction) if op.__module__ == "reference"}
    no_ops = {"keys_of", "uniform", "apart", "dequantize", "arrange"}
    assert {n for n in made if n[0] != "_"} - no_ops == set(message.partition("ops: ")[2].split(", "))
    monkeypatch.setattr(kernels, "act", lambda *args: 1.1 * reference.act(*args))
    code, text = said("act")
    assert code == 1 and text.endswith("error 1.00e-01 where 0.01 is allowed: WRONG\n")
