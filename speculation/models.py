"""Makes the model that makes drafts, as the options name it, and checks it against the model that it serves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import torch

from checkpoints.hub import checkpoint_files
from checkpoints.storage import tensors_in
from checkpoints.tied_head import settle_head
from config import read_json
from model import Transformer
from model_config import ModelConfig
from models.families import our_name
from speculation.heads import EAGLE, DraftHead, Eagle3Head, Eagle3Shape, Names, config_of_layer, new_mtp, tensor_names
from speculation.options import SPECULATORS_LAYER, SPECULATORS_METHOD, SpeculativeConfig

OWN_FIELDS = (  # of a head's config.json, beside those of its family
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config",
    "eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "target_hidden_size",
)  # fmt: skip
TAPPED_LAYERS = "eagle_aux_hidden_state_layer_ids"
PADDING = 128  # rows by which the tables of models with the same tokenizer differ, at most


def new_draft(options: SpeculativeConfig, base: Transformer, source: str) -> Transformer:
    """A model that makes drafts for the model `base`, without weights yet; of the `source` see `add_draft`. A
    ValueError if the options' model is missing or does not fit."""
    method, folder, c = options.method, options.model, base.config
    if method != "draft_model" and base.layer_inputs:
        raise ValueError(f"method is {method!r}; {c.architecture} passes more than hidden states on")
    made: Transformer
    if method == "mtp":
        made = new_mtp(base, source)
    elif method == "draft_model":
        shape = shape_in(options, base)
        with contextlib.suppress(ValueError):  # weights that are not there yet
            shape = settle_head(folder, shape)
        check_vocabulary(options, shape, base)
        if shape.max_position < base.max_model_len:
            raise refused(options, f"it has {shape.max_position} positions, and max_model_len is {base.max_model_len}")
        if shape.delta:
            raise refused(options, "it has recurrent states, which nothing undoes")
        made = Transformer(shape, base.ops, base.device, base.dtype, base.max_model_len, base.group)
    else:
        made = new_eagle(options, base)
    window, widest = made.layout.windows[0], base.layout.windows[0]
    if len(made.layout.windows) > 1 or (widest and not 0 < window <= widest):
        raise ValueError(
            f"method is {method!r}; its layers see {made.layout.windows} tokens (0: all), and they must see as many "
            f"as each other and no more than the model's {widest}"
        )
    return made


def new_eagle(options: SpeculativeConfig, base: Transformer) -> DraftHead:
    """The head in the folder that the options name, as EAGLE's authors save it, or as Speculators does."""
    folder, raw = options.model, read_json(options.model, "config.json")
    if layer_config := raw.get(SPECULATORS_LAYER):
        if not isinstance(layer_config, dict) or options.method != raw.get(SPECULATORS_METHOD):
            raise refused(options, f"its {SPECULATORS_METHOD} is {raw.get(SPECULATORS_METHOD)!r:.80}, not eagle3")
        overrides = dict.fromkeys(raw) | layer_config
    else:
        named = raw.get("architectures")
        family = str(named[0] if isinstance(named, list) and named else None)
        overrides = {"architectures": [family.replace("Eagle3", "").replace("Eagle", "")]} | dict.fromkeys(OWN_FIELDS)
    shape = shape_in(options, base, json.dumps(overrides))
    if shape.num_layers != 1 or shape.hidden_size != base.config.hidden_size:
        raise refused(
            options, f"it has {shape.num_layers} layers of size {shape.hidden_size}; it must have one of the model's "
            f"size, {base.config.hidden_size}"
        )  # fmt: skip
    check_vocabulary(options, shape, base)
    layer, saved = config_of_layer(shape), tensor_names(folder)
    if options.method == "eagle":
        return DraftHead(base, layer, EAGLE, bias=any(our_name(name, ["fc.bias"]) for name in saved))
    if shape.latent:
        raise refused(options, "it has latent attention, which eagle3 lacks")
    ids = token_ids(options, saved, raw.get("draft_vocab_size"), base.config.vocab_size)
    return Eagle3Head(base, layer, eagle3_shape(options, raw, saved, base.config.num_layers), ids)


def eagle3_shape(options: SpeculativeConfig, raw: dict[str, Any], saved: set[str], num_layers: int) -> Eagle3Shape:
    """The shape of a head of EAGLE-3 with this config.json and these tensors, for a model of so many layers.

    The switches are those of EAGLE 3.1, by the names of vLLM and Speculators; NVIDIA's files have them in an object of
    their own, which numbers the layers by their output.
    """
    inner = raw.get("eagle_config") or {}
    switches, after = inner | raw, inner.get(TAPPED_LAYERS)
    taps = raw.get(TAPPED_LAYERS) or ([i + 1 for i in after] if after else [2, num_layers // 2, num_layers - 3])
    if not all(0 <= i < num_layers for i in taps):
        raise refused(options, f"it reads the input of layers {taps}, and the model has layers 0 to {num_layers - 1}")
    if switches.get("embed_requires_grad"):
        raise refused(options, "it has embeddings of its own (embed_requires_grad), which Manta does not read")
    norms = tuple(f"fc_norm.{i}" for i in range(len(taps))) if switches.get("fc_norm") else ()
    if switches.get("norm_before_fc"):
        norms = ("input_norm",)
    layer = "midlayer" if any("midlayer." in name for name in saved) else "layers.0"
    names = Names(layer, "fc", norm="norm", passes_norm=bool(switches.get("norm_output")))
    return Eagle3Shape(names, tuple(taps), norms, bool(switches.get("norm_before_residual")))


def shape_in(options: SpeculativeConfig, base: Transformer, overrides: str | None = None) -> ModelConfig:
    """The shape in the folder that the options name, with the model's cache; its errors say that it is of the draft."""
    try:
        shape = ModelConfig.from_folder(options.model, overrides)
    except ValueError as error:
        raise refused(options, str(error)) from None
    return dataclasses.replace(shape, kv_cache_dtype=base.config.kv_cache_dtype, vision=None)


def check_vocabulary(options: SpeculativeConfig, shape: ModelConfig, base: Transformer) -> None:
    """Raises a ValueError if a model's vocabulary is another one."""
    theirs = base.config.vocab_size
    if abs(shape.vocab_size - theirs) > PADDING:
        raise refused(options, f"its vocab_size is {shape.vocab_size}, that of the model {theirs}")


def token_ids(options: SpeculativeConfig, saved: set[str], few: int | None, vocab_size: int) -> torch.Tensor:
    """The model's ids of the tokens that a head of EAGLE-3 knows, of which the file has how far each has moved. Without
    that file they are the first `few`, and without that number all."""
    if "d2t" not in saved:
        return torch.arange(few if few and not saved else vocab_size, device="cpu")
    tensors = tensors_in(checkpoint_files(options.model))
    moved = next(file.get_tensor(name) for file, name in tensors if name == "d2t")
    ids = torch.arange(len(moved), device="cpu") + moved
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < vocab_size:
            raise refused(options, f"its tensor d2t names token {token}; tokens are from 0 to {vocab_size - 1}")
    return ids


def refused(options: SpeculativeConfig, why: str) -> ValueError:
    """The error that a model does not fit."""
    return ValueError(f"speculative_config has model {options.model!r:.200}: {why}")
