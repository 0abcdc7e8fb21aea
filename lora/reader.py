"""Reads the tensors of an adapter's file, by PEFT's names for them, and checks that they are for this model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from checkpoints.dequantize import DTYPES, Packed, Stored
from checkpoints.hub import checkpoint_files
from checkpoints.storage import Storage
from checkpoints.tied_head import equal, find_stored
from lora.adapter import AdapterConfig, vocabulary_size
from lora.changes import factors_of
from model import Transformer
from models.families import is_of_another_half, our_name
from models.shares import Parts
from observe.logs import logger

KINDS = {  # what a tensor is, by the end of its name
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B",
    ".lora_B.bias": "shift", ".lora_magnitude_vector": "magnitude",
    ".token_adapter.trainable_tokens_delta": "tokens",  # rows that take the places of the model's
    ".weight": "whole", ".bias": "bias",  # of a module that was trained whole
    ".base_layer.weight": "base", ".base_layer.bias": "base bias",  # copies of the model's own, beside A and B
}  # fmt: skip
WHOLE = ("tokens", "whole", "bias", "base", "base bias")  # of the embeddings and the head alone
TENSOR = re.compile(rf"base_model\.model\.(.+?)({'|'.join(map(re.escape, KINDS))})")
RENAMED = {  # transformers' names of modules, and those in checkpoints
    ".mlp.": ".block_sparse_moe.", ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
}  # fmt: skip
ROUNDED = 2**-8, 2**-24  # by how much a copy may differ that was rounded to 16 bits, relative and absolute
Module = dict[str, torch.Tensor]  # a module's tensors, by kind


class AdapterReader:
    """Reads adapters of a model.

    Args:
        wanted: its weights, from `modules_of`.
        covered: by their names, the products that may have adapters on this stage.
        source: the folder or file with the model's weights; "" if these are made up.
    """

    def __init__(self, model: Transformer, wanted: Parts, covered: Mapping[str, Any], source: str):
        self.model, self.config, self.wanted, self.covered, self.source = model, model.config, wanted, covered, source
        self.table, self.head = (f"{model.row.name(part)}.weight" for part in ("embed", "head"))
        # PEFT takes Llama 4's inputs for outputs, because the class does not say that it stores its experts transposed.
        self.turned = bool(model.row.routing and model.row.routing.weigh_inputs)

    def read(self, file: Any, path: str, config: AdapterConfig) -> dict[str, Module]:
        """The tensors of each module, by the name of its weight. A ValueError names one that is wrong.

        A [r, in], B [out, r], shift [out]    the scale is in B, and in the shift, its bias; experts have A [E, ..]
        factor [out]                          of DoRA, see `factors_of`
        ids [n], whole [n, in], bias [n]      rows of the table or the head that take the places of the model's
        """
        modules: dict[str, Module] = {}
        left_out = []
        for saved in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
            what = f"{path}: tensor {saved!r:.200}"
            if not (match := TENSOR.fullmatch(saved)):
                raise ValueError(f"{what} has no name that PEFT gives to one of LoRA, and no others are taken")
            module, kind = match[1], KINDS[match[2]]
            name = self.find(key := config.parameter_of(module) or "") or self.find(f"{(key := module)}.weight")
            of_tower = self.model.tower is not None and name in self.model.tower.targets
            if (name is None or of_tower) and is_of_another_half(module, self.model.row):
                left_out.append(saved)
                continue
            if name is None:
                raise ValueError(f"{what} is of a module that the model has not")
            tensor, (rank, scale) = file.get_tensor(saved), config.shape_of(key)
            embedding = "embedding" in match[2]
            if (shape := self.shape(name, kind, embedding, rank, tensor)) is None:
                hint = "; only the embeddings and the head may be trained whole" if kind in WHOLE else ""
                raise ValueError(f"{what} is of a module that cannot have an adapter here{hint}")
            place = f"{path}: tensor {saved}"
            if list(tensor.shape) != shape:
                raise ValueError(f"{place} has shape {list(tensor.shape)}; it must be {shape}")
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{place} has dtype {tensor.dtype}; it must be one of {DTYPES}")
            tensor = tensor.float() * scale if kind in ("B", "shift") else tensor
            tensor = tensor.to(torch.float32 if kind == "magnitude" else self.model.dtype)
            if not tensor.isfinite().all():
                raise ValueError(f"{place} has NaN or infinite elements")
            if len(self.wanted[name].shape) == 3:
                kind, tensor = self.by_expert(kind, tensor, self.wanted[name].shape[0])
            modules.setdefault(name, {})[kind] = tensor
            if kind == "tokens":
                modules[name]["ids"] = token_ids(
                    config.tokens_of(module), what, len(tensor), self.wanted[name].shape[0]
                )
        if left_out:
            count = f"{len(left_out)} of its tensors, such as {left_out[0]!r:.200}"
            if self.config.vision:
                hint = """take them out, or serve the text alone (--hf-overrides '{"vision_config": null}')"""
                raise ValueError(f"{path}: {count}, change how the model sees; {hint}")
            logger.warning(f"{path}: {count}, are left out, because only text is served")
        self.settle(modules, path, config)
        return modules

    def find(self, name: str) -> str | None:
        """The name by which a weight is wanted, if it is."""
        names = [name, *(name.replace(theirs, saved) for theirs, saved in RENAMED.items())]
        return next(filter(None, (our_name(spelling, self.wanted) for spelling in names)), None)

    def shape(self, name: str, kind: str, embedding: bool, rank: int, tensor: torch.Tensor) -> list[int] | None:
        """The shape that a tensor must have; None if its module cannot have it. An `embedding` is named as one."""
        part, is_table = self.wanted[name], name == self.table
        stacked, size = len(part.shape) == 3, part.shape[-1]
        if not 2 <= len(part.shape) <= 3 or (part.pieces and name not in self.covered):  # no pieces: of another stage
            return None
        if kind in WHOLE:  # a table of other tokens is looked at later
            return [*tensor.shape[:1], size][: 1 if "bias" in kind else 2] if name in (self.table, self.head) else None
        transposed = part.transposed != (stacked and self.turned)
        out, inputs = part.shape[-2:][:: -1 if transposed or is_table else 1]
        if kind in ("A", "B"):
            count = part.shape[0] if stacked else 1
            return None if embedding != is_table else [count * rank, inputs] if kind == "A" else [out, count * rank]
        of_experts = any(product.experts for product in self.covered.get(name, ()))
        return None if of_experts or (is_table and kind == "shift") else [out]

    def by_expert(self, kind: str, tensor: torch.Tensor, count: int) -> tuple[str, torch.Tensor]:
        """A [E, r, in] or B [E, out, r] of a stack of experts. PEFT has A [E r, in] and B [out, r E]."""
        stack = tensor.unflatten(0, (count, -1)) if kind == "A" else tensor.unflatten(1, (-1, count)).permute(2, 0, 1)
        return ({"A": "B", "B": "A"}[kind], stack.mT) if self.turned else (kind, stack)

    def settle(self, modules: dict[str, Module], path: str, config: AdapterConfig) -> None:
        """Drop copies of the model's own weights, and make of the other tensors what `read` says."""
        table = modules.get(self.table, {})
        if self.config.tie_word_embeddings and "tokens" in table and self.head in self.wanted:
            tied = {kind: table[kind] for kind in ("tokens", "ids")}  # PEFT saves them once
            modules[self.head] = tied | modules.get(self.head, {})
        stored = self.stored(modules)
        for name, tensors in modules.items():
            what, part = f"{path}: {name.removesuffix('.weight')}", self.wanted[name]
            for copy, kind, theirs in (("base", "whole", name), ("base bias", "bias", bias_of(name))):
                tensor = tensors.pop(copy, None)
                if tensor is not None and theirs in stored and not equal(stored[theirs], tensor, *ROUNDED):
                    tensors[kind] = tensor
            if name in stored and {*tensors} == {"whole"} and equal(stored[name], tensors["whole"], *ROUNDED):
                del tensors["whole"]  # saved with the adapter, and not trained
            if "tokens" in tensors:
                tensors["ids"], order = tensors["ids"].sort()
                tensors["whole"] = tensors.pop("tokens")[order]
            elif "whole" in tensors:
                self.fit(what, tensors, part.shape[0], os.path.dirname(path))
            check_complete(what, tensors, config.fields, len(part.shape) == 2 and name != self.table)
            if "magnitude" in tensors:
                if (whole := tensors.get("whole", stored.get(name))) is None:
                    raise ValueError(f"{what} has a magnitude of DoRA, and the model has no files with its weights")
                # A packed matrix is [out, in], also of a family that has it as [in, out] where it is plain.
                turned, whole = part.transposed and not isinstance(whole, Packed), whole[: part.shape[0]]
                whole = whole.mT if turned or name == self.table else whole
                tensors["factor"] = factors_of(what, tensors.pop("magnitude"), whole, tensors["A"], tensors["B"])
        for name in [name for name, tensors in modules.items() if not tensors]:
            del modules[name]
        if not modules:
            raise ValueError(f"{path} has no LoRA matrices")

    def stored(self, modules: dict[str, Module]) -> dict[str, Stored]:
        """The model's own weights that an adapter's tensors are compared with, as its files have them."""
        compared = {"base", "base bias", "magnitude", "whole"}
        names = [name for name, tensors in modules.items() if tensors.keys() & compared]
        if not (self.source and names):
            return {}
        paths, pair, tied = checkpoint_files(self.source), (self.table, self.head), self.config.tie_word_embeddings
        wanted = [*names, *map(bias_of, names), *(pair if tied else ())]
        tables = find_stored(paths, wanted, Storage(paths, self.config.quantization))
        weights = {name: stored for name, (_, stored) in tables.items()}
        for name in pair if tied else ():  # the files may have one of the two
            weights.setdefault(name, weights[self.table if self.table in weights else self.head])
        return weights

    def fit(self, what: str, tensors: Module, most: int, folder: str) -> None:
        """Cut a table of other tokens than the model's `most` to those that both have. A ValueError if others are no
        padding, by the adapter's tokenizer, or for fewer rows the model's."""
        count = len(tensors["whole"])
        tokens = most if count == most else vocabulary_size(folder)
        if not tokens and count < most and os.path.isdir(self.source):
            tokens = vocabulary_size(self.source)
        if not 0 < tokens <= min(count, most):
            has = f"{tokens} tokens" if tokens else "no tokenizer that says which are padding"
            raise ValueError(
                f"{what} has {count} rows, the model has {most}, and there is {has}; an adapter cannot add tokens: "
                "merge it into a model of its own (merge_and_unload of peft)"
            )
        tensors["ids"] = torch.arange(min(count, most))
        tensors |= {kind: tensors[kind][:most] for kind in ("whole", "bias") if kind in tensors}


def bias_of(name: str) -> str:
    """The name of the bias beside a weight."""
    return f"{name.removesuffix('weight')}bias"


def token_ids(ids: Any, what: str, count: int, most: int) -> torch.Tensor:
    """The tokens of `count` rows [n] int64; a ValueError if `ids`, of the config, are no such."""
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < most for i in ids):
        raise ValueError(f"{what} has trainable_token_indices {ids!r:.200}; they must be from 0 to {most - 1}")
    if not len(set(ids)) == len(ids) == count:
        raise ValueError(f"{what} has {count} rows; trainable_token_indices is {ids!r:.200}, and must name each once")
    return torch.tensor(ids)


def check_complete(what: str, tensors: Module, fields: dict[str, Any], linear: bool) -> None:
    """Check that a module has all that goes together; `linear`: it is no table of embeddings, and no experts."""
    extra = {"magnitude": fields.get("use_dora"), "shift": fields.get("lora_bias") and linear}
    low_rank = {"A", "B", *(kind for kind, wanted in extra.items() if wanted)}
    needed = low_rank if tensors.keys() & {"A", "B", "shift", "magnitude"} else set()
    if lacks := (needed | {"whole"} if "bias" in tensors else needed) - tensors.keys():
        raise ValueError(f"{what} has only {', '.join(sorted(tensors))}, and lacks {', '.join(sorted(lacks))}")
