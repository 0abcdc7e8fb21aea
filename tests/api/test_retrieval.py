"""The bodies of Cohere's, Jina's, NIM's and TEI's clients for embeddings and reranking, with a scripted engine."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from scripted import FACTS, TOKENIZER, ScriptedClient, client_of, post, refusal, vector_of
from test_embeddings import EMBEDDINGS, SAID, floats, serving
from text.prompts import QWEN3_INSTRUCTION, QWEN3_PAIR
from tokenizer import LONG_TEXT, Tokenizer

LONG = "two kings " * 60  # more tokens than the context of 64 holds
IDS = TOKENIZER.encode(LONG)
RANKER = {"task": "score", "labels": ("relevant",), "vector_size": 32}


def asked(engine: ScriptedClient) -> list[list[int]]:
    """The prompts that the engine got since the last call."""
    prompts = [ids for ids, _ in engine.pooled]
    engine.pooled.clear()
    return prompts


def test_rerank_as_tei_has_it(engine: ScriptedClient) -> None:
    http_client, texts = client_of(engine, FACTS | RANKER), ["x", "a longer text of more tokens"]
    body = {"query": "q", "texts": texts}
    reply = post(http_client, "/rerank", **body).json
    scores = [float(len(TOKENIZER.encode_pair("q", text)[0])) for text in texts]
    assert reply == [{"index": 1, "score": scores[1]}, {"index": 0, "score": scores[0]}]
    assert [params.use_activation for _, params in engine.pooled] == [None, None]
    shown = post(http_client, "/rerank", **body, return_text=True, raw_scores=True, top_n=1).json
    assert shown == [{"index": 1, "score": scores[1], "text": texts[1]}]
    assert engine.pooled[-1][1].use_activation is False
    error = refusal(post(http_client, "/rerank", **body, documents=["x"]))
    assert error["param"] == "texts" and "beside documents" in error["message"]
    for missing in ({}, {"documents": None}, {"texts": None}):
        error = refusal(post(http_client, "/v1/rerank", query="q", **missing))
        assert (error["param"], error["code"]) == ("documents", "missing_required_parameter")
    error = refusal(post(http_client, "/rerank", **body, raw_scores=True, use_activation=True))
    assert error["param"] == "raw_scores"


def test_rerank_as_cohere_and_jina_have_it(engine: ScriptedClient) -> None:
    http_client = client_of(engine, FACTS | RANKER)
    body = {"model": "manta", "query": "q", "documents": [LONG, {"text": "x"}], "rank_fields": ["text"], "top_n": 9}
    reply = post(http_client, "/v2/rerank", **body, max_tokens_per_doc=5).json
    assert [result["document"] for result in reply["results"]] == [{"text": LONG}, {"text": "x"}]  # as they were
    assert asked(engine)[0] == TOKENIZER.encode("q") + IDS[:5]
    assert reply["meta"]["tokens"]["input_tokens"] == reply["usage"]["total_tokens"]
    special = "one<|end|>two kings and a queen"  # its special token stays a token
    ids = TOKENIZER.encode(special)
    assert TOKENIZER.special_ids & {*ids[:-2]}
    post(http_client, "/rerank", query="q", documents=[special], max_tokens_per_doc=len(ids) - 2)
    assert asked(engine) == [TOKENIZER.encode("q") + ids[:-2]]
    assert post(http_client, "/v2/rerank", **body, max_tokens_per_doc=4096, truncation=True).status_code == 200
    asked(engine)
    left = {"truncate": True, "truncation_direction": "Left"}
    few = {"truncate": True, "truncate_prompt_tokens": 9}
    for how, kept in (({"truncation": True}, IDS[:63]), ({"truncate": "END"}, IDS[:63]), (left, IDS[-63:]),
                      ({"truncate": "START"}, IDS[-63:]), (few, IDS[:8])):  # fmt: skip
        post(http_client, "/v1/rerank", **body, **how)
        assert asked(engine)[0] == TOKENIZER.encode("q") + kept, how
    for how in ({}, {"truncation": False}, {"truncate": "NONE"}):
        assert refusal(post(http_client, "/v1/rerank", **body, **how))["code"] == "context_length_exceeded"
    error = refusal(post(http_client, "/rerank", **body, truncate=False, truncate_prompt_tokens=9))
    assert error["param"] == "truncate_prompt_tokens"


def test_pairs_are_put_into_the_models_template(engine: ScriptedClient) -> None:
    http_client = client_of(engine, FACTS | RANKER | {"pair_template": "qwen3", "max_model_len": 400})
    for route, body in (("/rerank", {"query": "q", "documents": ["d"]}), ("/score", {"text_1": "q", "text_2": "d"})):
        for said, instruction in (({}, QWEN3_INSTRUCTION), ({"instruction": "Say {} it"}, "Say {} it")):
            post(http_client, route, **body, **said)
            assert asked(engine) == [TOKENIZER.encode(QWEN3_PAIR.format(instruction, "q", "d"))]
    post(http_client, "/rerank", query="q", documents=[LONG * 3], truncate=True)
    end = TOKENIZER.encode(QWEN3_PAIR[QWEN3_PAIR.rindex("{}") + 2 :])
    ((*_, ids),) = [asked(engine)]
    assert len(ids) == 400 and ids[-len(end) :] == end
    error = refusal(post(http_client, "/rerank", query="q", documents=["d"], truncate_prompt_tokens=9))
    assert error["param"] == "truncate_prompt_tokens" and "it must be at least" in error["message"]
    whole = QWEN3_PAIR.format(QWEN3_INSTRUCTION, "q", "")
    for route, body in (
        ("/rerank", {"query": whole, "documents": ["d"]}),
        ("/score", {"text_1": whole, "text_2": "d"}),
    ):
        assert post(http_client, route, **body).status_code == 200
        error = refusal(post(http_client, route, **body, instruction="Say"))
        assert error["param"] == "instruction" and "'Say'; the query has one" in error["message"]


BOTH, OWN = (
    {"query": "Q: ", "passage": "P: "},
    {"search_query": "S: ", "query": "Q: ", "document": "", "clustering": "C: "},
)


@pytest.mark.parametrize(
    ("prompts", "kind", "before"),
    [(BOTH, "query", "Q: "), (BOTH, "search_query", "Q: "), (BOTH, "search_document", "P: "), (OWN, "passage", ""),
     (OWN, "search_query", "S: "), (OWN, "clustering", "C: "), (OWN, "document", ""), ({}, "corpus", "")],
)  # fmt: skip
def test_an_input_type_names_a_prompt(engine: ScriptedClient, prompts: Any, kind: str, before: str) -> None:
    http_client = client_of(engine, FACTS | {"task": "embed", "labels": (), "vector_size": 32, "prompts": prompts})
    post(http_client, EMBEDDINGS, input="a", input_type=kind)
    post(http_client, "/v2/embed", texts=["a"], input_type=kind)
    assert asked(engine) == [TOKENIZER.encode(before + "a")] * 2
    error = refusal(post(http_client, EMBEDDINGS, input="a", input_type="classification"))
    assert error["param"] == "input_type" and error["message"].startswith("input_type is 'classification'; this model")
    post(http_client, "/rerank", query="q", documents=["d"])
    sides = ("Q: ", "P: ") if prompts is BOTH else ("Q: ", "") if prompts else ("", "")
    assert asked(engine) == [TOKENIZER.encode(sides[0] + "q"), TOKENIZER.encode(sides[1] + "d")]
    post(http_client, "/score", text_1="q", text_2="d")
    assert asked(engine) == [TOKENIZER.encode("q"), TOKENIZER.encode("d")]
    for route, body in (("/rerank", {"query": "q", "documents": ["d"]}), ("/score", {"text_1": "q", "text_2": "d"})):
        assert refusal(post(http_client, route, **body, use_activation=False))["param"] == "use_activation"
        assert post(http_client, route, **body, use_activation=True).status_code == 200  # a cosine is of such vectors
    assert refusal(post(http_client, "/rerank", query="q", texts=["d"], raw_scores=True))["param"] == "raw_scores"
    assert post(http_client, "/rerank", query="q", texts=["d"], raw_scores=False).status_code == 200
    error = refusal(post(http_client, EMBEDDINGS, input="a", input_type="code"))
    assert error["param"] == "input_type" and "'code'; this model has" in error["message"]
    error = refusal(post(http_client, EMBEDDINGS, input="a", input_type=kind, prompt_name=""))
    assert error["param"] == "prompt_name"


def test_embed_as_cohere_has_it(engine: ScriptedClient) -> None:
    http_client, texts = serving(engine), ["To be", LONG]
    body = {"model": "manta", "texts": texts, "input_type": "search_document", "output_dimension": 3}
    reply = post(http_client, "/v2/embed", **body, embedding_types=["float", "base64"]).json
    cut = [TOKENIZER.encode("To be"), IDS[:64]]
    assert reply["embeddings"]["float"] == [*map(floats, cut)] and reply["texts"] == texts
    assert [base64.b64decode(one) for one in reply["embeddings"]["base64"]] == [*map(vector_of, cut)]
    assert reply["response_type"] == "embeddings_by_type" and engine.pooled[0][1].dimensions == 3
    assert reply["meta"]["tokens"]["input_tokens"] == sum(map(len, cut))
    assert list(post(http_client, "/v2/embed", **body, truncate="START").json["embeddings"]) == ["float"]
    post(http_client, "/v2/embed", **body, max_tokens=7)
    assert asked(engine)[-3::2] == [IDS[-64:], IDS[:7]]
    assert refusal(post(http_client, "/v2/embed", **body, truncate="NONE"))["code"] == "context_length_exceeded"


def test_embed_as_tei_has_it(engine: ScriptedClient) -> None:
    http_client = serving(engine)
    for given, prompts in (("To be", ["To be"]), (["To be", "or"], ["To be", "or"]), ([5, 6], [[5, 6]])):
        ids = [TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        assert post(http_client, "/embed", inputs=given).json == [*map(floats, ids)]
        assert {(params.use_activation, params.task) for _, params in engine.pooled} == {(True, None)}
        assert asked(engine) == ids
    whole = {"normalize": False, "truncate": True, "truncation_direction": "Left", "dimensions": 2, "prompt_name": None}
    post(http_client, "/embed", inputs=LONG, **whole)
    assert engine.pooled[-1][0] == IDS[-64:] and engine.pooled[-1][1].use_activation is False
    assert refusal(post(http_client, "/embed", inputs=LONG))["code"] == "context_length_exceeded"
    facts = {
        "task": "embed",
        "labels": (),
        "vector_size": 32,
        "max_model_len": 60,
    }  # a warning that comes once names it
    cutting = client_of(engine, FACTS | SAID | facts)
    assert post(cutting, "/embed", inputs=LONG).status_code == 200  # as sentence-transformers does, unless told not to
    assert refusal(post(cutting, "/embed", inputs=LONG, truncate=False))["code"] == "context_length_exceeded"


def test_errors_spell_fields_as_the_request_does(engine: ScriptedClient) -> None:
    http_client = serving(engine)
    for route, body, words in (
        ("/embed", {}, "inputs is missing"), ("/embed", {"inputs": 5}, "inputs is 5"),
        ("/embed_all", {"input": 5}, "input is 5"),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 500}, "max_tokens is 500"),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 0}, "max_tokens is 0"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 33}, "output_dimension is 33"),
        ("/embed", {"inputs": "a", "normalize": "x"}, "normalize is 'x'"),
        ("/score", {"queries": ["a", "b"], "items": "c"}, "queries has 2 texts"),
        ("/rerank", {"query": "q", "inputs": ["a"]}, "the field 'inputs' is unknown"),
    ):  # fmt: skip
        error = refusal(post(http_client, route, **body))
        assert error["message"].startswith(words) and error["param"] in words.replace("'", "").split(), error


def test_vectors_of_tokens(engine: ScriptedClient) -> None:
    """The scripted engine has three numbers for each prompt: three tokens of one, or one of three."""
    http_client = serving(engine)
    assert post(http_client, "/embed_all", inputs=[[5, 6, 7], [8]]).json == [[[3.0], [5.0], [-0.5]], [[1.0, 8.0, -0.5]]]
    assert [params.use_activation for _, params in engine.pooled] == [False, False]  # TEI divides none by its length
    post(http_client, "/embed_all", inputs="a", normalize=True)
    assert engine.pooled[-1][1].use_activation is True
    body = {"input": [[5, 6, 7]], "task": "token_embed"}
    assert post(http_client, "/pooling", **body).json["data"][0]["data"] == [[3.0], [5.0], [-0.5]]
    coded = post(http_client, "/pooling", **body, encoding_format="base64").json["data"][0]["data"]
    assert base64.b64decode(coded) == vector_of([5, 6, 7])
    assert {params.task for _, params in engine.pooled} == {"token_embed"}
    asked(engine)
    small = serving(engine, max_token_numbers=95)
    for route, fields in (("/pooling", body), ("/embed_all", {"inputs": [5, 6, 7]})):
        assert (
            "have 96 numbers; one reply has at most 95 (max_token_n" in refusal(post(small, route, **fields))["message"]
        )
        assert post(small, route, **fields, dimensions=31).status_code == 200
    rewards = serving(engine, "classify", max_token_numbers=8)
    assert post(rewards, "/pooling", input=[5, 6], task="token_classify").status_code == 200
    assert "9 numbers" in refusal(post(rewards, "/pooling", input=[5, 6, 7], task="token_classify"))["message"]


@pytest.mark.parametrize("task", ["embed", "score"])
def test_many_documents(engine: ScriptedClient, task: str) -> None:
    http_client = serving(engine, task, ("relevant",), max_prompts=10_000, max_queue=20_000)
    assert len(post(http_client, "/rerank", query="q", documents=["x"] * 10_000).json["results"]) == 10_000


ROUTES = [("embed", EMBEDDINGS, {"input": ["y" * 50] * 180}), ("embed", "/embed_all", {"inputs": ["x"] * 4}),
          ("embed", "/score", {"text_1": "x", "text_2": ["y" * 50] * 180}),
          ("score", "/rerank", {"query": "q", "documents": ["y" * 50] * 180})]  # fmt: skip


@pytest.mark.parametrize(("task", "route", "body"), ROUTES)
def test_others_are_served_between_many_texts(
    engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch, task: str, route: str, body: dict[str, Any]
) -> None:
    http_client, pauses = serving(engine, task, ("relevant",)), []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    assert post(http_client, route, **body).status_code == 200
    characters = sum(map(len, body.get("input") or body.get("text_2") or body.get("documents") or ()))
    assert pauses.count(0) >= max(1, characters // (2 * LONG_TEXT)), pauses


@pytest.mark.parametrize("task", ["embed", "score"])
def test_texts_in_vain_do_not_become_tokens(engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """Neither behind one that is too long, nor where there is no room for so many."""
    encodings: list[Any] = []
    for name in ("encode", "encode_pair"):
        real = getattr(Tokenizer, name)
        monkeypatch.setattr(Tokenizer, name, lambda *args, real=real: encodings.append(args) or real(*args))
    body = {"text_1": "x", "text_2": ["y", LONG, *"abcdefg"]}
    assert refusal(post(serving(engine, task, ("one",)), "/score", **body))["code"] == "context_length_exceeded"
    assert len(encodings) == (3 if task == "embed" else 2)
    encodings.clear()
    small = serving(engine, task, ("one",), max_queue=2)
    refusal(post(small, "/score", text_1="x", text_2=["y"] * 3), 429)
    refusal(post(small, "/rerank", query="x", documents=["y"] * 3, max_tokens_per_doc=1), 429)
    assert not encodings
