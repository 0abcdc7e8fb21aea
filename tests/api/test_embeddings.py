"""The routes that sample nothing, with a scripted engine: their shapes, their checks, and which task they need."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import pytest
from flask.testing import FlaskClient

from outputs import cosine
from plan import EngineOutput
from scripted import ANSWERING, FACTS, MISSING, TOKENIZER, ScriptedClient, client_of, post, refusal, refused, vector_of

EMBEDDINGS = "/v1/embeddings"
TASKS = {
    EMBEDDINGS: ("embed",), "/pooling": ("embed", "score", "classify"), "/classify": ("classify", "score"),
    "/score": ("embed", "score"), "/rerank": ("embed", "score"), "/v2/embed": ("embed",), "/embed": ("embed",),
    "/embed_all": ("embed",),
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": "a"}, "/pooling": {"input": "a"}, "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"}, "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"], "input_type": "search_query"}, "/embed": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
}  # fmt: skip


def serving(
    engine: ScriptedClient, task: str = "embed", labels: Any = ("bad", "good", "odd"), **config: Any
) -> FlaskClient:
    return client_of(engine, FACTS | {"task": task, "labels": labels, "vector_size": 32}, **config)


def floats(ids: list[int]) -> list[float]:
    return array("f", vector_of(ids)).tolist()


@pytest.mark.parametrize(
    "given", ["To be", ["To be", "or not"], [5, 6, 7], [[5, 6, 7], [8]], ["To be"] * 3]
)  # fmt: skip
def test_embeddings(engine: ScriptedClient, given: Any) -> None:
    http_client = serving(engine)
    answer = post(http_client, EMBEDDINGS, input=given).json
    prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    ids = [TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    expected = [{"object": "embedding", "index": i, "embedding": floats(row)} for i, row in enumerate(ids)]
    assert answer["data"] == expected and answer["object"] == "list" and answer["model"] == "manta"
    count = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    coded = post(http_client, EMBEDDINGS, input=given, encoding_format="base64").json["data"]
    assert [base64.b64decode(entry["embedding"]) for entry in coded] == [vector_of(row) for row in ids]
    assert all(pooling.dimensions is None for _, pooling in engine.pooled)


def test_what_is_asked_of_the_vectors_reaches_the_engine(engine: ScriptedClient) -> None:
    post(serving(engine), EMBEDDINGS, input="a", dimensions=8, use_activation=False, user="x")
    ((_, pooling),) = engine.pooled
    assert (pooling.dimensions, pooling.use_activation) == (8, False)


def test_classify(engine: ScriptedClient) -> None:
    answer = post(serving(engine, "classify"), "/classify", input=[[5, 6], [0, 1, 2]]).json
    assert answer["data"] == [
        {"index": 0, "label": "good", "probs": [2.0, 5.0, -0.5], "num_classes": 3},
        {"index": 1, "label": "bad", "probs": [3.0, 0.0, -0.5], "num_classes": 3},
    ]


@pytest.mark.parametrize("route", ["/score", "/v1/score"])
def test_score_is_the_cosine_of_embeddings(engine: ScriptedClient, route: str) -> None:
    answer = post(serving(engine), route, text_1="one text", text_2=["two", "one text"]).json
    first, second = (floats(TOKENIZER.encode(text)) for text in ("one text", "two"))
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([cosine(first, second), 1.0])
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(0, "score"), (1, "score")]
    assert len(engine.pooled) == 3  # the one text is embedded once


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_score_knows_vllms_other_names(engine: ScriptedClient, names: tuple[str, str]) -> None:
    body = {"text_1": MISSING, "text_2": MISSING, names[0]: "one text", names[1]: ["two", "one text"]}
    data = post(serving(engine), "/score", **body).json["data"]
    assert data == post(serving(engine), "/score", text_1="one text", text_2=["two", "one text"]).json["data"]
    for first in (True, False):  # whichever comes first
        both = {"text_1": "a", names[0]: "a"} if first else {names[0]: "a", "text_1": "a"}
        assert refusal(post(serving(engine), "/score", **both, text_2="b"))["param"] in both
    assert refusal(post(serving(engine), "/score", **{names[0]: 5}, text_2="b"))["param"] == names[0]


@pytest.mark.parametrize(("task", "same"), [("embed", ["embed", "token_embed"]),
                                            ("classify", ["classify", "token_classify"]),
                                            ("score", ["score", "classify", "token_classify"])])  # fmt: skip
def test_pooling_may_name_the_task(engine: ScriptedClient, task: str, same: list[str]) -> None:
    for named in ("embed", "classify", "score", "token_embed", "token_classify"):
        response = post(serving(engine, task), "/pooling", input="a", task=named)
        if named in same:
            assert response.status_code == 200
        else:
            assert refusal(response)["param"] == "task"


def test_a_classifier_scores_pairs(engine: ScriptedClient) -> None:
    answer = post(serving(engine, "score", ("relevant",)), "/score", text_1=["a", "b"], text_2=["c", "d"]).json
    assert [ids for ids, _ in engine.pooled] == [TOKENIZER.encode_pair("a", "c")[0], TOKENIZER.encode_pair("b", "d")[0]]
    assert [entry["score"] for entry in answer["data"]] == [floats(ids)[0] for ids, _ in engine.pooled]


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(engine: ScriptedClient, route: str) -> None:
    documents = ["x", {"text": "a longer text of more tokens"}, "x", "some words"]
    http_client = serving(engine, "score", ("relevant",))
    answer = post(http_client, route, query="q", documents=documents).json
    scores = [(result["index"], result["relevance_score"]) for result in answer["results"]]
    texts = ("x", documents[1]["text"], "x", "some words")
    lengths = [float(len(TOKENIZER.encode_pair("q", text)[0])) for text in texts]
    assert scores == sorted(enumerate(lengths), key=lambda item: (-item[1], item[0]))
    assert answer["results"][0]["document"] == {"text": documents[1]["text"]}
    count = int(sum(lengths))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    few = post(http_client, route, query="q", documents=documents, top_n=2, return_documents=False).json["results"]
    assert few == [{"index": i, "relevance_score": score} for i, score in scores[:2]]


@pytest.mark.parametrize("task", ["generate", "embed", "score", "classify"])
def test_each_route_needs_its_task(engine: ScriptedClient, task: str) -> None:
    http_client = serving(engine, task)
    for route, body in GOOD.items():
        response = post(http_client, route, **body)
        if task in TASKS[route]:
            assert response.status_code == 200
        else:
            assert f"task is {task}" in refusal(response)["message"]
    for route in ANSWERING if task != "generate" else ():
        assert f"task is {task}" in refused(http_client, route)


@pytest.mark.parametrize("route", [EMBEDDINGS, "/pooling", "/classify"])
def test_a_prompt_loses_its_last_tokens_where_asked_to(engine: ScriptedClient, route: str) -> None:
    http_client, ids = serving(engine, TASKS[route][0]), list(range(10, 110))
    for fields, kept in (
        ({"truncate_prompt_tokens": 5}, ids[:5]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ({"truncate_prompt_tokens": -1}, ids[:64]),  # nothing follows that would need room
    ):
        assert post(http_client, route, input=[ids, ids[:3]], **fields).json["usage"]["prompt_tokens"] == len(kept) + 3
        assert [ids for ids, _ in engine.pooled] == [kept, ids[:3]], fields
        engine.pooled.clear()
    text = "one fish, two fish"
    post(http_client, route, input=text, truncate_prompt_tokens=3)
    assert engine.pooled[0][0] == TOKENIZER.encode(text)[:3]


@pytest.mark.parametrize("task", ["embed", "score"])
def test_texts_that_are_compared_are_cut_where_asked_to(engine: ScriptedClient, task: str) -> None:
    http_client, long = serving(engine, task, ("relevant",)), "two kings " * 200
    answer = post(http_client, "/score", text_1="a word", text_2=long, truncate_prompt_tokens=9).json
    word, kings = TOKENIZER.encode("a word"), TOKENIZER.encode(long)
    expected = [word, kings[:9]] if task == "embed" else [word + kings[: 9 - len(word)]]
    assert [ids for ids, _ in engine.pooled] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    engine.pooled.clear()
    cut = {"truncate_prompt_tokens": 9, "truncation_side": "left"}
    assert post(http_client, "/rerank", query=long, documents=["a word"], **cut).json["usage"]["total_tokens"] > 0
    expected = [kings[-9:], word] if task == "embed" else [kings[len(word) - 9 :] + word]
    assert [ids for ids, _ in engine.pooled] == expected
    if task == "score":
        error = refusal(post(http_client, "/score", text_1="a word", text_2=long, truncate_prompt_tokens=1))
        assert "it must be at least 2" in error["message"]  # a token of each
    for body in ({"text_1": "a", "text_2": long}, {"text_1": long * 10, "text_2": "b"}):
        error = refusal(post(http_client, "/score", **body))
        assert error["code"] == "context_length_exceeded"


SAID = {"prompts": {"query": "Find: ", "none": ""}, "default_prompt_name": "query", "cuts_texts": True}


@pytest.mark.parametrize("route", [EMBEDDINGS, "/pooling"])
def test_texts_come_after_the_models_prompt(engine: ScriptedClient, route: str) -> None:
    http_client = client_of(engine, FACTS | SAID | {"task": "embed", "labels": (), "vector_size": 32})
    for fields, before in (({}, "Find: "), ({"prompt_name": "query"}, "Find: "), ({"prompt_name": "none"}, ""),
                           ({"prompt_name": ""}, ""), ({"prompt_name": None}, "Find: ")):  # fmt: skip
        post(http_client, route, input=["To be", "or"], **fields)
        post(http_client, route, input=[5, 6], **fields)
        assert [ids for ids, _ in engine.pooled] == [*map(TOKENIZER.encode, (f"{before}To be", f"{before}or")), [5, 6]]
        engine.pooled.clear()
    error = refusal(post(http_client, route, input="a", prompt_name="passage"))
    assert error["param"] == "prompt_name" and "'passage'; this model has 'query', 'none'" in error["message"]
    assert refusal(post(serving(engine), route, input="a", prompt_name="a"))["message"].endswith("'' asks for none")
    post(http_client, "/rerank", query="q", documents=["d"])
    assert [ids for ids, _ in engine.pooled] == [TOKENIZER.encode("Find: q"), TOKENIZER.encode("Find: d")]
    assert post(http_client, "/tokenize", prompt="To be").json["tokens"] == TOKENIZER.encode("To be")


@pytest.mark.parametrize("route", ["/score", "/rerank"])
def test_pairs_begin_with_the_models_prompt(engine: ScriptedClient, route: str) -> None:
    """As in a CrossEncoder of sentence-transformers: the prompt goes before the first text alone."""
    http_client = client_of(engine, FACTS | SAID | {"task": "score", "labels": ("relevant",), "vector_size": 32})
    for fields, before in (({}, "Find: "), ({"prompt_name": "query"}, "Find: "), ({"prompt_name": ""}, "")):
        post(http_client, route, **GOOD[route], **fields)
        assert [ids for ids, _ in engine.pooled] == [TOKENIZER.encode_pair(f"{before}a", "b")[0]]
        engine.pooled.clear()
    assert refusal(post(http_client, route, **GOOD[route], prompt_name="passage"))["param"] == "prompt_name"


def test_long_texts_are_cut_where_sentence_transformers_does(
    engine: ScriptedClient, caplog: pytest.LogCaptureFixture
) -> None:
    http_client = client_of(engine, FACTS | SAID | {"task": "embed", "labels": (), "vector_size": 32})
    text = "two kings " * 60
    for _ in range(2):
        assert post(http_client, EMBEDDINGS, input=text).json["usage"]["prompt_tokens"] == 64
    assert engine.pooled[0][0] == TOKENIZER.encode("Find: " + text)[:64]
    assert caplog.text.count("texts of more than 64 tokens, the most that this model embeds, are cut") == 1
    post(http_client, EMBEDDINGS, input=text, truncate_prompt_tokens=9)
    assert engine.pooled[-1][0] == TOKENIZER.encode("Find: " + text)[:9]
    assert refusal(post(http_client, EMBEDDINGS, input=[5] * 65))["code"] == "context_length_exceeded"


LONG = [5] * 65
BAD = [
    (EMBEDDINGS, "input", value)
    for value in ("", [], [[]], [""], 5, {"a": 1}, [1.5], ["a", 1], [-1], [1024], [[1], [2**40]], [True], None)
] + [
    (EMBEDDINGS, "encoding_format", "int8"),
    *((EMBEDDINGS, "dimensions", value) for value in (0, 33)),
    (EMBEDDINGS, "priority", 1),
    *(("/score", name, value) for name in ("text_1", "text_2") for value in ("", [], [1], 5, [""], None)),
    ("/score", "text_1", ["a", "b"]),
    *(("/rerank", "documents", value) for value in ("a", [], [1], [{}], [{"text": ""}], [{"text": "a", "x": 1}], None)),
    *(("/rerank", "query", value) for value in ("", None)),
    *(("/rerank", "top_n", value) for value in (-1, 1.5, "2", 2**40)),
    *(
        ("/rerank", name, value)
        for name, value in (
            ("max_chunks_per_doc", 10),
            ("rank_fields", ["title"]),
            ("relevant_spans", {"enabled": True}),
            ("truncate", "MID"),
            ("max_tokens_per_doc", 0),
            ("texts", ["b"]),
            ("instruction", "Say"),
            ("documents", ["a"] * 10_000),
        )
    ),
    *(
        (EMBEDDINGS, name, value)
        for name, value in (
            ("input_type", "code"),
            ("truncate", 5),
            ("truncate_prompt_tokens", 2**31),
            ("truncate_prompt_tokens", 65),
        )
    ),
    *(
        ("/v2/embed", name, value)
        for name, value in (
            ("texts", []),
            ("texts", ["a", ""]),
            ("images", ["data:"]),
            ("inputs", [{}]),
            ("embedding_types", ["int8"]),
            ("input_type", "clustering"),
        )
    ),
    *(
        ("/embed", name, value)
        for name, value in (("truncation_side", "up"), ("truncate", 1), ("prompt_name", "x"), ("dimensions", 33))
    ),
]


def test_bad_values_are_400_and_name_the_field(engine: ScriptedClient) -> None:
    http_client = serving(engine)
    for route, name, value in BAD:
        error = refusal(post(http_client, route, **(GOOD[route] | {name: value})))
        names = {"input", "prompt"} if name == "input" else {name}  # ids are checked against the vocabulary as prompts
        assert error["param"] in names, (route, name, value, error)
    assert not engine.pooled
    for route, name, value, must in (
        (EMBEDDINGS, "dimensions", 0, "from 1 to 32"),
        ("/rerank", "query", "", "a string that is not empty"),
        ("/rerank", "documents", [], "a list of strings, or of objects with a text, none of them empty"),
        ("/rerank", "documents", "a", "a list of strings, or of objects with a text, none of them empty"),
    ):
        error = refusal(post(http_client, route, **(GOOD[route] | {name: value})))
        assert error["message"].endswith("it must be " + must)
    error = refusal(post(http_client, EMBEDDINGS, input=LONG))
    assert error["code"] == "context_length_exceeded" and "65" in error["message"]
    assert post(http_client, EMBEDDINGS, input=LONG[1:]).status_code == 200  # as long as the context: nothing follows
    assert "max_prompts" in refusal(post(serving(engine, max_prompts=2), EMBEDDINGS, input=["a"] * 3))["message"]
    assert "max_queue" in refusal(post(serving(engine, max_queue=2), EMBEDDINGS, input=["a"] * 3), 429)["message"]


@pytest.mark.parametrize(("fault", "status"), [(False, 400), (True, 503)])
def test_an_engine_that_refuses_or_fails(
    engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch, fault: bool, status: int
) -> None:
    def add_request(request: Any, stream: Any) -> None:
        stream.put(EngineOutput(request.request_id, [], "error", error="no", finished=True, engine_fault=fault))

    monkeypatch.setattr(engine, "add_request", add_request)
    assert refusal(post(serving(engine), EMBEDDINGS, input="a"), status)["message"] == "no"


def test_cosine() -> None:
    assert cosine([3.0, 4.0], [6.0, 8.0]) == pytest.approx(1.0)
    assert cosine([1.0, 0.0], [0.0, 2.0]) == 0.0 and cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
    assert cosine([1.0, 1.0], [-1.0, 0.0]) == pytest.approx(-math.sqrt(0.5))
