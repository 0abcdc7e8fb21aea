"""The replies of routes that sample nothing: embeddings, scores, ranks and classes, from the engine's vectors."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any


def numbers(pooled: bytes) -> list[float]:
    """The numbers of a vector, which travels in float32."""
    return array("f", pooled).tolist()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is all zeros."""
    lengths = math.hypot(*a) * math.hypot(*b)
    if not lengths:
        return 0.0
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths))  # rounding may pass 1


def vectors(kind: str, key: str, found: list[bytes], encoding_format: str) -> list[dict[str, Any]]:
    """The entries of /v1/embeddings (`kind` "embedding") and /pooling: numbers, or their float32 bytes in base64."""
    encode = numbers if encoding_format == "float" else lambda pooled: base64.b64encode(pooled).decode()
    return [{"object": kind, "index": i, key: encode(pooled)} for i, pooled in enumerate(found)]


def scores(found: list[float]) -> list[dict[str, Any]]:
    """The entries of /score."""
    return [{"object": "score", "index": i, "score": score} for i, score in enumerate(found)]


def ranks(found: list[float], documents: list[str], top_n: int, with_documents: bool) -> list[dict[str, Any]]:
    """The entries of /rerank: the `top_n` best documents, the best first, and among equals the first first."""
    best = sorted(range(len(found)), key=lambda i: (-found[i], i))[:top_n]
    return [
        {"index": i, "relevance_score": found[i]} | ({"document": {"text": documents[i]}} if with_documents else {})
        for i in best
    ]


def classes(found: list[bytes], labels: Sequence[str]) -> list[dict[str, Any]]:
    """The entries of /classify: each prompt's probabilities, and the label of the highest one."""
    entries = []
    for i, pooled in enumerate(found):
        probs = numbers(pooled)
        label = labels[max(range(len(probs)), key=probs.__getitem__)]
        entries.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return entries
