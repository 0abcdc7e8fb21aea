"""The command `quantize`: writes a plain checkpoint's matrices in few bits, and tells what that costs in perplexity.

    python server.py quantize MODEL OUT --scheme w4a16|w8a16|w8a8|fp8

Without a calibration text each number goes to the nearest code, matrix by matrix, from the files of MODEL to those of
OUT. With one, `calibrate` chooses the codes by GPTQ. Perplexity comes from an engine in this process, of MODEL and then
of OUT.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch

from checkpoints import compressed
from checkpoints.dequantize import CodedRows
from checkpoints.hub import checkpoint_files, find_model
from checkpoints.rounding import codes_of, nearest_of
from checkpoints.storage import tensors_in
from checkpoints.tied_head import settle_head
from config import DEMO, EngineConfig, check_fields, option
from device.calibrate import calibrate, run_chunks
from device.coded import kinds_to_round
from device.dry_run import dry_model
from device.startup import pick_ops
from model_config import ModelConfig
from models.families import our_name
from observe.logs import set_up
from parallel import Pipeline
from sampling_params import SamplingParams
from tokenizer import Tokenizer

CHUNK = 512  # tokens of a text that the model sees together
CALIBRATED, MEASURED = 64, 32  # chunks, at most
HELD_OUT = 5  # one chunk in so many of a calibration text is for the perplexity, if no other text is given
GROUP_SIZES = (-1, 32, 64, 128)  # those that vLLM's kernels have
TEXT = os.path.join(DEMO, "exam.txt")
ABOUT = """Write a checkpoint whose matrices have few bits, as compressed-tensors, which vLLM reads, too.

  w4a16  4 bits, a scale for a group of inputs       w8a8  8 bits, a scale for an output
  w8a16  8 bits, a scale for an output               fp8   e4m3, a scale for an output

With w8a8 and fp8 inputs of products are rounded, too; docs/quantization.md says where. Perplexity is measured before
and after."""

Chunks = list[list[int]]


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of the command line; a ValueError if two do not go together, or one is out of range."""

    GROUPS: ClassVar[dict[str, str]] = {"quantization": "model"}
    model: str = option("", "a folder with safetensors, or a model's id on the hub")
    out: str = option("", "")  # the folder to write, which must be new or empty
    scheme: Literal["w4a16", "w8a16", "w8a8", "fp8"] = option(None, "how the matrices are stored")
    group_size: int | None = option(
        None, "of w4a16: inputs that share a scale, 32, 64 or 128, or -1 for all (default: 128)"
    )
    calibration: str | None = option(None, "file with a text like those that the model is for; rounds by GPTQ")
    text: str | None = option(
        None, "file whose perplexity is measured (default: a fifth of the calibration text, or demo/exam.txt)"
    )
    overwrite: bool = option(False, "take the place of a model that is in OUT")

    def __post_init__(self) -> None:
        check_fields(self)
        size = self.group_size
        if size is not None and self.scheme != "w4a16":
            raise ValueError(f"group_size is {size}; with the scheme {self.scheme} it must be left out")
        if size is not None and size not in GROUP_SIZES:
            raise ValueError(f"group_size is {size}; it must be one of {', '.join(map(str, GROUP_SIZES))}")


def quantize(options: QuantizeOptions) -> list[str]:
    """Do what the options say; returns the lines to print."""
    set_up("info", "text")
    begun, source = time.monotonic(), EngineConfig(options.model)
    lesson = read_text(options.calibration) if options.calibration else ""
    exam = read_text(options.text or TEXT) if options.text or not lesson else ""
    target, here = Path(options.out).resolve(), Path(options.model) if os.path.isdir(options.model) else None
    compressed.check_target(target, here, options.overwrite)  # before anything is downloaded
    source = find_model(source)
    compressed.check_target(target, Path(source.folder), options.overwrite)
    job = QuantizeJob(options, source)
    learning, measured = job.chunks(lesson, exam)
    before = perplexity(source, measured)
    learned: dict[str, CodedRows] = {}
    if learning:
        learned = calibrate(source, learning, job.recipe.kind, job.group, job.dtype)
    size, new_size = job.write(target, learned)
    after = perplexity(EngineConfig(str(target)), measured)
    tokens = sum(map(len, measured))
    method = f"by GPTQ with {sum(map(len, learning)):,} tokens" if learned else "to the nearest"
    left = len(job.rounds) - len(learned)
    also = f", but {left} (experts, and what no token reached) to the nearest" if learned and left else ""
    return [
        f"{target}: {len(job.rounds)} matrices in {options.scheme}, rounded {method}{also}",
        f"  perplexity  {before:.4f} before, {after:.4f} after, of {tokens:,} tokens",
        f"  size        {size / 1e6:,.1f} MB before, {new_size / 1e6:,.1f} MB after",
        f"  seconds     {time.monotonic() - begun:.1f}",
    ]


def read_text(path: str) -> str:
    """The text of a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None
    if not text.strip():
        raise ValueError(f"{path} is empty; it must hold a text")
    return text


class QuantizeJob:
    """A checkpoint that is to be quantized: what its headers say of each tensor. A ValueError says why it cannot be."""

    def __init__(self, options: QuantizeOptions, source: EngineConfig):
        self.source, name = source, source.model
        self.recipe = compressed.RECIPES[options.scheme]
        self.group = (options.group_size or 128) if options.scheme == "w4a16" else -1  # inputs; -1: all
        self.paths = checkpoint_files(source.folder)
        config = ModelConfig.from_folder(source.folder)
        if config.quantization or any(path.endswith(".gguf") for path in self.paths):
            raise ValueError(f"{name} has its weights in few bits already; quantize takes a plain checkpoint")
        if config.head != "logits":
            raise ValueError(f"{name} is {config.architecture}, which predicts no tokens; quantize takes one that does")
        self.config = settle_head(source.folder, config)
        self.dtype: torch.dtype = getattr(torch, config.dtype)  # of the scales, as vLLM keeps them
        self.rounds: dict[str, str] = {}  # the names of the matrices that are rounded, and our names of them
        self.ignore = {"lm_head"}  # the modules that stay plain
        ops = pick_ops("reference", "cpu")
        model = dry_model(source, self.config, ops, self.dtype, 2, Pipeline(), self.recipe.kind)
        wanted = model.parameters()
        rounded = kinds_to_round(model, wanted, head=False)
        for file, saved in tensors_in(self.paths):
            shape, module = file.get_slice(saved).get_shape(), saved.removesuffix(".weight")
            part = our_name(saved, wanted)
            if part in rounded:
                if len(shape) != 2 or wanted[part].transposed or module == saved:
                    raise ValueError(
                        f"tensor {saved} of {self.config.architecture} has shape {shape}; compressed-tensors has a "
                        "matrix [outputs, inputs] for each module and each expert, and so this is refused"
                    )
                if self.group > 0 and shape[1] % self.group:
                    raise ValueError(
                        f"group_size is {self.group}; it must divide the {shape[1]} inputs of {saved}, or be -1"
                    )
                self.rounds[saved] = part
            elif len(shape) > 1 and module != saved and part != f"{self.config.row.name('embed')}.weight":
                self.ignore.add(module)

    def chunks(self, lesson: str, exam: str) -> tuple[Chunks, Chunks]:
        """Chunks of tokens: to calibrate with, and to measure. Without an exam a fifth of the lesson is kept for it."""
        tokenizer, size = Tokenizer(self.source.folder), min(CHUNK, self.config.max_position - 1)
        first = tokenizer.encode("")  # what begins each text

        def cut(text: str) -> Chunks:
            ids, width = tokenizer.encode(text, add_special_tokens=False), size - len(first)
            pieces = (ids[i : i + width] for i in range(0, len(ids), width))
            return [first + piece for piece in pieces if len(piece) > 1]

        learned, measured = cut(lesson), cut(exam)
        if not exam:
            count = len(learned) - len(learned) // HELD_OUT
            learned, measured = learned[:count], learned[count:]
        if not measured or (lesson and not learned):
            raise ValueError(
                f"the texts have {len(learned)} chunks of {size} tokens to calibrate with, and {len(measured)} to "
                "measure; there must be at least one of each"
            )
        return spread(learned, CALIBRATED), spread(measured, MEASURED)

    def write(self, target: Path, learned: dict[str, CodedRows]) -> tuple[int, int]:
        """Write the folder; returns the bytes of the weights' files before and after. `learned` has, by our names,
        codes and scales that are chosen already; other matrices get the nearest ones."""
        source, recipe = Path(self.source.folder), self.recipe
        with compressed.new_folder(target) as folder:
            shards = compressed.Shards(folder)
            for file, saved in tensors_in(self.paths):
                tensor = file.get_tensor(saved)
                if saved not in self.rounds:
                    shards.add({saved: tensor})
                    continue
                if not (rows := learned.get(self.rounds[saved])):
                    group = self.group if self.group > 0 else tensor.shape[1]
                    values, scales = nearest_of(tensor.float(), recipe.kind, group, self.dtype)
                    rows = CodedRows(codes_of(values, recipe.kind), scales.to(self.dtype))
                shards.add(compressed.tensors_of(saved, rows.codes, rows.scales, recipe))
            shards.finish()
            compressed.copy_beside(source, folder)
            compressed.write_config(source, folder, compressed.config_of(recipe, self.group, self.ignore))
            sizes = [sum(map(os.path.getsize, paths)) for paths in (self.paths, folder.glob("*.safetensors"))]
        return sizes[0], sizes[1]


def spread(chunks: Chunks, most: int) -> Chunks:
    """At most so many of the chunks, from all parts of a text."""
    count = min(most, len(chunks))
    return [chunks[i * len(chunks) // count] for i in range(count)]


def perplexity(config: EngineConfig, chunks: Chunks) -> float:
    """exp of the mean of -log p(token | those before it in its chunk), over all but each chunk's first token."""
    params, scores = SamplingParams(max_tokens=0, prompt_logprobs=0), list[float]()
    for output in run_chunks(replace(config, max_num_seqs=MEASURED), chunks, params):
        assert not output.error, output.error
        scores += [scored.sampled for scored in output.prompt_logprobs or ()]
    assert len(scores) == sum(len(chunk) - 1 for chunk in chunks)
    return math.exp(-sum(scores) / len(scores))
