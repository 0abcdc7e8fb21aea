"""What an adapter is to those who name it, and what its adapter_config.json says; nothing here needs torch.

    LoRARequest     which adapter a request runs with
    read_adapter    an adapter's folder, as PEFT saves it

An adapter has for some modules of the model (linear layers, by the checkpoint's names) two matrices, A [r, in] and B
[out, r]. There the model computes y = W x + scale B (A x).
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from config import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 256
# Ways to initialize A and B that leave the model's own weights as they are. Others (PiSSA, OLoRA, CorDA) change them.
INITIALIZED = (True, False, None, "gaussian", "eva", "orthogonal")
REFUSED: dict[str, tuple[Any, ...]] = {  # fields of the config that change the formula, and where they do not
    "use_dora": (False, None), "lora_bias": (False, None), "bias": ("none", None), "megatron_config": (None,),
    "trainable_token_indices": (None,), "layer_replication": (None,), "use_qalora": (False, None),
    "alora_invocation_tokens": (None,), "target_parameters": (None, []), "arrow_config": (None,),
    "use_bdlora": (None, False), "kasa_config": (None,), "monteclora_config": (None,),
    "modules_to_save": (None, []), "init_lora_weights": INITIALIZED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request runs with; the signature is vLLM's.

    Attributes:
        lora_name: what answers and metrics call it.
        lora_int_id: the caller's number of it, above 0.
        lora_path: its folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name is {self.lora_name!r}; it must be a text that is not empty")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id!r}; it must be a whole number of at least 1")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ValueError(f"lora_path is {self.lora_path!r}; it must be the path of a folder")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter's config says about its matrices.

    Attributes:
        rank, alpha: r and the scale's numerator, of modules that no pattern matches.
        rooted: the scale is alpha / sqrt(r), not alpha / r (rsLoRA, Kalajdzievski, 2023).
        ranks, alphas: other values for the modules whose names end with what a pattern matches.
        base: the model that it was made for, as its author called it.
    """

    rank: int
    alpha: float
    rooted: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    base: str = ""

    def rank_of(self, module: str) -> int:
        return matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rooted else rank)


def matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT looks for it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_adapter(folder: str, most: int = MOST_RANK) -> AdapterConfig:
    """The config of the adapter in `folder`, of rank `most` at most.

    Raises:
        ValueError: there is no such folder, it has no weights in safetensors, or what its config asks for is not done
            here. The message has one line.
    """
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        lacks = f"{folder} has no {CONFIG}" if os.path.isdir(folder) else f"there is no folder {folder}"
        raise ValueError(f"{lacks}; an adapter is a folder with {CONFIG} and {WEIGHTS}")
    fields = read_json(folder, CONFIG)
    place = os.path.join(folder, CONFIG)
    if (kind := fields.get("peft_type")) != "LORA":
        raise ValueError(f"{place}: peft_type is {kind!r:.200}; it must be 'LORA'")
    for name, allowed in REFUSED.items():
        if (value := fields.get(name)) not in allowed:
            raise ValueError(f"{place}: {name} is {value!r:.200}; it must be {allowed[0]!r} or left out")
    if not os.path.isfile(os.path.join(folder, WEIGHTS)):
        other = next((name for name in ("adapter_model.bin", "adapter_model.pt") if name in os.listdir(folder)), "")
        instead = f" but {other}, which may run any code when it is read: save it as safetensors" if other else ""
        raise ValueError(f"{folder} has no {WEIGHTS}{instead}")
    ranks, alphas = (fields.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    for name, given in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        check_patterns(f"{place}: {name}", given)
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    for name, value in [("r", rank), *(("rank_pattern", value) for value in ranks.values())]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{place}: {name} is {value!r:.200}; it must be a whole number of at least 1")
        if value > most:
            raise ValueError(
                f"{place}: {name} is {value!r:.200}; max_lora_rank is {most}, and at most {MOST_RANK} is possible"
            )
    for name, value in [("lora_alpha", alpha), *(("alpha_pattern", value) for value in alphas.values())]:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"{place}: {name} is {value!r:.200}; it must be a number")
    base = fields.get("base_model_name_or_path")
    return AdapterConfig(
        rank, alpha, bool(fields.get("use_rslora")), ranks, alphas, base if isinstance(base, str) else ""
    )


def check_patterns(where: str, given: Any) -> None:
    """A ValueError unless this is an object whose keys are regular expressions."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {given!r:.200}; it must be an object")
    for key in given:
        try:
            re.compile(key)
        except re.error as error:
            raise ValueError(f"{where} has the key {key!r:.200}, which is no regular expression: {error}") from None


def state_of(folder: str) -> str:
    """Says which adapter a folder has now; it is another one once its files are written anew.

    Raises:
        ValueError: there are no such files.
    """
    folder, found = os.path.realpath(folder), []
    for name in (CONFIG, WEIGHTS):
        try:
            file = os.stat(os.path.join(folder, name))
        except OSError as error:
            raise ValueError(f"lora_path is {folder!r:.300}; its {name} cannot be read: {error.strerror}") from None
        found.append(f"{file.st_mtime_ns}-{file.st_size}")
    return "\0".join((folder, *found))
