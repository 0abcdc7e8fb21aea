"""Official clients of other services for embeddings and reranking, against a server of the demo that embeds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outputs import cosine
from served import serving

pytestmark = pytest.mark.full
TEXTS = ["To be, or not to be", "a king", "two kings and a fool"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("embedder"), "--task", "embed") as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def vectors(url: str) -> list[list[float]]:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        coded = client.embeddings.create(model="demo", input=TEXTS)  # in base64, which the client unpacks
        plain = client.embeddings.create(model="demo", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="demo", input=TEXTS[0], dimensions=8)
    for one, same in zip(plain.data, coded.data, strict=True):
        assert one.embedding == pytest.approx(same.embedding, abs=1e-6)
    assert len(short.data[0].embedding) == 8 and coded.usage.total_tokens > 0
    return [one.embedding for one in coded.data]


def test_cohere(url: str, vectors: list[list[float]]) -> None:
    cohere = pytest.importorskip("cohere")
    scores = [cosine(vectors[0], vector) for vector in vectors[1:]]
    options_of = {cohere.Client: {"return_documents": True}, cohere.ClientV2: {"max_tokens_per_doc": 4096}}
    for client, options in options_of.items():
        with client(api_key="none", base_url=url) as co:
            reply = co.rerank(model="demo", query=TEXTS[0], documents=TEXTS[1:], top_n=5, **options)
        found = {result.index: result.relevance_score for result in reply.results}
        assert [found[i] for i in (0, 1)] == pytest.approx(scores, abs=1e-5) and reply.meta.tokens.input_tokens > 0
        ranked = [result.relevance_score for result in reply.results]
        assert ranked == sorted(ranked, reverse=True)
        if "return_documents" in options:
            assert [result.document.text for result in reply.results] == [TEXTS[1 + r.index] for r in reply.results]
    with cohere.ClientV2(api_key="none", base_url=url) as co:
        reply = co.embed(model="demo", texts=TEXTS, input_type="search_document", embedding_types=["float", "base64"])
        with pytest.raises(cohere.BadRequestError, match="input_type"):
            co.embed(model="demo", texts=TEXTS, input_type="clustering", embedding_types=["float"])
    for one, vector in zip(reply.embeddings.float_, vectors, strict=True):
        assert one == pytest.approx(vector, abs=1e-5)
    assert reply.texts == TEXTS and len(reply.embeddings.base64) == 3


def test_huggingface_hub(url: str, vectors: list[list[float]]) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(f"{url}/embed")
    for options in ({}, {"normalize": True, "truncate": True, "truncation_direction": "right"}):
        rows = client.feature_extraction(TEXTS, **options)
        assert rows.shape == (3, len(vectors[0]))
        assert rows.tolist() == [pytest.approx(vector, abs=1e-5) for vector in vectors]
    assert InferenceClient(f"{url}/embed_all").feature_extraction(TEXTS[0]).ndim == 3
