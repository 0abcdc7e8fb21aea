"""/v1/chat/completions: the next message of a conversation; and what other shapes of conversations need of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from api import checks
from api import fields as shared
from api.checks import ApiError, Face, Field
from api.generation import Caller, Events, generate
from api.logprobs import Token, chat_logprobs
from api.prompts import Prompt, Reading
from api.replies import CONTENT, REASONING, Answer, Block, ChoiceReply, NewText
from api.routes import Api
from outputs import Generation
from text.messages import begun_reasoning
from text.parts import text_of


class ChatReply(ChoiceReply):
    """A reply whose choices are messages."""

    kind, chunk = "chat.completion", "chat.completion.chunk"

    def _choice(self, i: int, generation: Generation) -> dict[str, Any]:
        of_tokens = self._of_tokens(i, generation)
        return {"index": i, "message": self._message(self.answers[generation]), **self._ending(generation), **of_tokens}

    def _opening(self) -> Iterator[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": self._continued()}] if self._continued() else []
        for delta in deltas:
            for i in range(self.n):
                choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
                yield self._event([choice], self._of_prompt(0) if i == 0 and "role" in delta else {})

    def _chunks(self, i: int, new: str, generation: Generation) -> Iterator[dict[str, Any]]:
        """Each part and the ending come in events of their own."""
        deltas = [{"content": new}] if new else []
        if self.reading:
            answer = self.answers[generation]
            deltas = [delta_of(answer, part) for part in answer.read()]
        if not deltas and not generation.finished:
            return
        of_tokens = self._of_tokens(i, generation)
        for delta in deltas:
            yield {"index": i, "delta": delta, "logprobs": None, "finish_reason": None, **of_tokens}
            of_tokens = {name: [] for name in of_tokens if name == "token_ids"}  # all told
        if generation.finished:
            yield {"index": i, "delta": {}, **self._ending(generation), **of_tokens}

    def _beside(self) -> dict[str, Any]:
        return self._of_prompt(0)  # the only one

    def _logprobs(self, i: int, new: list[Token], first: bool) -> dict[str, Any]:
        return chat_logprobs(new, self.top or 0, self.name, self.tokenizer.bytes_of)

    def _message(self, answer: Answer) -> dict[str, Any]:
        answer.read()
        content, reasoning = self._continued() + answer.text(CONTENT), answer.text(REASONING)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            calls = [call_of(call, call.text) for call in answer.calls]
            message |= {"content": content or None, "tool_calls": calls}
        can_reason = answer.reading is not None and answer.reading.reasoning_parser is not None
        return message | (reasoning_of(reasoning or None) if can_reason else {})

    def _continued(self) -> str:
        """The text of the message that a chat's answer goes on with, where it is echoed."""
        if not self.fields["echo"]:
            return ""
        last = self.fields["messages"][-1]
        return text_of(last) if self.fields["continue_final_message"] or last["role"] == "assistant" else ""


def reasoning_of(text: str | None) -> dict[str, str | None]:
    """The part of a message or a delta that is hidden reasoning, by the name that most clients know and by vLLM's.

    It is None where a model that can reason has not: OpenAI's SDK raises for a name that is missing.
    """
    return {"reasoning_content": text, "reasoning": text}


def call_of(call: Block, arguments: str) -> dict[str, Any]:
    """A call of a function as OpenAI spells it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def delta_of(answer: Answer, new: NewText) -> dict[str, Any]:
    """The delta of a chat's stream for new text of an answer."""
    block = answer.blocks[new.at]
    if block.kind == CONTENT:
        return {"content": new.text}
    if block.kind == REASONING:
        return reasoning_of(new.text)
    call = call_of(block, "") if new.begins else {"function": {"arguments": new.text}}
    return {"tool_calls": [{"index": answer.number(new.at), **call}]}


SYNONYMS = (  # names of one setting, here and elsewhere
    ("chat_template_kwargs.enable_thinking", "enable_thinking", "thinking.type", "reasoning.enabled"),
    ("reasoning_effort", "reasoning.effort"),
    ("thinking_token_budget", "thinking.budget_tokens", "reasoning.max_tokens"),
)


def chat(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
    checks.check_generation(fields)
    thinks, effort, budget = (setting_of(fields, names) for names in SYNONYMS)
    if thinks is not None:
        fields["chat_template_kwargs"] = fields["chat_template_kwargs"] | {"enable_thinking": thinks}
    fields["reasoning_effort"] = effort
    fields["include_reasoning"] = fields["include_reasoning"] and not fields["reasoning"].get("exclude")
    if budget is not None and api.parsers.reasoning_parser(fields):  # other models keep to any budget
        fields["thinking_token_budget"] = budget
    prompt, reading = conversation(api, fields, caller)
    return generate(api, fields, caller, [prompt], ChatReply, None, reading)


def setting_of(fields: dict[str, Any], names: Sequence[str]) -> Any:
    """A setting, by any of its names; None if the request has none of them, an `ApiError` if two names differ."""
    first = value = None
    for name in names:
        field, _, key = name.partition(".")
        setting = fields[field].get(key) if key else fields[field]
        if setting is not None and value is not None and setting != value:
            message = f"{name} is {setting!r}, but {first} is {value!r}; one is enough"
            raise ApiError(400, message, field)
        first, value = (first, value) if setting is None else (name, setting)
    return value


def conversation(api: Api, fields: dict[str, Any], caller: Caller) -> tuple[Prompt, Reading | None]:
    """The prompt for a conversation with its tokens, and how the answers to it are read."""
    special, output = bool(fields["add_special_tokens"]), api.prompts.least_output(fields, None)
    prompt, text, caller.pictures = api.prompts.conversation(fields, caller, special, output)
    end = api.tokenizer.turn_end(fields["chat_template"])
    if end is not None and end not in api.facts["eos_token_ids"] and not fields["ignore_eos"]:
        fields["stop_token_ids"] = [*(fields["stop_token_ids"] or ()), end]  # trainers often name it nowhere else
    begun = begun_reasoning(fields["messages"][-1]) if fields["continue_final_message"] else ""
    return prompt, api.parsers.reading(fields, text.rstrip().removesuffix(begun.strip()))  # up to where that begins


def as_chat(fields: dict[str, Any], messages: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    """The fields of a chat's request: these, as far as it knows them, with `messages` and the `others`."""
    chat = CHAT.defaults()
    return chat | {name: fields[name] for name in fields.keys() & chat.keys()} | {"messages": messages} | others


@contextlib.contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Errors within the `with` block name the fields by these names, as their route calls them.

    Names that are words of prose, too, stay as they are in a message.
    """
    try:
        yield
    except ApiError as error:
        param, message = names.get(error.param or "", error.param), str(error)
        for name in names:
            message = re.sub(rf"\b{name}\b", names[name], message) if "_" in name else message
        raise ApiError(error.status, message, param, error.code) from None


THINKS = {"enabled": True, "disabled": False, "adaptive": None, True: True, False: False}


def thinking(value: bool | dict[str, Any], context: checks.CheckContext) -> dict[str, Any]:
    """Whether a model thinks, as DeepSeek and GLM ask for it."""
    settings = {"type": value} if isinstance(value, bool) else value
    read: dict[str, Any] = checks.settings(type=[*THINKS], budget_tokens=int)(settings, context)
    return read | {"type": THINKS.get(read["type"])}


REASONING_FORMAT = Literal["auto", "none", "deepseek"]
FIELDS = (
    shared.MODEL,
    Field("messages", shared.CONVERSATION, None, checks.messages, "The conversation so far."),
    shared.SPECIAL_TOKENS,
    *shared.TALK,
    Field("tool_choice", shared.TOOL_CHOICE, None, checks.tool_choice, "Whether an answer calls tools, and which."),
    shared.PARALLEL_CALLS,
    Field("include_reasoning", bool, True, about="Whether the client gets the hidden reasoning (vLLM's)."),
    Field("separate_reasoning", bool, True, about="False leaves reasoning in the content (SGLang's)."),
    Field("reasoning_format", REASONING_FORMAT, "auto", None, "none leaves it there, too (llama.cpp's)."),
    shared.THINKING_BUDGET,
    shared.EFFORT,
    Field("enable_thinking", bool, about="Is a variable of the chat template (GLM's and Qwen's)."),
    Field("thinking", bool | dict[str, Any], {}, thinking, "The same (DeepSeek's)."),
    Field("reasoning", dict[str, Any], {}, checks.settings(effort=str, enabled=bool, max_tokens=int, exclude=bool)),
    shared.STREAM,
    *shared.LENGTHS,
    Field("logprobs", bool, False, about="Whether each token comes with its log-probability."),
    Field("top_logprobs", shared.Count, about="How many likeliest tokens each has with it; needs logprobs."),
    *shared.CHOICES,
)
CHAT = Face(
    "chat", ("/v1/chat/completions",), FIELDS, chat, "chatcmpl-", needed=("messages",), tasks=("generate",),
    not_yet=shared.NOT_YET, elsewhere=shared.ELSEWHERE,
)  # fmt: skip
