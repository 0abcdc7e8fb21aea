"""Finds a model in Ollama's store, in which a manifest names the layers of a model by their digests.

The layer with the weights is a GGUF file whose name has no ending. See manifest/ in Ollama's sources. Standard library
only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from config import read_json
from observe.logs import console

PREFIX = "ollama:"
LAYER = "application/vnd.ollama.image."
SYSTEM_STORE = "/usr/share/ollama/.ollama/models"  # of the service that Linux packages install
DEFAULTS = ["registry.ollama.ai", "library"]  # of HOST/NAMESPACE/NAME:TAG, where a name has neither
SAMPLING = {  # Ollama's names of values of a request that sets none itself, and generation_config.json's
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repeat_penalty": "repetition_penalty", "num_predict": "max_new_tokens",
}  # fmt: skip
POSITIVE = "num_predict", "top_p", "repeat_penalty"  # Ollama takes 0 or less as "not set"; then the field is left out
UNREAD = {  # layers that change nothing here
    "template": "its template in Go (the chat template in its GGUF file is used)", "system": "its system prompt",
    "messages": "its first messages", "projector": "what it sees pictures with",
}  # fmt: skip


def find_blob(model: str) -> tuple[str, dict[str, Any]]:
    """The path of the GGUF file of `ollama:NAME[:TAG]`, and its fields for generation_config.json; a ValueError says
    why there is none."""
    *place, name = model.removeprefix(PREFIX).split("/")
    name, _, tag = name.partition(":")
    path = Path("manifests", *DEFAULTS[: max(0, 2 - len(place))], *place, name, tag or "latest")
    home = os.environ.get("OLLAMA_MODELS") or os.path.expanduser("~/.ollama/models")
    stores = [Path(home), Path(SYSTEM_STORE)]
    store = next((store for store in stores if name and ".." not in path.parts and os.path.isfile(store / path)), None)
    if store is None:
        places = [at.parts[-4:] for store in stores for at in store.glob("manifests/*/*/*/*")]
        names = {f"{'/'.join(part for part in place if part not in DEFAULTS)}:{tag}" for *place, tag in places}
        raise ValueError(
            f"{model} is not in {home} nor in {SYSTEM_STORE}, as far as this user may read them; Ollama has "
            f"{', '.join(sorted(names)) or 'no model':.800} there"
        )
    layers = read_json(str((store / path).parent), path.name).get("layers")
    blobs: dict[str, list[str]] = {}
    for layer in layers if isinstance(layers, list) else ():
        kind, digest = (str(layer.get(key)) if isinstance(layer, dict) else "" for key in ("mediaType", "digest"))
        kind = kind.removeprefix(LAYER)
        blobs.setdefault(kind, []).append(os.path.join(store, "blobs", os.path.basename(digest.replace(":", "-"))))
    if len(weights := blobs.get("model", [])) != 1 or "adapter" in blobs:
        kinds = ", ".join(f"{len(paths)} {kind}" for kind, paths in sorted(blobs.items()))
        raise ValueError(f"{model} has the layers {kinds or 'none'}; Manta serves one of model, without an adapter")
    params = read_json(*os.path.split(blobs["params"][0])) if "params" in blobs else {}
    unread = [what for kind, what in UNREAD.items() if kind in blobs]
    params = {key: value for key, value in params.items() if not (key in POSITIVE and value in (-2, -1, 0))}
    unread += [f"its parameter {key} ({value!r:.80})" for key, value in params.items() if key not in SAMPLING]
    if unread:
        console.info(f"{model}: Manta leaves out {', '.join(unread)}")
    return weights[0], {SAMPLING[key]: value for key, value in params.items() if key in SAMPLING}
