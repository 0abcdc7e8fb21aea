"""The loader: buffers bring what a plain copy brings, and errors on the way are named."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from checkpoints.hub import INDEX, checkpoint_files
from cpu import weights as cpu_weights
from device import loader
from device.loader import Stage, load_weights
from model import Transformer
from model_config import ModelConfig
from parallel import Group

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 88,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


def build(
    folder: Path, dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1, coded: str = ""
) -> Transformer:
    model = Transformer(ModelConfig.from_folder(str(folder)), reference, "cpu", dtype, 8, Group(rank, size), coded)
    for target in targets(model):
        target.fill_(torch.nan)
    return model


def targets(model: Transformer) -> list[torch.Tensor]:
    return [piece.target for part in model.parameters().values() for piece in part.pieces]


def saved_name(name: str) -> str:
    """As a checkpoint has it."""
    return name if name.startswith("lm_head") else f"model.{name}"


@pytest.fixture
def save(tmp_path: Path):
    """Saves a random checkpoint in `files` files; returns its folder."""

    def save_checkpoint(dtype: torch.dtype = torch.float32, files: int = 1, **shape) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | shape))
        parameters, generator = build(tmp_path).parameters(), torch.Generator().manual_seed(0)
        tensors = {
            saved_name(k): torch.randn(part.shape, generator=generator).to(dtype) for k, part in parameters.items()
        }
        if shape.get("tie_word_embeddings"):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
        names = {name: f"model-{i % files}.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in set(names.values()):
            save_file({k: v for k, v in tensors.items() if names[k] == file}, tmp_path / file)
        if files > 1:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        else:
            (tmp_path / "model-0.safetensors").rename(tmp_path / "model.safetensors")
        return tmp_path

    return save_checkpoint


def check_equal(staged: Transformer, plain: Transformer) -> None:
    """Check that all weights are filled, and bit-equal."""
    ours, theirs = staged.parameters(), plain.parameters()
    for name, part in ours.items():
        for (target, _), (other, _) in zip(part.pieces, theirs[name].pieces, strict=True):
            assert torch.equal(target, other) and not target.isnan().any(), name


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("buffer_bytes", [352, 1000, 2**20], ids=["row by row", "pieces", "whole"])
@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"vocab_size": 5}], ids=["", "tied", "tiny"])
def test_buffers_change_nothing(save, monkeypatch, size, buffer_bytes, shape):
    """The checkpoints have several files. Several ranks cut rows, too, and the last may hold no vocabulary."""
    monkeypatch.setattr(loader, "BUFFER_BYTES", buffer_bytes)
    folder = save(files=3, **shape)
    for rank in range(size):
        staged, plain = (build(folder, rank=rank, size=size) for _ in range(2))
        load_weights(staged, str(folder), staged=True)
        load_weights(plain, str(folder))
        check_equal(staged, plain)


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_are_converted_as_by_a_copy(save, dtype, model_dtype):
    folder = save(dtype)
    staged, plain = (build(folder, model_dtype) for _ in range(2))
    load_weights(staged, str(folder), staged=True)
    load_weights(plain, str(folder), staged=False)
    check_equal(staged, plain)


def test_every_byte_goes_through_the_buffers_once_and_none_on_a_cpu(save, monkeypatch):
    moved, move = [], Stage.move
    monkeypatch.setattr(Stage, "move", lambda self, copy: moved.append(copy[0].numel()) or move(self, copy))
    folder = save()
    model = build(folder)
    load_weights(model, str(folder))
    assert not moved
    load_weights(model, str(folder), staged=True)
    assert sum(moved) == sum(target.numel() for target in targets(model))


def test_files_are_read_ahead(save, monkeypatch):
    """The file after the one that is being copied is read, too."""
    files = []
    monkeypatch.setattr(loader, "read_ahead", lambda path: files.append(os.path.basename(path)[6:7]))
    folder = save(files=3)
    load_weights(build(folder), str(folder))
    assert files == ["0", "1", "1", "2", "2"]
    monkeypatch.undo()
    monkeypatch.delattr(os, "posix_fadvise", raising=False)  # as on macOS
    load_weights(build(folder), str(folder))


def test_an_error_on_the_way_is_the_callers_and_no_thread_is_left(save, monkeypatch):
    """More copies fail than there are buffers."""
    monkeypatch.setattr(loader, "BUFFER_BYTES", 352)
    folder, before, failed = save(), threading.active_count(), []
    load_weights(build(folder), str(folder), staged=True)
    assert threading.active_count() == before
    move = Stage.move

    def fail(self, copy):
        if copy[0].ndim == 2:
            failed.append(copy)
            copy = copy[0], copy[1][:, :-1]
        move(self, copy)

    monkeypatch.setattr(Stage, "move", fail)
    with pytest.raises(RuntimeError, match="size of tensor"):
        load_weights(build(folder), str(folder), staged=True)
    assert failed and threading.active_count() == before


@pytest.mark.parametrize("staged", [False, True])
def test_a_surplus_tensor_is_named_unless_the_index_leaves_it_out(save, staged):
    folder = save(files=2)
    path, index, name = folder / "model-1.safetensors", folder / INDEX, "model.layers.0.mlp.extra"
    load_weights(plain := build(folder), str(folder), staged=staged)
    save_file(load_file(path) | {name: torch.ones(2)}, path)
    load_weights(model := build(folder), str(folder), staged=staged)
    assert all(map(torch.equal, targets(model), targets(plain)))
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": names | {name: path.name}}))
    with pytest.raises(ValueError, match=rf"model-1\.safetensors has a tensor '{name}'"):
        load_weights(build(folder), str(folder), staged=staged)
    index.write_text(json.dumps({"weight_map": dict(list(names.items())[:4])}))  # of both files
    load_weights(model := build(folder), str(folder), staged=staged)
    assert all(map(torch.equal, targets(model), targets(plain)))


def change(folder: Path, name: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a tensor of the checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensor(tensors[name])}, folder / "model.safetensors")


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, pytest.param(-math.inf, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.2.self_attn.k_proj.bias"])
def test_weights_that_are_not_finite_are_refused_by_name(save, monkeypatch, name, dtype, bad, staged):
    monkeypatch.setattr(loader, "PIECE_BYTES", 352)
    folder = save(dtype)
    change(folder, name, lambda tensor: tensor.index_put_((torch.tensor(-1),), torch.tensor(bad, dtype=dtype)))
    with pytest.raises(ValueError, match=rf"tensor {name} has NaN or infinite elements, read as {str(dtype)[6:]}$"):
        load_weights(build(folder, dtype), str(folder), staged=staged)


def test_weights_are_summed_up_once_they_have_arrived(save, monkeypatch):
    """A stream of its own copies and adds up, so until the stage waits there is no telling what a sum holds."""
    sums, move, wait = [], Stage.move, Stage.wait

    def move_late(self, pair):
        sums.append((torch.zeros(()), move(self, pair)))
        return sums[-1][0]

    def wait_for_all(self):
        wait(self)
        for total, read in sums:
            total.copy_(read)

    monkeypatch.setattr(Stage, "move", move_late)
    monkeypatch.setattr(Stage, "wait", wait_for_all)
    folder = save()
    change(folder, "model.norm.weight", lambda tensor: tensor * math.nan)
    with pytest.raises(ValueError, match=r"tensor model.norm.weight has NaN"):
        load_weights(build(folder), str(folder), staged=True)


@pytest.mark.parametrize("staged", [False, True])
def test_weights_that_the_dtype_cannot_hold_are_refused(save, staged):
    folder = save()
    change(folder, "model.norm.weight", lambda tensor: tensor * 1e6)
    with pytest.raises(ValueError, match=r"tensor model.norm.weight has NaN or infinite elements, read as float16$"):
        load_weights(build(folder, torch.float16), str(folder), staged=staged)
    load_weights(build(folder), str(folder), staged=staged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_finite_weights_whose_sum_overflows_are_not_refused(save, dtype):
    folder = save(dtype)
    change(folder, "lm_head.weight", lambda tensor: torch.full_like(tensor, torch.finfo(dtype).max))
    load_weights(build(folder, dtype), str(folder))


@pytest.mark.parametrize(
    ("dtype", "called"),
    [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_tensors_of_other_dtypes_are_refused_by_name(save, dtype, called):
    folder = save()
    change(folder, "model.norm.weight", lambda tensor: tensor.to(dtype))
    with pytest.raises(ValueError, match=rf"tensor model.norm.weight is {called}; Manta reads BF16, F16, F32$"):
        load_weights(build(folder), str(folder))


@pytest.mark.parametrize("files", [5, [5], None, {"a": 5}, {"a": ["x"]}, {"a": 1, "b": "x"}, {"a": "x\ny"}], ids=str)
def test_an_index_of_wrong_types_is_named_in_one_line(tmp_path, files):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match=r"index\.json is not a safetensors index: [^\n]+$"):
        checkpoint_files(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # of the file; the model is in float32
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_looked_up_in_the_mapped_file(save, tied, dtype):
    folder = save(dtype, files=3, tie_word_embeddings=tied)
    model, plain = build(folder), build(folder)
    for loaded in (model, plain):
        load_weights(loaded, str(folder))
    model.head = model.head.clone()  # as packing does
    cpu_weights.map_embedding(model, checkpoint_files(str(folder)))
    assert model.embedding.data_ptr() != plain.embedding.data_ptr() and model.embedding.dtype == dtype
    ids = torch.arange(len(plain.embedding))
    assert model.embed(ids, ids).dtype == torch.float32 and torch.equal(model.embed(ids, ids), plain.embed(ids, ids))
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [[int(end, 16) for end in entry.split("-")] for entry in mapped]
    assert any(begin <= model.embedding.data_ptr() < end for begin, end in ranges)


@pytest.mark.parametrize("coded", ["", "int8"])
@pytest.mark.parametrize("rows", [1, 2], ids=["as large", "larger"])
def test_a_table_of_another_part_is_not_the_model_s(save, coded, rows):
    """What predicts tokens ahead may have one, which is not read."""
    folder = save(tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    other = torch.randn_like(tensors["model.embed_tokens.weight"]).repeat(rows, 1)
    save_file(tensors | {"mtp.embed_tokens.weight": other}, folder / "model.safetensors")
    model, expected = build(folder, coded=coded), build(folder, coded=coded)
    for loaded in (model, expected):
        load_weights(loaded, str(folder))
    model.head = None  # as if it were packed
    cpu_weights.map_embedding(model, checkpoint_files(str(folder)))
    ids = torch.arange(10)
    assert model.embedding is not expected.embedding and torch.equal(model.embed(ids, ids), expected.embed(ids, ids))


@pytest.mark.parametrize("why", ["a head that is the table", "another dtype", "several ranks"])
def test_a_table_that_is_not_the_file_s_stays(save, why):
    folder = save(tie_word_embeddings=True)
    dtype = torch.float16 if why == "another dtype" else torch.float32
    model = build(folder, dtype, size=2 if why == "several ranks" else 1)
    load_weights(model, str(folder))
    table = model.embedding
    if why != "a head that is the table":
        model.head = model.head.clone()
    cpu_weights.map_embedding(model, checkpoint_files(str(folder)))
    assert model.embedding is table


@pytest.mark.parametrize("tied", [True, False])
def test_one_product_of_weights_in_codes_is_the_head(save, tied):
    folder, seen = save(tie_word_embeddings=tied), []
    model = build(folder, coded="int8")
    load_weights(model, str(folder))

    def pack_codes(weight, is_head):
        seen.append((tuple(weight.codes.shape), is_head))
        return weight

    cpu_weights.prepare(model, "several", [], pack_codes=pack_codes)
    assert [shape for shape, is_head in seen if is_head] == [(97, 64)] and len(seen) == 1 + 4 * 3
