"""Settles what an engine that does not generate makes of its prompts, by its options and the model's folder.

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

from config import EngineConfig, read_json, sentence_file
from model_config import ModelConfig
from models.config_fields import whole
from sampling_params import NO_SAMPLING, POOLING_TASKS, PoolingParams, SamplingParams

POOLINGS = ("last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len")  # see `reference.pool`
THEIRS = re.compile("_?tokens?$")  # what sentence-transformers' names have more, as "lasttoken"
OLD_MODES = (  # its fields before it had `pooling_mode`, in the order of the vectors of several
    "cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"
)  # fmt: skip
POOLING = os.path.join("1_Pooling", "config.json")
PROMPTS = "config_sentence_transformers.json"
MODULES = re.compile(  # and their folders
    r"Transformer: ((LogitScore|Dense):\w[\w.-]*|"  # a Dense alone is PyLate's, for vectors of tokens
    r"Pooling:(\w[\w.-]*)?( (Dense|LayerNorm|Dropout):\w[\w.-]*)*( Normalize:(\w[\w.-]*)?)?)"
)
USUAL = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "")]  # where no file says so
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # of Dense layers, as torch.nn has them
NAMED = dict.fromkeys(("module_input_name", "module_output_name"), (None, "sentence_embedding"))
TRUTHS = (True, False)
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first one that is there counts


class Dense(NamedTuple):
    """A layer after the pooling: an activation of a product with what its folder has, or a LayerNorm."""

    kind: str
    folder: str  # below the model's
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool  # whether the inputs, made as long by another product where they are not, are added


def settle_task(config: EngineConfig, model_config: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Put the task and the pooling in the place of `auto`, with the options and the head that follow from them.

    What has been settled before stays as it is. A ValueError if the model cannot do the task, or its folder asks for a
    pooling that Manta does not have.
    """
    folder, task, head = config.folder, config.task, model_config.head
    if task == "auto":
        task = "embed" if is_sentence_transformer(folder) or model_config.row.encoder else "generate"
        if head == "labels":
            task = "score" if len(model_config.labels) == 1 else "classify"
    if task == "generate":
        if head != "logits":
            why = "is an encoder" if model_config.row.encoder else "has no head for it"
            raise ValueError(f"task is 'generate'; {model_config.architecture} {why}, so it must be 'embed'")
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
    size, kinds = model_config.hidden_size, (model_config.row.pooling if pooling == "auto" else pooling,)
    if task == "embed":
        head = "none"
        if normalize is None:
            normalize = read_modules(folder)[-1][0] == "Normalize" or read_modules(folder)[1][0] == "Dense"
        if pooling == "auto":
            kinds = poolings_of(folder, model_config.row.pooling)
        size = [size * len(kinds), *(dense.outputs for dense in dense_layers(folder, size * len(kinds)))][-1]
    if longest is None and (task == "embed" or model_config.row.encoder):
        longest = trained_length(folder, model_config.max_position, task != "embed")
    config = dataclasses.replace(
        config, task=task, pooling_type=kinds[0] if len(kinds) == 1 else "auto", max_model_len=longest,
        enable_chunked_prefill=False, enable_prefix_caching=False, preemption_mode="recompute",
    )  # fmt: skip
    return config, dataclasses.replace(model_config, head=head, normalize=normalize, vector_size=size, poolings=kinds)


def is_sentence_transformer(folder: str) -> bool:
    """Whether sentence-transformers has saved this folder, or one laid out as such."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("modules.json", POOLING))


def has_logit_score(folder: str) -> bool:
    """Whether a folder of sentence-transformers has a language model that says by logits how well two texts match."""
    try:
        with open(os.path.join(folder, "modules.json"), encoding="utf-8") as file:
            return "LogitScore" in file.read()
    except (OSError, UnicodeDecodeError):
        return False  # for `read_modules` to say why, where it matters


def classifier_fields(folder: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json, with what other files say of a classifier.

    A CrossEncoder's folder says which activation it has. Where logits of tokens are what a classifier says, the result
    has their `classifier_ids` and a `pair_template`: vLLM's `classifier_from_token` names the tokens, and
    sentence-transformers' module LogitScore their ids. A ValueError if a file is malformed, or a token is none of the
    vocabulary.
    """
    settings = read_json(folder, PROMPTS, {})
    if settings.get("model_type") == "CrossEncoder" and settings.get("activation_fn"):
        raw |= {"sentence_transformers": {"activation_fn": settings["activation_fn"]}}
    if has_logit_score(folder):
        score = read_json(folder, os.path.join(read_modules(folder)[1][1], "config.json"))
        ids = [score[name] for name in ("false_token_id", "true_token_id") if score.get(name) is not None]
        architecture = re.sub("ForCausalLM$", "ForSequenceClassification", str((raw.get("architectures") or [""])[0]))
        options: Any = read_json(folder, sentence_file(folder), {}).get("processing_kwargs") or {}
        try:
            opens = options.get("chat_template", {}).get("add_generation_prompt")
        except AttributeError:
            name = sentence_file(folder)
            raise ValueError(f"{name}: processing_kwargs is {options!r:.80}; it must be an object of objects") from None
        raw |= {"architectures": [architecture], "classifier_ids": ids}
        return raw | {"pair_template": "chat" + " opened" * bool(opens)}
    tokens, template = raw.get("classifier_from_token"), raw.pop("is_original_qwen3_reranker", None)
    if not tokens or not (template or raw.get("method")):
        return raw
    fields = read_json(folder, "tokenizer.json", {})
    vocabulary = fields.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # pieces and how likely each is
        vocabulary = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    vocabulary = vocabulary | {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
    count = 2 if template or raw.get("method") == "from_2_way_softmax" else 1
    if not isinstance(tokens, list) or len(tokens) != count or any(str(token) not in vocabulary for token in tokens):
        raise ValueError(f"classifier_from_token is {tokens!r:.80}; it must list {count} of tokenizer.json's tokens")
    return raw | {"classifier_ids": [vocabulary[token] for token in tokens], "pair_template": "qwen3" * bool(template)}


def read_modules(folder: str) -> list[tuple[str, str]]:
    """The modules of a folder of sentence-transformers, and their folders below it, as `modules.json` lists them. A
    ValueError if the file is malformed, or has modules that Manta does not have."""
    path = os.path.join(folder, "modules.json")
    if not os.path.isfile(path):
        return USUAL
    try:
        with open(path, encoding="utf-8") as file:
            modules = [(module["type"].rpartition(".")[2], module["path"]) for module in json.load(file)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no list of modules: {error!r}") from None
    if not MODULES.fullmatch(listed := " ".join(f"{kind}:{place}" for kind, place in modules)):
        raise ValueError(f"{path} has {listed!r:.200}; Manta has Transformer, Pooling, Dense layers and Normalize")
    return modules


def module_files(folder: str) -> list[str]:
    """The files of the modules that `modules.json` lists in folders of their own: settings, and weights of a few MB."""
    listed = read_modules(folder) if os.path.isfile(os.path.join(folder, "modules.json")) else ()
    return [f"{place}/{name}" for _, place in listed if place for name in ("config.json", *MODULE_WEIGHTS)]


def poolings_of(folder: str, usual: str) -> tuple[Any, ...]:
    """The kinds of pooling that a folder asks for, whose vectors follow one another; the `usual` one where nothing says
    so. A ValueError if Manta does not have one of them, or one leaves out the tokens of a prompt."""
    kind, place = read_modules(folder)[1]
    name = os.path.join(place, "config.json")
    if kind != "Pooling" or not (raw := read_json(folder, name, {})):
        return (usual,)
    modes = raw.get("pooling_mode") or [mode for mode in OLD_MODES if raw.get("pooling_mode_" + mode)] or "mean"
    modes = [THEIRS.sub("", str(mode)) for mode in (modes if isinstance(modes, list) else [modes])]
    if set(modes) - set(POOLINGS):
        unknown, allowed = ", ".join(modes), ", ".join(POOLINGS)
        raise ValueError(f"{name} asks for the pooling {unknown:.80}; Manta has {allowed}: pooling_type can choose one")
    if raw.get("include_prompt") is False and any(read_prompts(folder)[0].values()):
        raise ValueError(f"{name} has include_prompt false, which leaves out prompts; Manta pools all tokens")
    return tuple(modes)


def dense_layers(folder: str, size: int) -> list[Dense]:
    """The layers that make an embedding of a pooled vector of this `size`. A ValueError if a field of theirs is out of
    range, or of another kind than Manta has."""
    layers = []
    for kind, place in read_modules(folder):
        if kind not in ("Dense", "LayerNorm"):
            continue
        raw = read_json(folder, os.path.join(place, "config.json"))
        bias, activation = raw.get("bias", True), str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
        values = {"use_residual": False} | raw | {"bias": bias, "activation_function": activation}
        fields = {"in_features": (size,), "bias": TRUTHS, "activation_function": ACTIVATIONS, "use_residual": TRUTHS}
        fields = fields | NAMED if kind == "Dense" else {"dimension": (size,)}
        for field, allowed in fields.items():
            if (value := values.get(field)) not in allowed:
                raise ValueError(f"{place}: {field} is {value!r:.80}; Manta has {' or '.join(map(str, allowed))}")
        outputs = whole("out_features", raw.get("out_features"), 1, 2**17) if kind == "Dense" else size
        layers.append(Dense(kind, place, size, outputs, bias, activation, values["use_residual"]))
        size = outputs
    return layers


def read_prompts(folder: str) -> tuple[dict[str, str], str | None]:
    """The texts that go before texts to embed, by name, and the name of the one that does by default. A ValueError if
    the file is malformed, or the default is none of them."""
    raw = read_json(folder, PROMPTS, {})
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{PROMPTS}: prompts is {prompts!r:.80}; it must be an object of texts")
    if default is not None and default not in prompts:
        raise ValueError(f"{PROMPTS}: default_prompt_name is {default!r:.80}; it must be one of {', '.join(prompts)}")
    return {key: text or "" for key, text in prompts.items()}, default


def trained_length(folder: str, most: int, labelled: bool = False) -> int | None:
    """The tokens of a prompt that a folder of sentence-transformers allows, or that of an encoder with a head for
    labels, at most `most`; None if it does not say.

    Version 6 of the library saves it with the tokenizer, earlier ones in a file of their own. A ValueError if what it
    says is no number of tokens.
    """
    files = {sentence_file(folder): "max_seq_length"}
    if labelled or is_sentence_transformer(folder):
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
    an answer, as `params` say. A ValueError if it is not, or its pooling parameters are out of range."""
    if pooling is None:
        if config.makes_vectors:
            raise ValueError(f"the request asks for generated text; the task of this engine is {config.task!r}")
        return
    if not config.makes_vectors:
        raise ValueError(f"the request asks for what an embedder or a classifier gives; the task is {config.task!r}")
    if params != NO_SAMPLING:
        raise ValueError(f"the request has sampling parameters; with the task {config.task!r} nothing is sampled")
    if pooling.task not in (None, *(tasks := POOLING_TASKS[config.task])):
        raise ValueError(f"task is {pooling.task!r:.80}; the engine's is {config.task!r}, and does {', '.join(tasks)}")
    if pooling.task == "token_embed" and len(model_config.poolings) > 1:
        kinds = "+".join(model_config.poolings)
        raise ValueError(f"task is 'token_embed'; this model pools by {kinds}, so its tokens have no embeddings")
    if (second := pooling.second_text) is not None and (model_config.token_types < 2 or second < 0):
        allowed = "from 0" if model_config.token_types > 1 else "left out, because the model has no types of tokens"
        raise ValueError(f"second_text is {second}; it must be {allowed}")
    if pooling.dimensions is None:
        return
    if config.task != "embed":
        raise ValueError(f"dimensions is {pooling.dimensions}; with the task {config.task!r} it must be left out")
    if not 1 <= pooling.dimensions <= model_config.vector_size:
        allowed = f"a whole number from 1 to {model_config.vector_size}"
        raise ValueError(f"dimensions is {pooling.dimensions}; it must be {allowed}")


def task_facts(config: EngineConfig, model_config: ModelConfig) -> dict[str, Any]:
    """Facts about an engine's task for clients."""
    prompts, default = read_prompts(config.folder) if config.task in ("embed", "score") else ({}, None)
    return {
        "task": config.task,
        "pooling_type": "+".join(model_config.poolings),
        "normalize": model_config.normalize,
        "num_labels": len(model_config.labels),
        "labels": model_config.labels,
        "vector_size": model_config.vector_size,
        "prompts": prompts,
        "default_prompt_name": default,
        "pair_template": model_config.pair_template,
        "token_types": model_config.token_types,
        "cuts_texts": config.task == "embed" and is_sentence_transformer(config.folder),
    }
