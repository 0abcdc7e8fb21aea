"""Reads the adapter_config.json of an adapter's folder, as PEFT saves it; nothing here needs torch.

An adapter has for some modules of the model (linear layers and the table of embeddings, by the checkpoint's names) two
matrices, A [r, in] and B [out, r]. There the model computes y = W x + scale B (A x). Of an embedding, x has a 1 for the
token and zeros for all others. `lora/changes.py` has what else it may change.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

from config import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 256
MOST_KEYS, MOST_CHARS = 10_000, 300  # patterns of a config, and characters of one
SLOW = re.compile(r"\)[*+{]|([*+{].*){5}", re.DOTALL)  # a group that is repeated, or five repeats
Patterns = list[tuple[re.Pattern[str], Any]]  # each with its value, for the modules whose names it matches
# Ways to initialize A and B that leave the model's own weights as they are. Others (PiSSA, OLoRA, CorDA) change them.
INITIALIZED = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
CONVERT = (
    ", because others change the model's own weights, which the file has not: save the adapter by PEFT's "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it a plain one"
)
REFUSED: dict[str, tuple[Any, ...]] = {  # fields of the config that change the formula, and where they do not
    "bias": ("none", None), "megatron_config": (None,), "layer_replication": (None,), "use_qalora": (False, None),
    "alora_invocation_tokens": (None,), "arrow_config": (None,), "use_bdlora": (None, False), "kasa_config": (None,),
    "monteclora_config": (None,), "init_lora_weights": INITIALIZED,
}  # fmt: skip
TYPES: dict[str, tuple[type, ...]] = {  # of fields that are read beside the file's tensors
    "use_dora": (bool,), "lora_bias": (bool,), "target_parameters": (list,), "trainable_token_indices": (list, dict),
}  # fmt: skip


class AdapterConfig(NamedTuple):
    """What an adapter's config says."""

    # The rank r and the scale of a module: alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski, 2023). As in PEFT,
    # the first pattern that matches the module's name has its r, or its alpha.
    shape_of: Callable[[str], tuple[int, float]]
    fields: dict[str, Any]  # all that the file has

    def tokens_of(self, module: str) -> Any:
        """The tokens whose rows of a module are trained, by `trainable_token_indices`; None if it names no such."""
        tokens = self.fields.get("trainable_token_indices")
        pairs = tokens.items() if isinstance(tokens, dict) else [("", tokens)]
        return next((ids for name, ids in pairs if f".{module}".endswith(f".{name}" if name else "")), None)

    def parameter_of(self, module: str) -> str | None:
        """The parameter that A and B of a module change, if `target_parameters` names it: its weight, or a stack of
        experts' matrices. PEFT nests modules for the two stacks of a layer: `experts.base_layer` has A and B of the
        first, and `experts` those of the last."""
        experts = module.removesuffix(".base_layer")
        names = tuple(f".{name}" for name in self.fields.get("target_parameters") or ())
        stacks = [stack for stack in (f"{experts}.gate_up_proj", f"{experts}.down_proj") if stack.endswith(names)]
        if (weight := f"{module}.weight").endswith(names):
            return weight
        return stacks[-1 if module == experts else 0] if stacks else None


def vocabulary_size(folder: str) -> int:
    """One more than the highest token of a folder's tokenizer, or 0 where there is none."""
    tokenizer, config = (read_json(folder, f"tokenizer{end}.json", {}) for end in ("", "_config"))
    vocab = tokenizer.get("model", {}).get("vocab") or {}
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
    ids += [token["id"] for token in tokenizer.get("added_tokens") or ()]
    ids += [*read_json(folder, "added_tokens.json", {}).values(), *map(int, config.get("added_tokens_decoder") or ())]
    return 1 + max(ids, default=-1)


def read_adapter(folder: str, most: int = MOST_RANK) -> AdapterConfig:
    """Read the config of the adapter in `folder`, of at most rank `most`. A ValueError says in a line what is missing,
    or is not done here."""
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        lacks = f"{folder} has no {CONFIG}" if os.path.isdir(folder) else f"there is no folder {folder}"
        raise ValueError(f"{lacks}; an adapter is a folder with {CONFIG} and {WEIGHTS}")
    fields = read_json(folder, CONFIG)
    place = os.path.join(folder, CONFIG)
    if (kind := fields.get("peft_type")) != "LORA":
        raise ValueError(f"{place}: peft_type is {kind!r:.200}; it must be 'LORA'")
    for name, allowed in REFUSED.items():
        if (value := fields.get(name)) not in allowed:
            left_out = " or left out" if None in allowed else ""
            reason = CONVERT if allowed is INITIALIZED else ""
            raise ValueError(f"{place}: {name} is {value!r:.200}; it must be {allowed[0]!r}{left_out}{reason}")
    if not os.path.isfile(os.path.join(folder, WEIGHTS)):
        other = next((name for name in ("adapter_model.bin", "adapter_model.pt") if name in os.listdir(folder)), "")
        instead = f" but {other}, which may run any code when it is read: save it as safetensors" if other else ""
        raise ValueError(f"{folder} has no {WEIGHTS}{instead}")
    for name, types in TYPES.items():
        if not isinstance(value := fields.get(name), (*types, NoneType)):
            kinds = " or ".join(of.__name__ for of in types)
            raise ValueError(f"{place}: {name} is {value!r:.200}; it must be a {kinds}, or left out")
    ranks, alphas = (compiled(f"{place}: {name}", fields.get(name) or {}) for name in ("rank_pattern", "alpha_pattern"))
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    for name, value in [("r", rank), *(("rank_pattern", value) for _, value in ranks)]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{place}: {name} is {value!r:.200}; it must be a whole number of at least 1")
        if value > most:
            limits = f"max_lora_rank is {most}, and at most {MOST_RANK} is possible"
            raise ValueError(f"{place}: {name} is {value!r:.200}; {limits}")
    for name, value in [("lora_alpha", alpha), *(("alpha_pattern", value) for _, value in alphas)]:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"{place}: {name} is {value!r:.200}; it must be a number")

    def shape_of(module: str) -> tuple[int, float]:
        r = next((value for pattern, value in ranks if pattern.match(module)), rank)
        numerator = next((value for pattern, value in alphas if pattern.match(module)), alpha)
        return r, numerator / (math.sqrt(r) if fields.get("use_rslora") else r)

    return AdapterConfig(shape_of, fields)


def compiled(where: str, patterns: Any) -> Patterns:
    """The patterns of a config, which match the ends of modules' names; a ValueError about them begins with `where`."""
    if not isinstance(patterns, dict) or len(patterns) > MOST_KEYS:
        raise ValueError(f"{where} is {patterns!r:.200}; it must be an object of at most {MOST_KEYS} keys")
    result = []
    for key, value in patterns.items():
        if len(key) > MOST_CHARS or SLOW.search(key):
            limits = f"at most {MOST_CHARS} characters and 4 repeats, and no repeated group"
            raise ValueError(f"{where} has the key {key!r:.200}; it may have {limits}")
        try:
            result.append((re.compile(rf"(.*\.)?({key})$"), value))
        except (OverflowError, re.error) as error:
            raise ValueError(f"{where} has the key {key!r:.200}, which is no regular expression: {error}") from None
    return result


def state_of(folder: str) -> str:
    """The identity of the adapter that a folder has now: another one once its files are written anew, or replaced. A
    ValueError if there are none."""
    parts = [folder := os.path.realpath(folder)]
    for name in (CONFIG, WEIGHTS):
        try:
            file = os.stat(os.path.join(folder, name))
        except OSError as error:
            raise ValueError(f"lora_path is {folder!r:.300}; its {name} cannot be read: {error.strerror}") from None
        # tar and rsync can keep the time of writing (mtime), but nothing can keep ctime.
        parts.append(f"{file.st_ctime_ns}-{file.st_mtime_ns}-{file.st_size}")
    return "\0".join(parts)
