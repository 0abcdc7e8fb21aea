"""The benchmark of embeddings for `bench.py`: `LLM.embed` on short texts, with sentence-transformers taking turns."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench_engine import Peer
from config import VERSION

LENGTHS = (10, 40)  # tokens of the shortest text and of the longest
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers


def short_texts(count: int, vocab_size: int) -> list[str]:
    """Texts of `LENGTHS` made-up words, each of which is one token of the tokenizer that `make_model` writes."""
    rng = random.Random(0)
    return [" ".join(f"w{rng.randrange(1, vocab_size)}" for _ in range(rng.randint(*LENGTHS))) for _ in range(count)]


def make_embedder(folder: Path, dimensions: int) -> None:
    """Add to a folder of `make_model` what sentence-transformers saves with a model; its tokenizer splits at spaces.

    A text becomes the last token's hidden state [dimensions], divided by its length, as in Qwen3-Embedding.
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
        ("1_Pooling/config.json", {"word_embedding_dimension": dimensions, "pooling_mode_lasttoken": True}),
        ("sentence_bert_config.json", {"max_seq_length": 512}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


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
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for run in engines.values():
        run(texts, 0)
    turns = deque(engines.items())
    for _ in range(repeats):
        for name, run in turns:
            answers[name].append(run(texts, 0))
        turns.rotate()  # in a virtual machine, the first engine of a round may get other cores
    reference, *_ = answers.values()
    vectors, figures = np.array(reference[0]["tokens"]), []
    for name, found in answers.items():
        others, times = np.array(found[0]["tokens"]), [answer["seconds"] for answer in found]
        figures.append({
            "engine": name, "texts": len(texts), "texts/s": round(len(texts) / statistics.median(times), 1),
            "min": round(len(texts) / max(times), 1), "max": round(len(texts) / min(times), 1),
            "CPU ms/text": round(1e3 * statistics.median(answer["cpu"] for answer in found) / len(texts), 2),
            "of Manta": of(reference, found, "seconds"), "of Manta by CPU": of(reference, found, "cpu"),
            "least cosine": round(float((vectors * others).sum(1).min()), 6),
            "largest difference": float(f"{np.abs(vectors - others).max():.2g}"),
        })  # fmt: skip
    return figures


def of(reference: list[dict[str, Any]], found: list[dict[str, Any]], key: str) -> float:
    """An engine's speed as a share of the reference's, the median of the rounds."""
    return round(statistics.median(a[key] / b[key] for a, b in zip(reference, found, strict=True)), 3)
