"""/tokenize and /detokenize: the tokens of texts and conversations, and the text of tokens."""

from __future__ import annotations

from typing import Any

from api import checks
from api import fields as shared
from api.checks import ApiError, Face, Field
from api.generation import Caller
from api.routes import Api


def tokenize(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """The tokens of a text or a conversation."""
    special = fields["add_special_tokens"]
    if fields["messages"] is not None:
        ids = api.prompts.conversation(fields, caller, bool(special))[0][1]
    elif fields["prompt"] is not None and isinstance(fields["prompt"][0], str) and len(fields["prompt"]) == 1:
        ids = api.prompts.encode(fields, fields["prompt"][0], special is not False)[1]
    else:
        raise ApiError(400, "prompt must be a string, or messages a list of messages", "prompt")
    strings = None
    if fields["return_token_strs"] is not False:
        strings = [api.tokenizer.token(id) for part in checks.in_parts(ids) for id in part]
    limit = api.facts["max_model_len"]
    return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}


def detokenize(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """The text of tokens."""
    ids, limit, size = fields["tokens"], api.facts["max_model_len"], api.facts["vocab_size"]
    if len(ids) > limit:
        raise ApiError(400, f"tokens has {len(ids)} ids; at most {limit} are allowed (max_model_len)", "tokens")
    if (highest := max(ids, default=0)) >= size:
        raise ApiError(400, f"tokens has the id {highest}; allowed: 0 to {size - 1}", "tokens")
    return {"prompt": api.tokenizer.decode(ids, skip_special_tokens=False)}


def tokenizer_info(api: Api) -> dict[str, Any]:
    """The model's tokenizer_config.json without the paths of files, with the chat template: vLLM's answer."""
    config = {name: value for name, value in api.tokenizer.config.items() if not name.endswith(("_file", "_path"))}
    template = {"chat_template": api.tokenizer.template().source} if api.tokenizer.has_chat_template else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | config | template


TEXT = shared.shown(**shared.STRING)
FIELDS = (
    shared.MODEL,
    Field("prompt", TEXT, None, checks.prompts, "A text; or else there are messages."),
    Field("messages", shared.CONVERSATION, None, checks.messages, "The conversation so far."),
    Field("return_token_strs", bool),
    shared.SPECIAL_TOKENS,
    *shared.TALK,
    shared.EFFORT,
    *shared.CUT,
)
TOKENIZE = Face("tokenize", ("/tokenize",), FIELDS, tokenize)
TOKENS = Field("tokens", shared.shown(**shared.IDS), None, checks.token_ids)
DETOKENIZE = Face("detokenize", ("/detokenize",), (shared.MODEL, TOKENS), detokenize, needed=("tokens",))
