"""Hidden reasoning: how each kind of model marks what it writes for itself."""

from __future__ import annotations

from dataclasses import dataclass

from scanning import Source, Waiting


@dataclass(frozen=True)
class ReasoningParser:
    """The texts around the hidden reasoning of a kind of model. Of each, the first is the one that it should write.

    Attributes:
        starts: one comes before it: an answer that begins with none has no reasoning, unless the prompt ends with one.
            Where there are none, an answer begins with reasoning, and what it writes of `ends` tells where it ends.
        ends: one comes after it.
        ended_by_calls: a call of a function ends it, too.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    ended_by_calls: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends in reasoning that the answer goes on with."""
        return not self.starts or prompt.rstrip().endswith(self.starts)

    def begins(self, source: Source, opened: bool) -> Waiting[bool]:
        """Whether an answer begins with reasoning, whose beginning is read then.

        Args:
            source: the answer's text.
            opened: whether the prompt has begun the reasoning; some models do so once more.
        """
        source.mark = source.at
        yield from source.space()
        found = yield from source.follows(*self.starts)
        if found or opened:
            source.in_reasoning = True
            yield from source.space()
        else:
            source.at = source.mark
        source.mark = None
        return source.in_reasoning


THINK = ReasoningParser(("<think>",), ("</think>",))
REASONING_PARSERS = {
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "ernie45": THINK,
    "gemma4": ReasoningParser(("<|channel>thought",), ("<channel|>",)),
    "glm45": THINK,
    "granite": ReasoningParser(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "holo2": THINK,
    "kimi_k2": ReasoningParser(("<think>",), ("</think>",), ended_by_calls=True),
    "minimax_m2": THINK,
    "mistral": ReasoningParser(("[THINK]",), ("[/THINK]",)),
    "nemotron_v3": THINK,
    "olmo3": THINK,
    "openai_gptoss": ReasoningParser((), ("<|channel|>final<|message|>",)),
    "qwen3": ReasoningParser(("<think>",), ("</think>",), ended_by_calls=True),
    "seed_oss": ReasoningParser(("<seed:think>",), ("</seed:think>",)),
    "step3": THINK,
}
# What a chat template has of a kind of model, and which that is; the first that fits.
SIGNS = (
    (("<|channel|>analysis",), "openai_gptoss"),
    (("<|channel>thought",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("</seed:think>",), "seed_oss"),
    (("</think>", "<|tool_calls_section_begin|>"), "kimi_k2"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>", "<｜Assistant｜>"), "deepseek_r1"),
    (("</think>",), "qwen3"),
    (("Here is my thought process:",), "granite"),
)


def reasoning_parser_of(chat_template: str) -> str | None:
    """The parser that a chat template calls for; None if it knows of no reasoning."""
    return next((name for texts, name in SIGNS if all(text in chat_template for text in texts)), None)
