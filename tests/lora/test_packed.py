"""DoRA beside weights in codes: it scales by the numbers that the codes stand for, and A and B are added to these."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import ALL, add_kind, make_adapter, merge
from checkpoints.hub import checkpoint_files
from checkpoints.rounding import nearest_codes
from checkpoints.storage import Storage, tensors_in
from model_config import ModelConfig
from oracle_checks import first_step, logits_of, make_worker
from packed_checkpoints import PACKED
from random_checkpoints import DATA
from test_schemes import compressed, words

PROMPTS = [[1, 2, 3, 4, 5], [7, 9, 11]] * 2
CODED = {  # as compressed-tensors, by the kind of the codes
    "int8": compressed("pack-quantized", num_bits=8, strategy="channel", group_size=None),
    "int4": compressed("pack-quantized", group_size=16),
}


def coded(folder: Path, kind: str) -> Path:
    """A checkpoint whose projections are rounded to codes of a kind."""
    base, weights = DATA / "families" / "qwen3", CODED[kind]["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    shutil.copytree(base, folder)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("proj.weight"):
            codes, scales = nearest_codes(weight.float(), kind, weights["group_size"] or weight.shape[1])
            tensors |= {
                f"{name}_packed": words(codes.int() + 2 ** (bits - 1), bits), f"{name}_scale": scales.half(),
                f"{name}_shape": torch.tensor(weight.shape),
            }  # fmt: skip
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CODED[kind]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain(folder: Path, packed: Path) -> Path:
    """The checkpoint of the numbers that another one's codes stand for."""
    shutil.copytree(packed, folder)
    paths = checkpoint_files(str(packed))
    storage = Storage(paths, ModelConfig.from_folder(str(packed)).quantization)
    tensors = {
        name: storage.open(file, saved).float().contiguous()
        for file, saved in tensors_in(paths)
        if (name := storage.name_of(saved)) and not storage.is_zero_bias(file, saved)
    }
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["gptq", "gptq-v2", "awq", *CODED])
def test_dora_beside_codes_is_that_of_their_numbers(tmp_path: Path, name: str, backend: str) -> None:
    packed = coded(tmp_path / "packed", name) if name in CODED else PACKED / name
    numbers = plain(tmp_path / "numbers", packed)
    make_adapter(tmp_path / "a", 1, rank=3, modules=ALL, base=numbers)
    add_kind(tmp_path / "a", "dora", numbers)
    worker = make_worker(packed, enable_lora=True, max_loras=2, max_cpu_loras=2, backend=backend)
    assert worker.model.coded and worker.adapters.load(1, str(tmp_path / "a")) == ""
    _, hidden = first_step(worker, PROMPTS, [2, 2, 0, 0], adapters=[(1, 1)])
    counts = [len(prompt) for prompt in PROMPTS]
    ours = worker.logits(hidden, torch.arange(4).repeat_interleave(torch.tensor(counts))).split(counts)
    merged = make_worker(merge(tmp_path / "merged", tmp_path / "a", numbers))
    for i in range(2):
        assert (ours[i] - logits_of(merged, PROMPTS[i])).abs().max() <= 1e-4
    assert (ours[0] - ours[2]).abs().max() > 0.05
