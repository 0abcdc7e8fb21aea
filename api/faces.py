"""Every route that takes a body: a row for each, from the file of its face."""

from __future__ import annotations

from api.anthropic import COUNT_TOKENS, MESSAGES
from api.chat import CHAT
from api.completions import COMPLETIONS
from api.responses import INPUT_TOKENS, RESPONSES
from api.tokenize import DETOKENIZE, TOKENIZE
from api.vectors import (
    CLASSIFY,
    COHERE_EMBEDDINGS,
    EMBEDDINGS,
    PLAIN_EMBEDDINGS,
    POOLING,
    PREDICT,
    RERANK,
    SCORE,
    TOKEN_EMBEDDINGS,
)

FACES = (
    COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS, EMBEDDINGS, POOLING,
    CLASSIFY, SCORE, RERANK, COHERE_EMBEDDINGS, PLAIN_EMBEDDINGS, TOKEN_EMBEDDINGS, PREDICT,
)  # fmt: skip
