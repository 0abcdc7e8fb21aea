"""Fills a model with weights, from safetensors or made up.

The files are mapped into memory, and each rank copies just its slices of them. On the way to a GPU the slices go
through pinned buffers: threads fill these from the mapping, and a separate stream empties them, so that the disk, the
host's memory and the bus all work at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

import torch

from checkpoints.dequantize import Packed, Stored
from checkpoints.hub import INDEX, checkpoint_files
from checkpoints.rounding import rounded
from checkpoints.storage import Storage, opened, read_ahead
from checkpoints.tied_head import stand_in
from config import read_json
from cpu import machine
from device.coded import fill, kinds_to_round, settle
from model import Transformer
from models.families import PREFIXES, is_of_another_half, our_name, renewed
from models.quantized import QuantizedWeight
from models.shares import Parts, TensorPart
from observe.logs import warn_once

# Constants that old checkpoints have: RoPE's frequencies, masks, and two of xIELU's numbers. And scales of keys and
# values, which only a cache in FP8 wants.
IGNORED = (
    ".rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias",
    ".attention.masked_bias", ".act_fn.beta", ".act_fn.eps", ".k_scale", ".v_scale", ".kv_scale",
)  # fmt: skip
HEADS = ("lm_head.weight", "embed_out.weight", "score.weight", "score.0.weight", "score.0.bias", "score.2.weight",
         "score.2.bias")  # fmt: skip  # not read where tied, or where the task needs none
# Heads of encoders for words, and parts of those for labels where the task needs none; after a model's prefix.
ENCODER_HEADS = (
    "cls.", "lm_head.", "vocab_", "pooler.", "head.", "decoder.", "classifier.", "pre_classifier.",
    "embeddings.position_ids",
)  # fmt: skip
READERS = 2  # one copies while the other waits for the disk; torch divides each copy among the cores
PIECE_BYTES = 4 * 2**20  # are copied and added up at a time on a CPU, so that the sum finds them in its cache
BUFFERS, BUFFER_BYTES = 4, 32 * 2**20  # two are filled and two emptied; a call's time is small beside that of its bytes

Target = torch.Tensor | QuantizedWeight
Pair = tuple[Target, Stored]  # target and source, of equal shapes
Files = dict[str, dict[str, list[Stored]]]  # by a file's path and our name of a tensor, what fills each of its pieces


def load_weights(model: Transformer, folder: str, staged: bool | None = None, wanted: Parts | None = None) -> None:
    """Fill `model` from the safetensors of `folder`, which may be a file itself, too.

    Only this rank's share of each tensor is read, and only after the headers of all files have been checked. A
    ValueError names a file or tensor that is missing, surplus, damaged, misshapen, of another dtype or not finite.

    Args:
        staged: whether to copy through a `Stage`; by default, whether the model is on a GPU.
        wanted: the model's `parameters`, if its weights are packed by now.
    """
    from tqdm import tqdm  # here, because a plan does without

    wanted, device = wanted or model.parameters(), torch.device(model.device)
    saved_names, files = find_weights(model, folder, wanted)
    paths = [*files]
    scales = [(name, piece.target) for name, part in wanted.items() if part.optional for piece in part.pieces]
    for _, target in scales:
        target.fill_(1)
    targets = settle(model, wanted, all_sources(files))
    source = paths[0] if len(paths) == 1 else folder  # of a GGUF file the folder says nothing to a user
    stage = Stage(device) if (device.type == "cuda" if staged is None else staged) else None
    move, begin = (stage.move, stage.begin) if stage else (copy, None)
    sums: dict[str, list[torch.Tensor]] = {}  # of each tensor's parts; a stage may still be making them until it waits
    with (
        tqdm(total=len(saved_names), desc="Loading weights", unit="tensor", leave=False, disable=None) as bar,
        readers(model, stage) as count,
        ThreadPoolExecutor(count, initializer=begin) as pool,
    ):
        for i, sources in enumerate(files.values()):
            both = chain.from_iterable(zip(targets[name], of, strict=True) for name, of in sources.items())
            moved = pool.map(move, both)
            for path in paths[i : i + 2]:
                read_ahead(path)
            for name, of in sources.items():
                sums[name] = [*islice(moved, len(of))]
                bar.update()
    if stage:
        stage.wait()
    for name, target in scales:
        if name in saved_names and not target > 0:
            raise ValueError(f"{source}: tensor {saved_names[name]} is {float(target)}; a scale must be above 0")
    for name, parts in sums.items():  # a sum of finite numbers may overflow, too, so it is only a hint
        total = sum(parts, torch.zeros((), device=device))
        plain = [target for target in targets[name] if isinstance(target, torch.Tensor)]
        if not (total.isfinite() or (plain and all(target.isfinite().all() for target in plain))):
            read_as = f", read as {str(plain[0].dtype).removeprefix('torch.')}" if plain else ""
            raise ValueError(f"{source}: tensor {saved_names[name]} has NaN or infinite elements{read_as}")
    model.finish()


@contextlib.contextmanager
def readers(model: Transformer, stage: Stage | None) -> Iterator[int]:
    """The number of threads that read: READERS, or for codes on a CPU one a core, on which torch then has one thread.

    A code is made in many short steps, after each of which torch's threads would wait for each other. Each step makes a
    tensor, so malloc keeps their memory from here on.
    """
    threads = torch.get_num_threads()
    if stage or not model.coded:
        yield READERS
        return
    torch.set_num_threads(1)
    machine.keep_memory()
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def find_weights(model: Transformer, folder: str, wanted: Parts) -> tuple[dict[str, str], Files]:
    """Our names of the checkpoint's tensors and its own, and what is to be copied out of each file. Only headers are
    read. Errors are those of `find_slices` and `check_complete`."""
    paths, saved_names = checkpoint_files(folder), dict[str, str]()
    storage = Storage(paths, model.config.quantization)
    index = None if folder in paths else read_json(folder, INDEX, {}).get("weight_map")
    if index and os.path.basename(paths[0]) not in index.values():  # it is of older files
        index = None
    instead = stand_in(paths, model.config, storage)
    files = {path: find_slices(path, wanted, model, saved_names, storage, index, instead) for path in paths}
    check_complete(folder, wanted, saved_names)
    return saved_names, files


def all_sources(files: Files) -> dict[str, list[Stored]]:
    """The sources of all files' tensors, by our names."""
    return {name: sources for file in files.values() for name, sources in file.items()}


def check_complete(folder: str, wanted: Parts, saved_names: dict[str, str]) -> None:
    """Check that `saved_names` has each tensor that is wanted, or one that stands for it, and not both."""
    needed = {name for name, part in wanted.items() if part.needed}
    for name, part in wanted.items():
        if part.instead_of and name in saved_names:
            if twice := saved_names.keys() & set(part.instead_of):
                raise ValueError(
                    f"{folder} has tensor {saved_names[min(twice)]} twice: {saved_names[name]} has it, too"
                )
            needed -= set(part.instead_of)
    if missing := needed - saved_names.keys():
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        saved_as = [saved.removesuffix(name) for name, saved in saved_names.items() if saved.endswith(name)]
        prefix = max(saved_as, key=len, default="")
        prefix = "" if min(missing).endswith(HEADS) else prefix
        raise ValueError(f"{folder} has no tensor {prefix}{min(missing)}{others}")


def find_slices(
    path: str, wanted: Parts, model: Transformer, saved_names: dict[str, str], storage: Storage,
    index: dict[str, str] | None, instead: dict[str, str],
) -> dict[str, list[Stored]]:  # fmt: skip
    """The sources of a file's tensors, by name: views of the mapped file. Only its header is read. A ValueError names a
    damaged file, or a tensor that is surplus, misshapen, of another dtype, or in two files.

    Args:
        saved_names: our names and the checkpoint's of earlier files' tensors; this file's are added.
        index: names what counts; of the rest of a file only what is wanted is taken.
        instead: our names of tensors that are wanted under other names, see `stand_in`.
    """
    slices: dict[str, list[Stored]] = {}
    kinds = kinds_to_round(model, wanted)
    with opened(path) as file:
        for saved in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
            plain = storage.name_of(saved)
            if plain is None:
                continue
            name, unlisted = instead.get(plain) or our_name(plain, wanted), index and saved not in index
            if name is None and (unlisted or skipped(plain, model) or storage.is_zero_bias(file, saved)):
                continue
            if name in saved_names:
                raise ValueError(
                    f"{path} has a tensor {saved!r:.200}; the checkpoint has it as {saved_names[name]}, too"
                )
            if name is None:
                raise ValueError(f"{path} has a tensor {saved!r:.200} that {model.config.architecture} has not")
            try:
                whole = storage.open(file, saved)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            if not whole.shape:  # a scale
                whole = whole.view((1,))
            if name == f"{model.row.name('embed')}.weight" and model.row.image_rows:
                whole = whole[: -model.row.image_rows]
            part, either = wanted[name], model.row.routing and model.row.routing.stacked == "either"
            if isinstance(whole, Packed) and part.transposed and len(part.shape) == 2:
                whole = whole.mT  # a packed matrix is [outputs, inputs], however the family has it where it is plain
            if either and len(part.shape) == 3 and list(whole.shape) != list(part.shape):
                whole = whole.mT
            if (shape := list(whole.shape)) != list(part.shape):
                raise ValueError(f"{path}: tensor {saved} has shape {shape}; config.json asks for {list(part.shape)}")
            saved_names[name] = plain
            slices[name] = slices_of(whole, part, kinds.get(name, ""))
    return slices


def slices_of(whole: Stored, part: TensorPart, kind: str = "") -> list[Stored]:
    """The source of each piece, a view of a whole tensor of the checkpoint; if plain, it is rounded to a `kind`."""
    if kind and isinstance(whole, torch.Tensor):
        axis = [*range(whole.ndim - 2), -1, -2] if part.transposed else [*range(whole.ndim)]
        rows = rounded(whole.permute(axis), kind)  # of outputs
        whole = rows.mT if part.transposed else rows
    whole = whole.mT if part.transposed else whole
    whole = whole.view(part.view) if part.view else whole
    return [whole[piece.at] for piece in part.pieces]


def skipped(saved: str, model: Transformer) -> bool:
    """Whether a tensor that nobody wants may stand in a checkpoint."""
    saved = renewed(saved)
    row, sources = model.row, model.config.kv_sources
    if saved.removeprefix("model.").startswith(("v_head.", "value_head.")):
        warn_once("the checkpoint has a value head, which only training uses: it is left out")
        return True
    if model.tower and model.tower.lacks(saved):
        return False
    if is_of_another_half(saved, row) or saved.endswith(IGNORED + HEADS + model.unread):
        return True
    for prefix in PREFIXES:
        name = saved.removeprefix(prefix)
        if name.startswith(("mtp.", "mtp_", *(ENCODER_HEADS if row.encoder else ()))):  # so does all of this
            return True
        layer, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if layer == row.name("layer") and number.isdigit():
            i = int(number)
            ahead = i - model.config.num_layers - len(row.image_layers)  # it predicts tokens ahead (DeepSeek V3)
            if i in row.image_layers or 0 <= ahead < model.config.ahead:
                return True
            reads = i < len(sources) and 0 <= sources[i] != i  # the keys and values of another layer
            if reads and rest.startswith(tuple(f"{row.name(part)}." for part in ("k", "v", "k_norm"))):
                return True
    return False


def copy(pair: Pair) -> torch.Tensor:
    """Copy straight from the mapping; returns the sum of what was copied."""
    target, source = pair
    if isinstance(target, QuantizedWeight):
        assert isinstance(source, Packed)
        return fill(target, source)
    total = torch.zeros(())
    for to, of in pieces(target, source, PIECE_BYTES):
        total += to.copy_(of).sum()
    return total


def pieces(target: torch.Tensor, source: Stored, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Target and source row by row, in parts of at most `size` bytes of the target, or of one row; packed ones are
    unpacked."""
    size = size if isinstance(source, torch.Tensor) else min(size, PIECE_BYTES)  # unpacking takes several times as much
    rows = max(1, size // (math.prod(target.shape[1:]) * target.itemsize))
    for to, of in zip(target.split(rows), source.split(rows), strict=True):
        yield to, of if isinstance(of, torch.Tensor) else of.float()


class Stage:
    """A ring of buffers, pinned beside a GPU, through which threads copy tensors from the host to `device`."""

    def __init__(self, device: torch.device):
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # it may still be zeroing the targets
        self.free: queue.SimpleQueue[tuple[torch.Tensor, torch.Event | None]] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self.free.put((torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=cuda), None))

    def begin(self) -> None:
        """Choose the calling thread's stream, and so its GPU. Every thread does this before its first `move`."""
        if self.stream:
            torch.cuda.set_stream(self.stream)

    def move(self, pair: Pair) -> torch.Tensor:
        """Do what `copy` does. A copy to a GPU, and the sum, may still be on their way afterwards; see `wait`. Numbers
        are converted to the target's dtype in the buffer: a copy that converts would go through memory not pinned."""
        target, source = pair
        if isinstance(target, QuantizedWeight):
            return copy(pair)
        assert target.is_contiguous() and math.prod(target.shape[1:]) * target.itemsize <= BUFFER_BYTES
        total = torch.zeros((), device=target.device)
        for to, of in pieces(target, source, BUFFER_BYTES):
            buffer, emptied = self.free.get()
            try:
                if emptied:
                    emptied.synchronize()
                staged = buffer[: to.nbytes].view(to.dtype).view(to.shape)
                staged.copy_(of)
                total += to.copy_(staged, non_blocking=True).sum()
                if self.stream:
                    emptied = self.stream.record_event()
            finally:  # without its buffer the other threads could wait for ever
                self.free.put((buffer, emptied))
        return total

    def wait(self) -> None:
        """Return once all that was moved has arrived."""
        if self.stream:
            self.stream.synchronize()


def fill_dummy(model: Transformer, seed: int, wanted: Parts | None = None) -> None:
    """Make weights up: norms 1, biases 0, matrices from a normal distribution that keeps activations near 1.

    Every rank makes all of a matrix and takes its share, so that the model is the same for any number of ranks.
    """
    generator = torch.Generator(device=model.device).manual_seed(seed % 2**63)
    wanted = wanted or model.parameters()
    kinds = kinds_to_round(model, wanted)
    all_targets = settle_dummy(model, wanted)
    for name, part in wanted.items():
        if part.instead_of:  # the tensors that it stands for are made one by one
            continue
        targets = all_targets[name]  # none, where another rank or stage has it
        if len(part.shape) == 1 or "norm" in name:
            scales = name.endswith(("weight", "scale", "scalar"))
            is_scale = part.optional or name.endswith(f"{model.row.name('delta')}.norm.weight")
            less_one = model.row.unit_offset and not is_scale
            for piece in part.pieces:
                piece.target.fill_(1.0 if scales and not less_one else 0.0)
            continue
        plain = [target for target in targets if isinstance(target, torch.Tensor)]
        if len(plain) == 1 and plain[0].shape == part.shape:
            whole = plain[0]
        else:
            whole = torch.empty(part.shape, dtype=plain[0].dtype if plain else model.dtype, device=model.device)
        whole.normal_(0, part.shape[-2 if part.transposed else -1] ** -0.5, generator=generator)
        kind = "" if len(plain) == len(targets) else kinds.get(name, "")
        for target, source in zip(targets, slices_of(whole, part, kind), strict=True):
            if target is not whole:
                copy((target, source))
    model.finish()


def settle_dummy(model: Transformer, wanted: Parts) -> dict[str, list[Target]]:
    """Do what `settle` does, for weights that are made up."""
    sources, kinds = {}, kinds_to_round(model, wanted)
    for name, part in wanted.items():
        if not part.instead_of:
            sources[name] = slices_of(torch.empty(part.shape, device="meta"), part, kinds.get(name, ""))
    return settle(model, wanted, sources)
