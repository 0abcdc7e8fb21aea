"""What the prompts of an engine that does not generate are turned into, as its options and the model's folder say.

    embed      a vector: the pooled hidden states, divided by their length
    classify   a probability for each label of a classification head over the pooled hidden states
    score      the same with one label

Such an engine samples nothing and keeps no keys and values. A prompt runs whole, in one step, and then it is done. A
folder of sentence-transformers is known by its `modules.json` and `1_Pooling/config.json`; its texts are cut to the
context, and may get a prompt in front.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import Any, NamedTuple

from config import EngineConfig, read_json
from model_config import ModelConfig
from models.config_fields import whole
from sampling_params import PoolingParams, SamplingParams

POOLINGS = ("last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len")  # see `ops.pool`
THEIRS = re.compile("^pooling_mode_|_?tokens?$")  # what sentence-transformers' names have more, as "lasttoken"
POOLING = os.path.join("1_Pooling", "config.json")
PROMPTS = "config_sentence_transformers.json"
MODULES = re.compile(
    r"Transformer: Pooling:(\w[\w.-]*)?( Dense:\w[\w.-]*)*( Normalize:(\w[\w.-]*)?)?"
)  # and their folders
USUAL = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "")]  # where no file says so
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # of Dense layers, as torch.nn has them
VECTOR = (None, "sentence_embedding")
DENSE_FIELDS = {"use_residual": (None, False), "module_input_name": VECTOR, "module_output_name": VECTOR}
DENSE_FILES = ("config.json", "model.safetensors")


class Dense(NamedTuple):
    """A layer after the pooling: an activation of a product with what its folder has."""

    folder: str  # below the model's
    inputs: int
    outputs: int
    bias: bool
    activation: str


def settle_task(config: EngineConfig, model_config: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Put the task and the pooling in the place of `auto`, with the options and the head that follow from them.

    What has been settled before stays as it is.

    Raises:
        ValueError: the model cannot do the task, or its folder asks for a pooling that Manta does not have.
    """
    folder, task, head = config.folder, config.task, model_config.head
    if task == "auto":
        task = "embed" if is_sentence_transformer(folder) else "generate"
        if head == "labels":
            task = "score" if len(model_config.labels) == 1 else "classify"
    if task == "generate":
        if head != "logits":
            raise ValueError(
                f"task is 'generate'; {model_config.architecture} has no head for it, so it must be 'embed'"
            )
        return dataclasses.replace(config, task=task), model_config
    if task in ("score", "classify") and head != "labels":
        raise ValueError(
            f"task is {task!r}; {model_config.architecture} has no classification head, so it must be 'embed'"
            + (" or 'generate'" if head == "logits" else "")
        )
    if task == "score" and len(model_config.labels) != 1:
        raise ValueError(f"task is 'score'; the model has {len(model_config.labels)} labels, so it must be 'classify'")
    if config.preemption_mode == "swap":
        raise ValueError(f"preemption_mode is 'swap'; with the task {task!r} nothing is preempted")
    pooling, normalize, longest = config.pooling_type, model_config.normalize, config.max_model_len
    size = model_config.hidden_size
    if task == "embed":
        head = "none"
        if normalize is None:
            normalize = read_modules(folder)[-1][0] == "Normalize"
        if pooling == "auto":
            pooling = pooling_of(folder)
        size = next((dense.outputs for dense in reversed(dense_layers(folder, size))), size)
        if longest is None:
            longest = trained_length(folder, model_config.max_position)
    config = dataclasses.replace(
        config, task=task, pooling_type="last" if pooling == "auto" else pooling, max_model_len=longest,
        enable_chunked_prefill=False, enable_prefix_caching=False, preemption_mode="recompute",
    )  # fmt: skip
    return config, dataclasses.replace(model_config, head=head, normalize=normalize, vector_size=size)


def is_sentence_transformer(folder: str) -> bool:
    """Whether sentence-transformers has saved this folder, or one laid out as such."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("modules.json", POOLING))


def read_modules(folder: str) -> list[tuple[str, str]]:
    """The modules of a folder of sentence-transformers, and their folders below it, as `modules.json` lists them.

    Raises:
        ValueError: the file is malformed, or has modules that Manta does not have.
    """
    path = os.path.join(folder, "modules.json")
    if not os.path.isfile(path):
        return USUAL
    try:
        with open(path, encoding="utf-8") as file:
            found = [(each["type"].rpartition(".")[2], each["path"]) for each in json.load(file)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no list of modules: {error!r}") from None
    if not MODULES.fullmatch(listed := " ".join(f"{kind}:{place}" for kind, place in found)):
        raise ValueError(f"{path} has {listed!r:.200}; Manta has Transformer, Pooling, Dense layers and Normalize")
    return found


def module_files(folder: str) -> list[str]:
    """The files of the modules that `modules.json` lists in folders of their own: settings, and weights of a few MB."""
    listed = read_modules(folder) if os.path.isfile(os.path.join(folder, "modules.json")) else ()
    return [f"{place}/{name}" for _, place in listed if place for name in DENSE_FILES]


def pooling_of(folder: str) -> Any:
    """The `pooling_type` that a folder's pooling asks for; the last token's where nothing says so.

    Raises:
        ValueError: it is another one than Manta has, or several, or it leaves out the tokens of a prompt.
    """
    name = os.path.join(read_modules(folder)[1][1], "config.json")
    if not (raw := read_json(folder, name, {})):
        return "last"
    modes = raw.get("pooling_mode") or [key for key in raw if key.startswith("pooling_mode_") and raw[key]] or "mean"
    modes = [THEIRS.sub("", str(mode)) for mode in (modes if isinstance(modes, list) else [modes])]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        asked, known = ", ".join(modes), ", ".join(POOLINGS)
        raise ValueError(f"{name} asks for the pooling {asked:.80}; Manta has {known}: pooling_type can choose one")
    if raw.get("include_prompt") is False and any(read_prompts(folder)[0].values()):
        raise ValueError(f"{name} has include_prompt false, which leaves out prompts; Manta pools all tokens")
    return modes[0]


def dense_layers(folder: str, size: int) -> list[Dense]:
    """The layers that make an embedding of pooled hidden states of this `size`.

    Raises:
        ValueError: a field of theirs is out of range, or of another kind than Manta has.
    """
    found = []
    for place in [place for kind, place in read_modules(folder) if kind == "Dense"]:
        raw = read_json(folder, os.path.join(place, "config.json"))
        bias, activation = raw.get("bias", True), str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
        said = raw | {"bias": bias, "activation_function": activation}
        known = {"in_features": (size,), "bias": (True, False), "activation_function": ACTIVATIONS}
        for field, allowed in (known | DENSE_FIELDS).items():
            if (value := said.get(field)) not in allowed:
                raise ValueError(f"{place}: {field} is {value!r:.80}; Manta has {' or '.join(map(str, allowed))}")
        outputs = whole("out_features", raw.get("out_features"), 1, 2**17)
        found.append(Dense(place, size, outputs, bias, activation))
        size = outputs
    return found


def read_prompts(folder: str) -> tuple[dict[str, str], str | None]:
    """The texts that go before texts to embed, by name, and the name of the one that does by default.

    Raises:
        ValueError: the file is malformed, or the default is none of them.
    """
    raw = read_json(folder, PROMPTS, {})
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{PROMPTS}: prompts is {prompts!r:.80}; it must be an object of texts")
    if default is not None and default not in prompts:
        raise ValueError(f"{PROMPTS}: default_prompt_name is {default!r:.80}; it must be one of {', '.join(prompts)}")
    return {key: text or "" for key, text in prompts.items()}, default


def trained_length(folder: str, most: int) -> int | None:
    """The tokens of a prompt that a folder of sentence-transformers allows, at most `most`; None if it does not say.

    Version 6 of the library saves it with the tokenizer, earlier ones in a file of their own.

    Raises:
        ValueError: what it says is no number of tokens.
    """
    files = {"sentence_bert_config.json": "max_seq_length"}
    if is_sentence_transformer(folder):
        files["tokenizer_config.json"] = "model_max_length"  # 1e30 where nobody has said it
    for name, key in files.items():
        if (length := read_json(folder, name, {}).get(key)) is not None:
            if isinstance(length, bool) or not isinstance(length, int | float) or not length >= 2 or length % 1:
                raise ValueError(f"{name}: {key} is {length!r:.80}; it must be a whole number from 2")
            return int(min(length, most))
    return None


def check_pooling(
    pooling: PoolingParams | None, params: SamplingParams, config: EngineConfig, model_config: ModelConfig
) -> None:
    """Check that a request is of the kind that an engine with these settled options runs; without `pooling` it asks for
    an answer, as `params` say.

    Raises:
        ValueError: it is not, or its pooling parameters are out of range.
    """
    if pooling is None:
        if config.makes_vectors:
            raise ValueError(f"the request asks for generated text; the task of this engine is {config.task!r}")
        return
    if not config.makes_vectors:
        raise ValueError(f"the request asks for what an embedder or a classifier gives; the task is {config.task!r}")
    if params != SamplingParams():
        raise ValueError(f"the request has sampling parameters; with the task {config.task!r} nothing is sampled")
    if pooling.dimensions is None:
        return
    if config.task != "embed":
        raise ValueError(f"dimensions is {pooling.dimensions}; with the task {config.task!r} it must be left out")
    if not 1 <= pooling.dimensions <= model_config.vector_size:
        allowed = f"a whole number from 1 to {model_config.vector_size}"
        raise ValueError(f"dimensions is {pooling.dimensions}; it must be {allowed}")


def task_facts(config: EngineConfig, model_config: ModelConfig) -> dict[str, Any]:
    """What clients want to know of an engine's task."""
    embeds = config.task == "embed"
    prompts, default = read_prompts(config.folder) if embeds else ({}, None)
    return {
        "task": config.task,
        "pooling_type": config.pooling_type,
        "normalize": model_config.normalize,
        "num_labels": len(model_config.labels),
        "labels": model_config.labels,
        "vector_size": model_config.vector_size,
        "prompts": prompts,
        "default_prompt_name": default,
        "cuts_texts": embeds and is_sentence_transformer(config.folder),
    }
