"""The benchmark of embeddings for `bench.py`: `LLM.embed` on short texts, with sentence-transformers taking turns."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from bench_engine import Peer, Peers, answer_turn, running
from bench_serve import serving
from config import VERSION
from made_models import SHAPES, make_model
from turns import in_turns, median_ratio, seconds_of

JSON = {"Content-Type": "application/json"}
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers


def short_texts(count: int, vocab_size: int, lengths: Sequence[int]) -> list[str]:
    """Texts of made-up words, each of which is one token of the tokenizer that `make_model` writes.

    Args:
        lengths: tokens of the shortest text and of the longest one.
    """
    rng, (least, most) = random.Random(0), lengths
    return [" ".join(f"w{rng.randrange(1, vocab_size)}" for _ in range(rng.randint(least, most))) for _ in range(count)]


def make_embedder(folder: Path, dimensions: int, pooling: str) -> None:
    """Add to a folder of `make_model` what sentence-transformers saves with a model; its tokenizer splits at spaces.

    A text becomes the last token's hidden state [dimensions] as in Qwen3-Embedding, or the mean of all as in MiniLM,
    divided by its length.

    Args:
        pooling: "lasttoken" or "mean_tokens".
    """
    import tokenizers

    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(MODULES, paths, strict=True))
    ]
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": dimensions, f"pooling_mode_{pooling}": True}),
        ("sentence_bert_config.json", {"max_seq_length": 512}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def embedders(
    shape: str, texts: int, lengths: list[int], peers: Peers, options: dict[str, Any]
) -> Iterator[tuple[str, list[str], list[Peer]]]:
    """A model with random weights, which is removed at the end; texts for it; and the other engines, which have it."""
    fields = SHAPES[shape] | {"dtype": options["dtype"]}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), fields)
        make_embedder(Path(folder), fields["hidden_size"], "mean_tokens" if shape == "minilm" else "lasttoken")
        with running(peers, folder, options, "--cache", folder) as others:
            yield folder, short_texts(texts, fields["vocab_size"], lengths), others


def compare_embeddings(
    shape: str, texts: int, lengths: list[int], repeats: int, peers: Peers, **options: Any
) -> list[dict[str, Any]]:
    """The figures of `bench.py embed`."""
    with embedders(shape, texts, lengths, peers, options) as (model, work, others):
        return embed_figures(model, work, repeats, options, others)


def compare_alone(shape: str, texts: int, lengths: list[int], peers: Peers, **options: Any) -> list[dict[str, Any]]:
    """The figures of `bench.py embed-one`: milliseconds of one text at a time, which each engine has in turn; Manta in
    this process, and over HTTP by a new connection."""
    from engine import LLM

    with embedders(shape, texts, lengths, peers, options) as (model, work, others):
        llm, arguments = LLM(model, **options), [word for key in options for word in (f"--{key}", str(options[key]))]
        with serving(model, arguments) as server:

            def ask(turn: int) -> None:
                with contextlib.closing(HTTPConnection("127.0.0.1", server.port)) as connection:
                    connection.request("POST", "/v1/embeddings", json.dumps({"input": work[turn - 1]}), JSON)
                    reply = connection.getresponse()
                    assert reply.read() and reply.status == 200

            runs: dict[str, Callable[[int], Any]] = {
                "Manta": lambda turn: llm.embed(work[turn - 1], use_tqdm=False), "Manta over HTTP": ask,
            }  # fmt: skip
            alone = [work[:1], *([text] for text in work)]
            runs |= {peer.name: functools.partial(answer_turn, peer, alone, 0) for peer in others}
            timed = {name: functools.partial(seconds_of, run) for name, run in runs.items()}
            results = in_turns(timed, len(work))
        return [
            {"engine": name, "p50 ms": round(1e3 * statistics.median(times), 2),
             "p99 ms": round(1e3 * statistics.quantiles(times, n=100)[-1], 2),
             "of Manta": median_ratio(times, results["Manta"])}
            for name, times in results.items()
        ]  # fmt: skip


def embed_figures(
    model: str, texts: list[str], repeats: int, options: dict[str, Any], peers: Sequence[Peer] = ()
) -> list[dict[str, Any]]:
    """Texts a second of each engine, offered all at once, and how far its vectors are from Manta's.

    A figure is the median of `repeats` rounds after one that warms up. "of Manta" is the median of the rounds' ratios.
    The CPU's seconds are those of the engine's process, all its threads together; a busy machine changes them less.

    Args:
        model: the folder of an embedder.
        texts: what to embed.
        repeats: turns of each engine.
        options: Manta's, fields of `EngineConfig`.
        peers: the other engines.
    """
    from engine import LLM

    llm = LLM(model, **options)

    def manta(texts: list[str], _: int) -> dict[str, Any]:
        begun, before = time.perf_counter(), time.process_time()
        vectors = [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]
        used, seconds = time.process_time() - before, time.perf_counter() - begun
        return {"seconds": seconds, "cpu": used, "tokens": vectors}

    engines: dict[str, Callable[..., dict[str, Any]]] = {f"Manta {VERSION}": manta}
    engines |= {peer.name: peer for peer in peers}
    runs = {name: functools.partial(answer_turn, run, [texts] * (repeats + 1), 0) for name, run in engines.items()}
    answers = in_turns(runs, repeats)
    reference, *_ = answers.values()
    vectors, figures = np.array(reference[0]["tokens"]), []
    for name, results in answers.items():
        others, times = np.array(results[0]["tokens"]), times_of(results, "seconds")
        figures.append({
            "engine": name, "texts": len(texts), "texts/s": round(len(texts) / statistics.median(times), 1),
            "min": round(len(texts) / max(times), 1), "max": round(len(texts) / min(times), 1),
            "CPU ms/text": round(1e3 * statistics.median(times_of(results, "cpu")) / len(texts), 2),
            "of Manta": median_ratio(times_of(reference, "seconds"), times),
            "of Manta by CPU": median_ratio(times_of(reference, "cpu"), times_of(results, "cpu")),
            "least cosine": round(float((vectors * others).sum(1).min()), 6),
            "largest difference": float(f"{np.abs(vectors - others).max():.2g}"),
        })  # fmt: skip
    return figures


def times_of(results: list[dict[str, Any]], key: str) -> list[float]:
    """Seconds of each turn, of one kind."""
    return [result[key] for result in results]
