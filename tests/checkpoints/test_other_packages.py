"""Checkpoints that other people's packages have written answer as these packages read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from device.coded import kinds_of
from oracle_checks import logits_of, make_worker
from packed_checkpoints import KEPT, PACKED, PROMPTS, ask
from random_checkpoints import once

CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
E4M3 = "torch.float8_e4m3fn"


def weights(**more: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | more


def compressed(form: str, **more: Any) -> dict[str, Any]:
    return {"format": form, "weights": weights(**more)}


def bits(**more: Any) -> dict[str, Any]:
    return {"bitsandbytes": more}


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the kind in which they are kept, and how they are made
    "W4A16": ("int4", compressed("pack-quantized")),
    "W4A16 with zeros": ("int4", compressed("pack-quantized", symmetric=False)),
    "W8A16": ("int8", compressed("pack-quantized", **CHANNEL)),
    "W8A8": ("int8", compressed("int-quantized", **CHANNEL)),
    "FP8": ("fp8", compressed("float-quantized", **CHANNEL | {"type": "float"})),
    "FP8 of a tensor": ("fp8", compressed("float-quantized", **CHANNEL | {"type": "float", "strategy": "tensor"})),
    "NVFP4": ("fp4", compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16,
                                scale_dtype=E4M3, zp_dtype=E4M3)),
    "NF4": ("nf4", bits(**NF4)),
    "NF4 twice": ("nf4", bits(**NF4, bnb_4bit_use_double_quant=True)),
    "LLM.int8()": ("int8", bits(load_in_8bit=True)),
}  # fmt: skip
PACKAGES = {"bitsandbytes": "bitsandbytes", "weights": "compressed_tensors"}


@pytest.fixture(scope="module", params=PACKAGES)
def written(request: pytest.FixtureRequest, shared: Path) -> dict[str, Path]:
    """The folders that a package has written, by the names of the cases."""
    pytest.importorskip(PACKAGES[request.param])
    cases = {name: case for name, (_, case) in CASES.items() if request.param in case}

    folder = once(shared / f"written-{request.param}", lambda folder: ask(folder, cases))
    return {name: folder / name for name in cases}


def check(folder: Path, kind: str) -> None:
    """Given the package's own tokens, each is ours as well, unless another one is as good as that."""
    oracle, prompt = load_file(folder / "oracle.safetensors"), PROMPTS[0]
    for i, ids in enumerate(PROMPTS):
        worker = make_worker(folder, backend="reference")
        assert kinds_of(worker.model).keys() == {kind}
        assert (logits_of(worker, ids) - oracle[f"logits{i}"]).abs().max() <= 1e-4, folder
    tokens, clear = oracle["tokens"], oracle["margins"] > 1e-3
    predicted = logits_of(make_worker(folder), prompt + tokens.tolist())[len(prompt) - 1 : -1].argmax(1)
    assert len(tokens) == 200 and clear.sum() > 150 and torch.equal(predicted[clear], tokens[clear]), folder


@pytest.mark.full
def test_logits_and_tokens_are_those_of_the_package(written: dict[str, Path]) -> None:
    for name, folder in written.items():
        check(folder, CASES[name][0])


@pytest.mark.parametrize("name", KEPT)
def test_logits_and_tokens_are_those_of_gptqmodel(name: str) -> None:
    """Of checkpoints that it has written some day; see packed_checkpoints.py."""
    check(PACKED / name, "int4")
