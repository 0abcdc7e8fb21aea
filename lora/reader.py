"""Reads the tensors of an adapter's file, by PEFT's names for them, and checks that they are for this model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from observe.logs import warn_once

TOKENS = ".token_adapter.trainable_tokens_delta"
KINDS = {  # what a tensor is, by the end of its name
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B",
    ".lora_B.bias": "shift", ".lora_magnitude_vector": "magnitude",
    TOKENS: "whole",  # some rows of it
    ".weight": "whole", ".bias": "bias",  # of a module that was trained whole
    ".base_layer.weight": "whole", ".base_layer.bias": "bias",  # of the model that A and B were trained beside
}  # fmt: skip
TENSOR = re.compile(rf"base_model\.model\.(.+?)({'|'.join(map(re.escape, KINDS))})")
RENAMED = {  # transformers' names of modules, and those in checkpoints
    ".mlp.": ".block_sparse_moe.", ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
}  # fmt: skip
PROMPT = "prompt_embeddings"
ROUNDED = 2**-8, 2**-24  # by how much a copy may differ that was rounded to 16 bits, relative and absolute
Module = dict[str, torch.Tensor]  # a module's tensors, by kind
Gently = Callable[[Iterable[Any]], Iterable[Any]]


class AdapterReader:
    """Reads adapters of a model.

    Args:
        parts: its weights, from `modules_of`.
        products: by their names, what may have adapters on this stage.
        source: the folder or file with the model's weights; "" if these are made up.
        gently: goes through items so that steps beside them are not held up.
    """

    def __init__(self, model: Transformer, parts: Parts, products: Mapping[str, Any], source: str, gently: Gently):
        self.model, self.parts, self.products, self.source, self.gently = model, parts, products, source, gently
        self.table, self.head = (f"{model.row.name(part)}.weight" for part in ("embed", "head"))
        # PEFT takes Llama 4's inputs for outputs, because the class does not say that it stores its experts transposed.
        self.swaps_experts = bool(model.row.routing and model.row.routing.weigh_inputs)

    def read(self, file: Any, path: str, config: AdapterConfig) -> dict[str, Module]:
        """The tensors of each module, by the name of its weight. A ValueError names one that is wrong.

        A [r, in], B [out, r], shift [out]    the scale is in B, and in the shift, its bias; experts have A [E, ..]
        factor [out]                          of DoRA, see `factors_of`
        ids [n], whole [n, in], bias [n]      rows of the table or the head that take the places of the model's
        """
        modules: dict[str, Module] = {}
        for saved in self.gently(file.keys()):
            what = f"{path}: tensor {saved!r:.200}"
            if not (match := TENSOR.fullmatch(saved)):
                raise ValueError(f"{what} has no name that PEFT gives to one of LoRA, and no others are taken")
            module, ending = match.groups()
            name = self.find(key := config.parameter_of(module) or "") or self.find(f"{(key := module)}.weight")
            if name is None and is_of_another_half(module, self.model.row):
                warn_once(f"{path}: tensors of a tower are left out, because only the text of this model is served")
                continue
            if name is None:
                raise ValueError(f"{what} is of a module that the model has not")
            tensor, kind, (rank, scale) = file.get_tensor(saved), KINDS[ending], config.shape_of(key)
            shapes = self.shapes(name, rank, config.fields, tensor.shape[:1])
            if ending not in shapes:
                may_have = ", ".join(shapes) or "no adapter"
                raise ValueError(f"{what} is of a module that cannot have it here; it may have {may_have}")
            dtype = torch.float32 if kind in ("shift", "magnitude") else self.model.dtype
            tensor = checked(what, tensor, shapes[ending], dtype, scale if kind in ("B", "shift") else 1.0)
            tensors = modules.setdefault(name, {})
            if len(self.parts[name].shape) == 3:
                kind, tensor = self.by_expert(kind, tensor, self.parts[name].shape[0])
            if ending == TOKENS:
                ids = token_ids(config.tokens_of(module), what, len(tensor), self.parts[name].shape[0])
                tensors["ids"], order = ids.sort()
                tensor = tensor[order]
            tensors[kind] = tensor
        self.settle(modules, path, config.fields)
        if not any(modules.values()):
            raise ValueError(f"{path} has no LoRA matrices")
        return modules

    def read_prompt(self, file: Any, path: str, count: int) -> torch.Tensor:
        """The embeddings [count, hidden] of virtual tokens; a ValueError if the file has others, or something else."""
        model = self.model
        if model.config.layer_input_size:  # PEFT gives these layers inputs in the prompt that later tokens do not get
            raise ValueError(f"{path}: {model.config.architecture} has inputs for each layer, so no prompt adapters")
        if [*file.keys()] != [PROMPT]:
            raise ValueError(f"{path} has the tensors {[*file.keys()]!r:.200}; a prompt adapter has {PROMPT!r} alone")
        shape = count, model.config.hidden_size
        embeddings = checked(f"{path}: tensor {PROMPT}", file.get_tensor(PROMPT), shape, model.dtype)
        return embeddings * model.embed_scale if model.row.scales_prompts else embeddings

    def find(self, name: str) -> str | None:
        """The name by which a weight is wanted, if it is."""
        names = [name, *(name.replace(theirs, saved) for theirs, saved in RENAMED.items())]
        return next(filter(None, (our_name(spelling, self.parts) for spelling in names)), None)

    def shapes(
        self, name: str, rank: int, fields: dict[str, Any], rows: Sequence[int] = ()
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that a module may have, by the ends of their names. `fields` are the config's; of
        the table and the head as many `rows` are taken as the file has, see `fit`."""
        part, products = self.parts[name], self.products.get(name, ())
        if not 2 <= len(part.shape) <= 3 or (part.pieces and not products):  # no pieces: of another stage
            return {}
        is_table, stacked = name == self.table, len(part.shape) == 3
        swapped = is_table or part.transposed != (stacked and self.swaps_experts)
        out, inputs = part.shape[-2:][:: -1 if swapped else 1]
        ranks = rank * part.shape[0] if stacked else rank
        form = ".lora_embedding_{}" if is_table else ".lora_{}.weight"
        shapes: dict[str, tuple[int, ...]] = {form.format("A"): (ranks, inputs), form.format("B"): (out, ranks)}
        if not (stacked or any(product.experts for product in products)):
            shapes |= {".lora_magnitude_vector": (out,)} if fields.get("use_dora") else {}
            shapes |= {".lora_B.bias": (out,)} if fields.get("lora_bias") and not is_table else {}
        if name in (self.table, self.head):
            shapes |= dict.fromkeys((TOKENS, ".weight", ".base_layer.weight"), (*rows, part.shape[1]))
            shapes |= dict.fromkeys((".bias", ".base_layer.bias"), (*rows,))
        return shapes

    def by_expert(self, kind: str, tensor: torch.Tensor, count: int) -> tuple[str, torch.Tensor]:
        """A [E, r, in] or B [E, out, r] of a stack of experts. PEFT has A [E r, in] and B [out, r E]."""
        stack = tensor.unflatten(0, (count, -1)) if kind == "A" else tensor.unflatten(1, (-1, count)).permute(2, 0, 1)
        return ({"A": "B", "B": "A"}[kind], stack.mT) if self.swaps_experts else (kind, stack)

    def settle(self, modules: dict[str, Module], path: str, fields: dict[str, Any]) -> None:
        """Drop copies of the model's own weights, check that each module is complete, and make of its tensors what
        `read` says."""
        stored, table = self.stored(modules), modules.get(self.table, {})
        for name, tensors in self.gently(modules.items()):
            bases = {"whole": stored.get(name), "bias": stored.get(bias_of(name))}
            copies = {kind: bases[kind] for kind in bases.keys() & tensors.keys()}
            if all(base is not None and equal(base, tensors[kind], *ROUNDED) for kind, base in copies.items()):
                for kind in copies:  # saved with the adapter, and not trained
                    del tensors[kind]
        if self.model.config.tie_word_embeddings and {"ids", "whole"} <= table.keys() and self.head in self.parts:
            tied, head = {kind: table[kind] for kind in ("ids", "whole")}, modules.get(self.head, {})
            modules[self.head] = head if "whole" in head else tied | head  # PEFT saves them once
        for name, tensors in self.gently(modules.items()):
            what, part = f"{path}: {name.removesuffix('.weight')}", self.parts[name]
            if "whole" in tensors and "ids" not in tensors:
                self.fit(what, tensors, part.shape[0], os.path.dirname(path))
            low_rank = {KINDS[ending] for ending in self.shapes(name, 1, fields)} - {"whole", "bias"}
            needed = low_rank if tensors.keys() & low_rank else set()
            if lacks := (needed | {"whole"} if "bias" in tensors else needed) - tensors.keys():
                raise ValueError(f"{what} has only {', '.join(sorted(tensors))}, and lacks {', '.join(sorted(lacks))}")
            if "magnitude" in tensors:
                if (weight := tensors.get("whole", stored.get(name))) is None:
                    raise ValueError(f"{what} has a magnitude of DoRA, and the model has no files with its weights")
                # A packed matrix is [out, in], also of a family that has it as [in, out] where it is plain.
                by_inputs = name == self.table or (part.transposed and not isinstance(weight, Packed))
                weight = weight[: part.shape[0]].mT if by_inputs else weight[: part.shape[0]]
                tensors["factor"] = factors_of(what, tensors.pop("magnitude"), weight, tensors["A"], tensors["B"])

    def stored(self, modules: dict[str, Module]) -> dict[str, Stored]:
        """The model's own weights that an adapter's tensors are compared with, as its files have them."""
        names = [name for name, tensors in modules.items() if tensors.keys() & {"magnitude", "whole"}]
        if not (self.source and names):
            return {}
        config, paths, pair = self.model.config, checkpoint_files(self.source), (self.table, self.head)
        tied = pair if config.tie_word_embeddings else ()
        wanted = [*names, *map(bias_of, names), *tied]
        tables = find_stored(paths, wanted, Storage(paths, config.quantization))
        weights = {name: stored for name, (_, stored) in tables.items()}
        for name in tied:  # the files may have one of the two
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
    if not 0 < len(set(ids)) == len(ids) == count:
        raise ValueError(f"{what} has {count} rows; trainable_token_indices is {ids!r:.200}, and must name each once")
    return torch.tensor(ids)


def checked(
    what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """A tensor times a scale, in this dtype; a ValueError that begins with `what` if it has another shape, no floats,
    or then NaN or infinities."""
    if tensor.shape != shape:
        raise ValueError(f"{what} has shape {list(tensor.shape)}; it must be {list(shape)}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{what} has dtype {tensor.dtype}; it must be one of {DTYPES}")
    tensor = (tensor if scale == 1 else tensor.float() * scale).to(dtype)
    if not tensor.isfinite().all():
        raise ValueError(f"{what} has NaN or infinite elements")
    return tensor
