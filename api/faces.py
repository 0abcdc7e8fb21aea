"""Every route that takes a body: a row for each, from the file of its face."""

from __future__ import annotations

from api.anthropic import COUNT_TOKENS, MESSAGES
from api.chat import CHAT
from api.completions import COMPLETIONS
from api.responses import INPUT_TOKENS, RESPONSES
from api.tokenize import DETOKENIZE, TOKENIZE
from api.vectors import FACES as VECTORS

FACES = (
    COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS, *VECTORS,
)  # fmt: skip
