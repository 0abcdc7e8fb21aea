"""What the prompts of an engine that does not generate are turned into, as its options and the model's folder say.

    embed      a vector: the pooled hidden states, divided by their length
    classify   a probability for each label of a classification head over the pooled hidden states
    score      the same with one label

Such an engine samples nothing and keeps no keys and values. A prompt runs whole, in one step, and then it is done. A
folder of sentence-transformers is known by its `modules.json` and `1_Pooling/config.json`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from config import EngineConfig, read_json
from model_config import ModelConfig
from sampling_params import PoolingParams, SamplingParams

POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # sentence-transformers' names and ours
OLD_POOLINGS = {  # how 1_Pooling/config.json spelled them until sentence-transformers 5
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip
POOLING = os.path.join("1_Pooling", "config.json")
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, in this order; the last may be missing


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
    if task == "embed":
        head = "none"
        if normalize is None:
            normalize = normalizes(folder)
        if pooling == "auto":
            pooling = pooling_of(folder)
        if longest is None:
            longest = trained_length(folder, model_config.max_position)
    config = dataclasses.replace(
        config, task=task, pooling_type="last" if pooling == "auto" else pooling, max_model_len=longest,
        enable_chunked_prefill=False, enable_prefix_caching=False, preemption_mode="recompute",
    )  # fmt: skip
    return config, dataclasses.replace(model_config, head=head, normalize=normalize)


def is_sentence_transformer(folder: str) -> bool:
    """Whether sentence-transformers has saved this folder, or one laid out as such."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("modules.json", POOLING))


def pooling_of(folder: str) -> Any:
    """The `pooling_type` that a folder's `1_Pooling/config.json` asks for; the last token's where there is none.

    Raises:
        ValueError: it is another one than Manta has, or several.
    """
    if not (raw := read_json(folder, POOLING, {})):
        return "last"
    modes = raw.get("pooling_mode") or [mode for key, mode in OLD_POOLINGS.items() if raw.get(key)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        asked = ", ".join(map(str, modes))
        raise ValueError(
            f"{POOLING} asks for the pooling {asked:.80}; Manta has {', '.join(POOLINGS)}: pooling_type can choose one"
        )
    return POOLINGS[modes[0]]


def normalizes(folder: str) -> bool:
    """Whether an embedding is divided by its length: as `modules.json` says, or else yes.

    Raises:
        ValueError: the file is malformed, or has a module that Manta does not have.
    """
    path = os.path.join(folder, "modules.json")
    if not os.path.isfile(path):
        return True
    try:
        with open(path, encoding="utf-8") as file:
            kinds = [module["type"].rpartition(".")[2] for module in json.load(file)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no list of modules: {error!r}") from None
    if unknown := [kind for kind in kinds if kind not in MODULES]:
        raise ValueError(f"{path} has a module {unknown[0]!r:.80}; Manta has {', '.join(MODULES)}")
    return "Normalize" in kinds


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
    if not 1 <= pooling.dimensions <= model_config.hidden_size:
        raise ValueError(
            f"dimensions is {pooling.dimensions}; it must be a whole number from 1 to {model_config.hidden_size}"
        )


def task_facts(config: EngineConfig, model_config: ModelConfig) -> dict[str, Any]:
    """What clients want to know of an engine's task."""
    return {
        "task": config.task,
        "pooling_type": config.pooling_type,
        "normalize": model_config.normalize,
        "num_labels": len(model_config.labels),
        "labels": model_config.labels,
        "hidden_size": model_config.hidden_size,
    }
