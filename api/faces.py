"""Every route that takes a body: a row for each, from the file of its face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from api.anthropic import COUNT_TOKENS, MESSAGES
from api.chat import CHAT
from api.checks import ApiError
from api.completions import COMPLETIONS
from api.responses import INPUT_TOKENS, RESPONSES
from api.tokenize import DETOKENIZE, TOKENIZE
from api.vectors import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE

FACES = (
    COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS, EMBEDDINGS, POOLING,
    CLASSIFY, SCORE, RERANK,
)  # fmt: skip


def error_body_of(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """How the API that this path is part of writes an error; so far only Anthropic's differs from OpenAI's."""
    return next(
        (face.error_body for face in FACES if any(f"{each}/" in f"{path}/" for each in face.paths)), ApiError.body
    )
