"""The plan of memory counts weights in few bits as they are loaded, of each scheme, before a CPU packs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from checkpoints.gguf_folder import made_folder
from config import EngineConfig
from device import startup
from device.memory import MIB, MemoryPlan, count_bytes
from device.startup import prepare, print_plan
from model import Transformer
from model_config import ModelConfig
from models.quantized import QuantizedWeight
from parallel import Group
from test_damaged import gguf_file
from test_dequantize import fp8_checkpoints, mxfp4_checkpoints, write
from test_schemes import BNB4, CASES, GPTQ, MIXTRAL, PHI3, SMALL, bnb4, checkpoints


def planned(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, gib: float | None = None
) -> tuple[MemoryPlan, list[str]]:
    """What `--plan` counts, and its lines."""
    plans, lines, report = [], [], startup.report

    def told(*args: Any) -> Any:
        plans.append(args[2])
        lines.extend(report(*args))
        return iter(())

    monkeypatch.setattr(startup, "report", told)
    print_plan(config, ModelConfig.from_folder(config.folder), gib)
    return plans[0], lines


def check(folder: str, monkeypatch: pytest.MonkeyPatch, *kinds: str, **fields: Any) -> None:
    """The plan has the bytes of a model that was loaded, of which some matrices are in codes."""
    config = EngineConfig(folder, device="cpu", max_num_seqs=2, max_model_len=32, enforce_eager=True, **fields)
    plan, lines = planned(config, monkeypatch)
    start = prepare(config, ModelConfig.from_folder(folder), 0, "")
    monkeypatch.setattr(start, "arrange", lambda files: None)
    start.load()
    values = [value for owner in start.model.owners() for value in vars(owner).values()]
    weights = [value for value in values if isinstance(value, QuantizedWeight)]
    assert {weight.coded.kind for weight in weights} == set(kinds)
    assert plan.weights == count_bytes(start.model.owners()) == start.memory.weights
    assert kinds[0] in lines[0] and "plain numbers" not in lines[1]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("gptq 4", "int4"), ("gptq 8", "int8"), ("gptq act", "int4"), ("awq", "int4"), ("pack 4", "int4"),
        ("pack zeros", "int4"), ("int8 channel", "int8"), ("int8 zeros", "int8"), ("int8 bnb", "int8"),
        ("nvfp4", "fp4"), ("nvfp4 pack", "fp4"),
    ],
)  # fmt: skip
def test_each_scheme_is_counted_as_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kind: str):
    packed, _ = checkpoints(tmp_path, SMALL, *CASES[case])
    check(str(packed), monkeypatch, kind)


@pytest.mark.parametrize("raw", [PHI3, MIXTRAL], ids=["fused", "experts"])
def test_fused_matrices_and_experts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any]):
    packed, _ = checkpoints(tmp_path, raw, *CASES["awq"])
    check(str(packed), monkeypatch, "int4")


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_floats_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    packed, _ = fp8_checkpoints(tmp_path, "channel") if kind == "fp8" else mxfp4_checkpoints(tmp_path)
    check(str(packed), monkeypatch, kind)


@pytest.mark.parametrize(("gib", "capability", "rounds"), [(None, (8, 6), 0), (None, (8, 9), 1), (80, (8, 6), 1)])
def test_a_gpu_is_planned_with_inputs_as_it_rounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float | None, capability: tuple[int, int], rounds: int
) -> None:
    """One of which only the memory is told is one that multiplies FP8."""
    packed, _ = fp8_checkpoints(tmp_path, "channel")
    config = json.loads((packed / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
    (packed / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(startup, "gpu_bytes", lambda: 2**36)
    monkeypatch.setattr(startup, "gpu_capability", lambda: capability)
    _, lines = planned(EngineConfig(str(packed), max_num_seqs=2, max_model_len=32), monkeypatch, gib)
    assert "in fp8" in lines[0] and ("with inputs in fp8" in lines[0]) == rounds


@pytest.mark.parametrize(("name", "kind"), [("Q4_0", "int4"), ("Q4_K", "int4"), ("Q6_K", "int6"), ("Q8_0", "int8")])
def test_gguf_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf_file(tmp_path, name)
    check(made_folder(str(tmp_path / "packed.gguf")), monkeypatch, kind)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_rounded_weights_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _, plain = checkpoints(tmp_path, SMALL, *CASES["awq"])
    check(str(plain), monkeypatch, kind, "int8", quantization=kind)  # which the head has


PLAN = """
import sys
from config import EngineConfig
from device.startup import print_plan
from model_config import ModelConfig
for folder in sys.argv[1:]:
    config = EngineConfig(folder, dtype="bfloat16", max_num_seqs=2, max_model_len=32)
    print_plan(config, ModelConfig.from_folder(folder), 80)
"""


@pytest.mark.full
def test_each_kind_is_planned_with_kernels_that_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run prepares them as a GPU's start does; what the interpreter needs is less."""
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kind in ("nf4", "int4", "int8", "fp4", "fp8", "int6", "iq4"):
        (tmp_path / kind).mkdir()
    table, randn = torch.tensor(reference.NF4), torch.randn
    with monkeypatch.context() as patched:  # whose table must be that of the scheme
        patched.setattr(torch, "randn", lambda *shape: table.clone() if shape == (16,) else randn(*shape))
        folders = {"nf4": checkpoints(tmp_path / "nf4", SMALL, BNB4, bnb4(False, 32))[0]}
    for kind, case in (("int4", "awq"), ("int8", "int8 channel"), ("fp4", "nvfp4")):
        folders[kind] = checkpoints(tmp_path / kind, SMALL, *CASES[case])[0]
    folders["fp8"] = fp8_checkpoints(tmp_path / "fp8", "channel")[0]
    for kind, name in (("int6", "Q6_K"), ("iq4", "IQ4_XS")):
        gguf_file(tmp_path / kind, name)
        folders[kind] = Path(made_folder(str(tmp_path / kind / "packed.gguf")))
    command = [sys.executable, "-c", PLAN, *map(str, folders.values())]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "parameters in" in line]
    assert len(lines) == len(folders) and all(kind in line for kind, line in zip(folders, lines, strict=True))


def test_without_files_the_plan_says_that_weights_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json alone does not tell which of them the files would have in few bits."""
    folder = write(tmp_path / "model", SMALL | {"quantization_config": GPTQ}, {})
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    plan, lines = planned(EngineConfig(str(folder), device="cpu", dtype="float32"), monkeypatch)
    shape = ModelConfig.from_folder(str(folder))
    model = Transformer(shape, reference, "cpu", torch.float32, shape.max_position, Group(0, 1))
    assert plan.weights == count_bytes(model.owners())
    assert lines[1].endswith("MiB  as plain numbers: no file is read that tells which have few bits")
    assert f"{plan.weights / MIB:,.1f} MiB" in lines[1]
