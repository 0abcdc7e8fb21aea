"""The routes that sample nothing: embeddings, pooling, classes, scores, and the order of documents."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta

from api import checks
from api import fields as shared
from api.checks import ApiError, CheckContext, Face, Field, too_long
from api.generation import Caller, EngineCall, admitted, check_room
from api.prompts import Prompt, Source
from api.routes import Api
from observe.logs import warn_once
from outputs import Vector, cosine, numbers, numbers_by_token
from sampling_params import POOLING_TASKS, PoolingParams
from text.prompts import CUT, opening, pair_parts

# What an `input_type` may be, and by which names a model's prompts mean the same, as in sentence-transformers.
ROLES = (("query", "search_query"), ("document", "search_document", "passage", "corpus"))


def embeddings(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """A vector for each prompt."""
    return vectors(api, fields, caller, "embedding", "embedding")


def cohere_embeddings(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """A vector for each text, in the forms that Cohere's clients ask for."""
    prompts = encoded(api, fields, caller, fields["texts"], True)
    pooled, shapes = pool(api, fields, caller, prompts), {"float": numbers, "base64": in_base64}
    forms = {kind: [shapes[kind](one) for one in pooled] for kind in fields["embedding_types"] or ["float"]}
    head = {"id": caller.id, "response_type": "embeddings_by_type", "embeddings": forms, "texts": fields["texts"]}
    return head | {"meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": used(prompts)["total_tokens"]}}}


def plain_embeddings(api: Api, fields: dict[str, Any], caller: Caller, task: str | None = None) -> list[Any]:
    """The vectors alone, or with the task "token_embed" those of all tokens."""
    prompts = encoded(api, fields, caller, fields["inputs"], True)
    return shown(prompts, pool(api, fields | {"task": task}, caller, prompts), PoolingParams(task=task).by_token)


def pooling(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Each prompt's vector, or the output of the classification head; or these of each token."""
    task = api.facts["task"]
    if fields["task"] not in (None, *POOLING_TASKS[task]):
        does = ", ".join(POOLING_TASKS[task])
        raise ApiError(400, f"task is {fields['task']}; this server's is {task}, which does {does}", "task")
    return vectors(api, fields, caller, "pooling", "data")


def classify(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """The probability of each label for each prompt, and the label of the highest one."""
    labels, data = api.facts["labels"], []
    prompts = inputs(api, fields, caller)
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


def rerank(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | list[Any]:
    """Documents in the order of how well they answer a query; among equals the first comes first.

    A body of Cohere's or Jina's has `documents`, and one of TEI's has `texts`, for which the reply is a plain list.
    """
    plain, documents = fields["texts"] is not None, fields["texts"] or fields["documents"]
    if (fields["documents"] is None) != plain:
        is_missing = documents is None
        message = "documents is missing" if is_missing else "texts is given beside documents; one is enough"
        raise ApiError(400, message, "documents" if is_missing else "texts", "missing_required_parameter" * is_missing)
    check_room(api.answers, len(documents), caller)
    shows = not plain if fields["return_documents"] is None else fields["return_documents"]
    most = fields["max_tokens_per_doc"]
    compared = documents if most is None else [api.prompts.shortened(text, most) for text in documents]
    scores, prompts = compare(api, fields, caller, [fields["query"]], compared)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: fields["top_n"] or len(documents)]
    if plain:
        return [{"index": i, "score": scores[i]} | ({"text": documents[i]} if shows else {}) for i in order]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    for result in results if shows else ():
        result["document"] = {"text": documents[result["index"]]}
    usage = used(prompts)
    meta = {"tokens": {"input_tokens": usage["total_tokens"]}}  # as Cohere tells it
    return {"id": caller.id, "model": fields["model"], "usage": usage, "meta": meta, "results": results}


def compare(
    api: Api, fields: dict[str, Any], caller: Caller, first: list[str], second: list[str]
) -> tuple[list[float], list[Prompt]]:
    """How well texts go together, and the prompts that were run for it.

    For an embedder that is the cosine of two embeddings. For a classifier with one label, it is what the classifier
    says of both texts as one prompt, with the model's own prompt or template around them.
    """
    check_room(api.answers, len(second), caller)
    if api.facts["task"] == "score":
        cut = settled(fields)
        before, instruction = named(api, fields) if fields["instruction"] is None else "", fields["instruction"]
        pairs = zip(first * (len(second) // len(first)), second, strict=True)
        prompts, seconds = [], []
        for pair in pairs:
            try:
                source = pair_parts(api.facts, api.tokenizer, *pair, before, instruction)
            except ValueError as error:
                raise ApiError(400, str(error), "query" if instruction is None else "instruction") from None
            prompt, at = api.prompts.encode_with_type(cut, source, True)
            prompts.append(fitting(api, prompt))
            seconds.append(at)
        return [numbers(pooled)[0] for pooled in pool(api, fields, caller, prompts, seconds)], prompts
    for name, same in (("instruction", None), ("raw_scores", False), ("use_activation", True)):
        if fields.get(name) not in (None, same):
            raise ApiError(400, f"{name} is for models that score pairs; this one's scores are cosines", name)
    has_roles = all(not api.facts["prompts"].keys().isdisjoint(names) for names in ROLES)
    with_roles = has_roles and "query" in fields and fields["prompt_name"] is None
    query, document = ({"input_type": names[0]} if with_roles else {} for names in ROLES)
    prompts = encoded(api, fields | query, caller, first, True) + encoded(api, fields | document, caller, second, True)
    all_vectors = [numbers(pooled) for pooled in pool(api, fields, caller, prompts)]
    left = all_vectors[: len(first)] * (len(second) // len(first))
    return [cosine(a, b) for a, b in zip(left, all_vectors[len(first) :], strict=True)], prompts


def settled(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, in which `truncate` of NIM, Cohere and TEI has become `truncate_prompt_tokens` and its side."""
    how, keep = fields.get("truncate"), fields["truncate_prompt_tokens"]
    if how in (False, "NONE"):
        if keep is not None:
            message = f"truncate_prompt_tokens is {keep} beside truncate {how}; only one of them may be given"
            raise ApiError(400, message, "truncate_prompt_tokens")
    elif how is not None:
        side = {"START": "left", "END": "right"}.get(how, fields["truncation_side"])
        fields = fields | {"truncate_prompt_tokens": -1 if keep is None else keep, "truncation_side": side}
    return fields


def inputs(api: Api, fields: dict[str, Any], caller: Caller) -> list[Prompt]:
    """The request's texts or token ids, as `encoded` has them."""
    return encoded(api, fields, caller, fields["input"], fields["add_special_tokens"] is not False)


def encoded(api: Api, fields: dict[str, Any], caller: Caller, prompts: Sequence[Source], special: bool) -> list[Prompt]:
    """Texts as the model was trained with them: after its prompt, and cut to its context. Token ids stay."""
    check_room(api.answers, len(prompts), caller)
    before, fields = named(api, fields), settled(fields)
    cuts = api.facts["cuts_texts"] and fields["truncate_prompt_tokens"] is None
    cuts = cuts and fields.get("truncate") not in (False, "NONE")
    cut = fields | {"truncate_prompt_tokens": -1} if cuts else fields
    sources = [before + source if isinstance(source, str) else source for source in prompts]
    how = ((cut if isinstance(source, str) else fields, source) for source in sources)
    pairs = [fitting(api, api.prompts.encode(*one, special)) for one in how]
    was_cut = (text is None and isinstance(source, str) for (text, _), source in zip(pairs, sources, strict=True))
    if cuts and any(was_cut):
        warn_once(CUT.format(api.facts["max_model_len"]))
    return pairs


def fitting(api: Api, prompt: Prompt) -> Prompt:
    """A prompt that the context holds; an `ApiError` if it is longer."""
    if (count := len(prompt[1])) > (limit := api.facts["max_model_len"]):
        raise too_long(limit, f"a prompt is too long: it has {count}")
    return prompt


def named(api: Api, fields: dict[str, Any]) -> str:
    """The model's prompt that a request names, or its default; for a query or a document, what the model calls so."""
    name, kind = fields.get("prompt_name"), fields.get("input_type")
    if kind is not None:
        if name is not None:
            raise ApiError(400, "prompt_name is given beside input_type; one is enough", "prompt_name")
        same = next((names for names in ROLES if kind in names), ())
        name = next((alias for alias in (kind, *same) if alias in api.facts["prompts"]), None if same else kind)
    try:
        return opening(api.facts, name)
    except ValueError as error:
        which = "prompt_name" if kind is None else "input_type"
        raise ApiError(400, str(error).replace("prompt_name", which, 1), which) from None


def pool(
    api: Api, fields: dict[str, Any], caller: Caller, prompts: Sequence[Prompt], seconds: Sequence[int | None] = ()
) -> list[bytes]:
    """The vector of each prompt; of `seconds` see `PoolingParams.second_text`."""
    dimensions, size = fields.get("dimensions"), api.facts["vector_size"]  # not all routes have it
    if dimensions is not None and not 1 <= dimensions <= size:
        raise ApiError(400, f"dimensions is {dimensions}; it must be from 1 to {size}", "dimensions")
    task, use = fields.get("task"), fields["use_activation"]
    if (raw := fields.get("raw_scores")) is not None:
        if use is not None:
            raise ApiError(400, "raw_scores is given beside use_activation; one is enough", "raw_scores")
        use = not raw
    params = PoolingParams(dimensions, use, task)
    if params.by_token:
        size = dimensions or (size if task == "token_embed" else len(api.facts["labels"]))
        count = size * sum(len(ids) for _, ids in prompts)
        if count > (most := api.config.max_token_numbers):
            message = f"the tokens' vectors have {count} numbers; one reply has at most {most} (max_token_numbers)"
            raise ApiError(400, message, "inputs" if "inputs" in fields else "input")
    starts = seconds if api.facts["token_types"] > 1 and seconds else [None] * len(prompts)
    rows = enumerate(zip(prompts, starts, strict=True))
    requests = [Vector(f"{caller.id}-{i}", ids, replace(params, second_text=at)) for i, ((_, ids), at) in rows]
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


def vectors(api: Api, fields: dict[str, Any], caller: Caller, kind: str, key: str) -> dict[str, Any]:
    """The reply of /v1/embeddings (`kind` "embedding") and /pooling: numbers, or their float32 bytes in base64."""
    prompts, by_token = inputs(api, fields, caller), PoolingParams(task=fields.get("task")).by_token
    all_pooled = pool(api, fields, caller, prompts)
    as_numbers = fields["encoding_format"] == "float"
    values = shown(prompts, all_pooled, by_token) if as_numbers else map(in_base64, all_pooled)
    return listed(fields, caller, prompts, [{"object": kind, "index": i, key: value} for i, value in enumerate(values)])


def shown(prompts: Sequence[Prompt], all_pooled: list[bytes], by_token: bool) -> list[Any]:
    """The numbers of each prompt's vector, or of its tokens' vectors."""
    values: list[Any] = []
    for data, (_, ids) in zip(all_pooled, prompts, strict=True):
        values.append(numbers_by_token(data, len(ids)) if by_token else numbers(data))
        if by_token:  # which are many
            time.sleep(0)
    return values


def in_base64(pooled: bytes) -> str:
    return base64.b64encode(pooled).decode()


# --- what they take --------------------------------------------------------------------------------------------------


def texts(value: Any, context: CheckContext, must: str = "a string or a list of strings") -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) and text for text in listed):
        raise ValueError(f"it must be {must}, none of them empty")
    if len(listed) > (most := context.config.max_prompts):
        raise ValueError(f"it has {len(listed)} texts; at most {most} are allowed (max_prompts)")
    return listed


def documents(value: Any, context: CheckContext) -> list[str]:
    for document in value if isinstance(value, list) else ():
        if isinstance(document, dict):
            checks.known_keys(document, ("text",), context)
    plain = [one.get("text") if isinstance(one, dict) else one for one in value] if isinstance(value, list) else None
    return texts(plain, context, "a list of strings, or of objects with a text")


TEXTS, TEXT = shared.shown(anyOf=shared.TEXT_OR_TEXTS), shared.STRING
DOCUMENT = {"type": "object", "required": ["text"], "properties": {"text": TEXT}, "additionalProperties": False}
DOCUMENTS = shared.shown(type="array", items={"anyOf": [TEXT, DOCUMENT]}, minItems=1)
INPUT = Field("input", shared.PROMPT, None, checks.prompts, shared.ONE_OR_MORE)
SIZE = Field("dimensions", int, about="Of the vector, from 1 to the model's own.")
FORM = Field("encoding_format", Literal["float", "base64"], "float")
ACTIVATION = Field("use_activation", bool, about=shared.attributes_of(PoolingParams)["use_activation"])
NAME = Field("prompt_name", str, about='Of the prompt that goes before each text, or ""; null: the model\'s default.')
LAST = (*shared.CUT, shared.PRIORITY)
TASKS = Literal["embed", "classify", "score", "token_embed", "token_classify"]
TASK = Field("task", TASKS, about="What this server does with prompts, or with each of their tokens.")
TRUNCATE = Field("truncate", bool | Literal["NONE", "START", "END"], about="Cut what is too long, at its end or START.")
SIDE = Field("truncation_side", Literal["left", "right", "Left", "Right"], None, lambda side, _: side.lower())
KIND = Field("input_type", str, about="query or document: the prompt that the model has for it, or its default.")
INSTRUCTION = Field("instruction", str, about="Replaces the model's own, where it scores pairs.")
FIRST = (shared.MODEL, INPUT, ACTIVATION, shared.SPECIAL_TOKENS)
SIZED = (SIZE, FORM, *LAST)
EMBED = ("embed",)  # tasks of the server that a route needs one of
PAIRS = ("embed", "score")
VECTORS = ("embed", "score", "classify")
EMBEDDED = (*FIRST, NAME, KIND, TRUNCATE, *SIZED)
EMBEDDINGS = Face("embeddings", ("/v1/embeddings",), EMBEDDED, embeddings, "embd-", ("input",), EMBED)
COHERE_EMBEDDINGS = Face(
    "cohere_embeddings", ("/v2/embed",),
    (
        shared.MODEL, ACTIVATION, Field("texts", TEXTS, None, texts), KIND, TRUNCATE._replace(default="END"), SIZE,
        Field("embedding_types", list[Literal["float", "base64"]], about="In which forms vectors come; float."), *LAST,
    ),
    cohere_embeddings, "embd-", ("texts",), EMBED, {"images": (), "inputs": ()},
    aliases={"output_dimension": "dimensions", "max_tokens": "truncate_prompt_tokens"},
)  # fmt: skip
TEI = {"input": "inputs", "normalize": "use_activation", "truncation_direction": "truncation_side"}
PLAIN = (shared.MODEL, INPUT._replace(name="inputs"), NAME, TRUNCATE, SIZE, shared.CUT[0], SIDE, LAST[-1])
NORMAL, NOT_NORMAL = ((ACTIVATION._replace(default=value), *PLAIN) for value in (True, False))  # as TEI
PLAIN_EMBEDDINGS = Face("embed", ("/embed",), NORMAL, plain_embeddings, "embd-", ("inputs",), EMBED, aliases=TEI)
TOKEN_EMBEDDINGS = Face(
    "embed_all", ("/embed_all",), NOT_NORMAL, partial(plain_embeddings, task="token_embed"), "embd-", ("inputs",),
    EMBED, aliases=TEI,
)  # fmt: skip
POOLING = Face("pooling", ("/pooling",), (*FIRST, NAME, TASK, *SIZED), pooling, "pool-", ("input",), VECTORS)
CLASSIFY = Face("classify", ("/classify",), (*FIRST, *LAST), classify, "classify-", ("input",), ("classify", "score"))
SCORED = (
    shared.MODEL, ACTIVATION,
    Field("text_1", TEXTS, None, texts, "A text, or as many as text_2 has; vLLM: queries."),
    Field("text_2", TEXTS, None, texts, "A text or several; vLLM: documents."),
    NAME, INSTRUCTION, *LAST,
)  # fmt: skip
SCORE = Face(
    "score", ("/score", "/v1/score"), SCORED, score, "score-", ("text_1", "text_2"), PAIRS,
    aliases={"queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2"},
)  # fmt: skip
RERANKED = (
    shared.MODEL, ACTIVATION, Field("query", Annotated[str, Meta(min_length=1)]),
    Field("documents", DOCUMENTS, None, documents, "Texts, or objects with a text; or else `texts` is needed."),
    Field("texts", TEXTS, None, texts, "TEI's name of documents; the reply is then a list, as TEI's."),
    Field("top_n", shared.Count, 0, about="How many to return; 0 is all."),
    Field("return_documents", bool, about="By default they come back, but not TEI's texts."),
    Field("max_tokens_per_doc", shared.Tokens, about="What follows is cut from each document."),
    Field("raw_scores", bool, about="The model's logits; TEI's use_activation: false."),
    NAME, INSTRUCTION, TRUNCATE, shared.CUT[0], SIDE, shared.PRIORITY,
)  # fmt: skip
RERANK = Face(
    "rerank", ("/rerank", "/v1/rerank", "/v2/rerank"), RERANKED, rerank, "rerank-", ("query",), PAIRS,
    {"rank_fields": (["text"],), "max_chunks_per_doc": (), "relevant_spans": ()},
    aliases={"truncation_direction": "truncation_side", "truncation": "truncate", "return_text": "return_documents"},
)  # fmt: skip
FACES = (EMBEDDINGS, POOLING, CLASSIFY, SCORE, RERANK, COHERE_EMBEDDINGS, PLAIN_EMBEDDINGS, TOKEN_EMBEDDINGS)
