"""The routes that sample nothing: embeddings, pooling, classes, scores, and the order of documents."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from api import checks
from api import fields as shared
from api.checks import ApiError, CheckContext, Face, Field, too_long
from api.generation import Caller, EngineCall, admitted
from api.prompts import Prompt
from api.routes import Api
from observe.logs import warn_once
from outputs import Vector, cosine, numbers
from sampling_params import PoolingParams
from text.prompts import CUT, opening


def embeddings(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """A vector for each prompt."""
    prompts = inputs(api, fields)
    pooled = pool(api, fields, caller, prompts)
    return listed(fields, caller, prompts, vectors("embedding", "embedding", pooled, fields))


def pooling(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Each prompt's vector, or the output of the classification head."""
    task = api.facts["task"]
    if fields["task"] not in (None, task, "classify" if task == "score" else task):
        raise ApiError(400, f"task is {fields['task']}; this server's is {task}", "task")
    prompts = inputs(api, fields)
    pooled = pool(api, fields, caller, prompts)
    return listed(fields, caller, prompts, vectors("pooling", "data", pooled, fields))


def classify(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """The probability of each label for each prompt, and the label of the highest one."""
    labels, data = api.facts["labels"], []
    prompts = inputs(api, fields)
    for i, probs in enumerate(map(numbers, pool(api, fields, caller, prompts))):
        label = labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return listed(fields, caller, prompts, data)


def score(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """How well each of `text_2` goes with its partner in `text_1`, or with the only one there."""
    first, second = fields["text_1"], fields["text_2"]
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts for {len(second)} of text_2; it must have as many, or 1"
        raise ApiError(400, message, "text_1")
    scores, prompts = compare(api, fields, caller, first, second)
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    return listed(fields, caller, prompts, data)


def rerank(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Documents in the order of how well they answer a query; among equals the first comes first."""
    documents = fields["documents"]
    scores, prompts = compare(api, fields, caller, [fields["query"]], documents)
    results: list[dict[str, Any]] = []
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: fields["top_n"] or len(documents)]:
        shown = {"document": {"text": documents[i]}} if fields["return_documents"] else {}
        results.append({"index": i, "relevance_score": scores[i]} | shown)
    return {"id": caller.id, "model": fields["model"], "usage": used(prompts), "results": results}


def compare(
    api: Api, fields: dict[str, Any], caller: Caller, first: list[str], second: list[str]
) -> tuple[list[float], list[Prompt]]:
    """How well texts go together, and the prompts that were run for it.

    For an embedder that is the cosine of two embeddings. For a classifier with one label, it is what the classifier
    says of both texts as one prompt, with the model's own prompt before the first one.
    """
    if api.facts["task"] == "score":
        before = named(api, fields)
        pairs = zip([before + text for text in first] * (len(second) // len(first)), second, strict=True)
        typed: list[Any] = [api.prompts.encode_with_type(fields, pair, True) for pair in pairs]
        prompts, seconds = ([item[i] for item in typed] for i in range(2))
        return [numbers(pooled)[0] for pooled in pool(api, fields, caller, prompts, seconds)], prompts
    prompts = encoded(api, fields, first + second, True)
    all_vectors = [numbers(pooled) for pooled in pool(api, fields, caller, prompts)]
    left = all_vectors[: len(first)] * (len(second) // len(first))
    return [cosine(a, b) for a, b in zip(left, all_vectors[len(first) :], strict=True)], prompts


def inputs(api: Api, fields: dict[str, Any]) -> list[Prompt]:
    """The request's texts or token ids, as `encoded` has them."""
    return encoded(api, fields, fields["input"], fields["add_special_tokens"] is not False)


def encoded(api: Api, fields: dict[str, Any], prompts: Sequence[str | list[int]], special: bool) -> list[Prompt]:
    """Texts as the model was trained with them: after its prompt, and cut to its context. Token ids stay."""
    before = named(api, fields)
    cuts = api.facts["cuts_texts"] and fields["truncate_prompt_tokens"] is None
    cut = fields | {"truncate_prompt_tokens": -1} if cuts else fields
    sources = [before + source if isinstance(source, str) else source for source in prompts]
    pairs = [api.prompts.encode(cut if isinstance(source, str) else fields, source, special) for source in sources]
    was_cut = (text is None and isinstance(source, str) for (text, _), source in zip(pairs, sources, strict=True))
    if cuts and any(was_cut):
        warn_once(CUT.format(api.facts["max_model_len"]))
    return pairs


def named(api: Api, fields: dict[str, Any]) -> str:
    """The model's prompt that a request names, or its default."""
    try:
        return opening(api.facts, fields.get("prompt_name"))
    except ValueError as error:
        raise ApiError(400, str(error), "prompt_name") from None


def pool(
    api: Api, fields: dict[str, Any], caller: Caller, prompts: Sequence[Prompt], seconds: Sequence[int | None] = ()
) -> list[bytes]:
    """The vector of each prompt; of `seconds` see `PoolingParams.second_text`."""
    limit = api.facts["max_model_len"]
    dimensions = fields.get("dimensions")  # not all routes have it
    for _, ids in prompts:
        if len(ids) > limit:
            raise too_long(limit, f"a prompt is too long: it has {len(ids)}")
    if dimensions is not None and dimensions > (most := api.facts["vector_size"]):
        raise ApiError(400, f"dimensions is {dimensions}; at most {most} are there", "dimensions")
    starts = seconds if api.facts["token_types"] > 1 and seconds else [None] * len(prompts)
    params = [PoolingParams(dimensions, fields["use_activation"], start) for start in starts]
    pairs = zip(prompts, params, strict=True)
    requests = [Vector(f"{caller.id}-{i}", ids, param) for i, ((_, ids), param) in enumerate(pairs)]
    with admitted(api, len(requests), caller):
        call = caller.call = EngineCall(caller, fields, requests)
        for _ in call.run(api.client, api.config.request_timeout):
            pass
    return [vector.pooled for vector in requests]


def used(prompts: Sequence[Prompt]) -> dict[str, int]:
    """The `usage` of a reply."""
    count = sum(len(ids) for _, ids in prompts)
    return {"prompt_tokens": count, "total_tokens": count}


def listed(fields: dict[str, Any], caller: Caller, prompts: Sequence[Prompt], data: Any) -> dict[str, Any]:
    """A reply that is a list."""
    head = {"id": caller.id, "object": "list", "created": int(time.time()), "model": fields["model"]}
    return head | {"data": data, "usage": used(prompts)}


def vectors(kind: str, key: str, all_pooled: list[bytes], fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of /v1/embeddings (`kind` "embedding") and /pooling: numbers, or their float32 bytes in base64."""
    encode = numbers if fields["encoding_format"] == "float" else lambda pooled: base64.b64encode(pooled).decode()
    return [{"object": kind, "index": i, key: encode(pooled)} for i, pooled in enumerate(all_pooled)]


# --- what they take --------------------------------------------------------------------------------------------------


def texts(value: Any, context: CheckContext) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) and text for text in listed):
        raise ValueError("it must be a string or a list of strings, none of them empty")
    if len(listed) > (most := context.config.max_prompts):
        raise ValueError(f"it has {len(listed)} texts; at most {most} are allowed (max_prompts)")
    return listed


def documents(value: Any, context: CheckContext) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of strings, or of objects with a text")
    for document in value:
        if isinstance(document, dict):
            checks.known_keys(document, ("text",), context)
    return texts([document.get("text") if isinstance(document, dict) else document for document in value], context)


TEXTS, TEXT = shared.shown(anyOf=shared.TEXT_OR_TEXTS), shared.STRING
DOCUMENT = {"type": "object", "required": ["text"], "properties": {"text": TEXT}, "additionalProperties": False}
DOCUMENTS = shared.shown(type="array", items={"anyOf": [TEXT, DOCUMENT]}, minItems=1)
INPUT = Field("input", shared.PROMPT, None, checks.prompts, shared.ONE_OR_MORE)
SIZE = Field("dimensions", Annotated[int, Meta(ge=1, le=2**20)], about="Of the vector.")
FORM = Field("encoding_format", Literal["float", "base64"], "float")
ACTIVATION = Field("use_activation", bool, about=shared.attributes_of(PoolingParams)["use_activation"])
NAME = Field("prompt_name", str, about='Of the prompt that goes before each text, or ""; null: the model\'s default.')
LAST = (*shared.CUT, shared.PRIORITY)
TASK = Field("task", Literal["embed", "classify", "score"], about="What this server does with prompts.")
FIRST = (shared.MODEL, INPUT, ACTIVATION, shared.SPECIAL_TOKENS)
SIZED = (SIZE, FORM, *LAST)
EMBED = ("embed",)  # tasks of the server that a route needs one of
PAIRS = ("embed", "score")
VECTORS = ("embed", "score", "classify")
EMBEDDINGS = Face("embeddings", ("/v1/embeddings",), (*FIRST, NAME, *SIZED), embeddings, "embd-", ("input",), EMBED)
POOLING = Face("pooling", ("/pooling",), (*FIRST, NAME, TASK, *SIZED), pooling, "pool-", ("input",), VECTORS)
CLASSIFY = Face("classify", ("/classify",), (*FIRST, *LAST), classify, "classify-", ("input",), ("classify", "score"))
SCORED = (
    shared.MODEL,
    ACTIVATION,
    Field("text_1", TEXTS, None, texts, "A text, or as many as text_2 has; vLLM: queries."),
    Field("text_2", TEXTS, None, texts, "A text or several; vLLM: documents."),
    NAME,
    *LAST,
)
SCORE = Face(
    "score", ("/score", "/v1/score"), SCORED, score, "score-", ("text_1", "text_2"), PAIRS,
    aliases={"queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2"},
)  # fmt: skip
RERANKED = (
    shared.MODEL,
    ACTIVATION,
    Field("query", Annotated[str, Meta(min_length=1)]),
    Field("documents", DOCUMENTS, None, documents, "Texts, or objects with a text."),
    Field("top_n", shared.Count, 0, about="How many to return; 0 is all."),
    Field("return_documents", bool, True),
    NAME,
    *LAST,
)
RERANK = Face(
    "rerank", ("/rerank", "/v1/rerank", "/v2/rerank"), RERANKED, rerank, "rerank-", ("query", "documents"), PAIRS
)
