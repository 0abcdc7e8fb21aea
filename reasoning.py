"""Hidden reasoning: how each kind of model marks what it writes for itself."""

from __future__ import annotations

from dataclasses import dataclass

from scanning import Markers, Source, Steps, reasoning


@dataclass(frozen=True)
class ReasoningParser:
    """The texts around the hidden reasoning of a kind of model.

    Attributes:
        start: comes before it; an answer that does not begin with it has none, unless the prompt ends with it.
        end: comes after it.
    """

    start: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends in reasoning that the answer goes on with."""
        return prompt.rstrip().endswith(self.start)

    def read(self, source: Source, opened: bool) -> Steps[None]:
        """Read the reasoning that an answer begins with, if there is any."""
        source.mark = source.at
        yield from source.space()
        found = yield from source.follows(self.start)
        if not found and not opened:
            source.at = source.mark
        source.mark = None
        if not found and not opened:
            return
        source.in_reasoning = True
        yield from source.space()
        end = yield from source.until(Markers([self.end]), reasoning)
        yield from source.space()
        source.take(source.at + len(end))
        source.in_reasoning = False
        yield from source.space()


THINK = ReasoningParser("<think>", "</think>")
REASONING_PARSERS = {"deepseek_r1": THINK, "qwen3": THINK}


def reasoning_parser_of(chat_template: str) -> str | None:
    """The parser that a chat template calls for; None if it knows of no reasoning."""
    return "qwen3" if "</think>" in chat_template else None
