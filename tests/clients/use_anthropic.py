"""Anthropic's SDK for Python."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

import anthropic
from pydantic import BaseModel, ConfigDict

sys.path.insert(0, str(Path(os.environ["CLIENTS"]).parent))
from agent_bodies import PICTURE

URL = os.environ["DEMO_URL"]
SUM = [{"role": "user", "content": "What is 23 + 58?"}]
FIELDS = {"model": "demo", "messages": SUM, "max_tokens": 32, "extra_body": {"temperature": 0}}
DIGITS = {"type": "integer", "minimum": 0, "maximum": 99}
TWO = {"type": "object", "properties": {"a": DIGITS, "b": DIGITS}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Adds.", "input_schema": TWO}
CALL = FIELDS | {"max_tokens": 100, "tools": [ADD]}
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def refused(kind, *words, **fields):
    try:
        client.messages.create(**FIELDS | fields)
    except kind as error:
        assert all(word in str(error) for word in words) and error.body["error"]["type"], error
        assert error.body["type"] == "error", error.body
        return error
    raise AssertionError(f"{fields} is not refused")


def messages():
    answer = client.messages.create(**FIELDS)
    assert "81" in text_of(answer) and (answer.role, answer.stop_reason) == ("assistant", "end_turn")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0 and answer._request_id
    counted = client.messages.count_tokens(model="demo", messages=SUM)
    assert counted.input_tokens == answer.usage.input_tokens
    blocks = [{"role": "user", "content": [{"type": "text", "text": SUM[0]["content"]}]}]
    assert text_of(client.messages.create(**FIELDS | {"messages": blocks})) == text_of(answer)
    cut = client.messages.create(**FIELDS | {"max_tokens": 1})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 1
    stopped = client.messages.create(**FIELDS, stop_sequences=["1"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "1") and "1" not in text_of(stopped)
    begun = client.messages.create(**FIELDS | {"messages": [*SUM, {"role": "assistant", "content": "8"}]})
    assert text_of(begun).startswith("1")
    system = client.messages.create(**FIELDS, system="Be brief.")
    assert system.usage.input_tokens > answer.usage.input_tokens


def streams():
    whole = client.messages.create(**FIELDS)
    events = list(client.messages.create(**FIELDS, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(**FIELDS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole) and final.stop_reason == "end_turn"
    assert final.usage.input_tokens == whole.usage.input_tokens


def tools():
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}):
        answer = client.messages.create(**CALL, tool_choice=choice)
        (block,) = answer.content
        assert (block.type, block.name, answer.stop_reason) == ("tool_use", "add", "tool_use")
        assert block.input.keys() == {"a", "b"} and block.id
        with client.messages.stream(**CALL, tool_choice=choice) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert "input_json" in kinds and final.content[0].input == block.input and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "81", "cache_control": {"type": "ephemeral"}}
    turns = [*SUM, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    for choice in ({"type": "auto"}, {"type": "none"}):
        ended = client.messages.create(**CALL | {"messages": turns}, tool_choice=choice)
        assert ended.usage.input_tokens + ended.usage.cache_read_input_tokens > answer.usage.input_tokens
    assert client.messages.count_tokens(model="demo", messages=turns, tools=[ADD]).input_tokens > 13


def beta():
    """What only Anthropic's servers act upon changes nothing, and is named."""
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    more = {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "max_tokens": 10**6, "speed": "fast"}
    answer = client.beta.messages.with_raw_response.create(
        **FIELDS | more, betas=["context-management-2025-06-27"], context_management=edits
    )
    assert text_of(answer.parse()) == text_of(client.messages.create(**FIELDS))
    assert answer.headers["X-Manta-Ignored"] == "context_management, speed, tools.web_search_20250305"
    notes = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": SUM[0]["content"]}}
    shown = client.beta.messages.create(**FIELDS | {"messages": [{"role": "user", "content": [notes]}]})
    assert text_of(shown) == text_of(answer.parse())


def runner():
    asked = []

    @anthropic.beta_tool(input_schema=TWO)
    def add(a: int, b: int) -> str:
        """Adds."""
        asked.append((a, b))
        return str(a + b)

    fields = CALL | {"tools": [add], "tool_choice": {"type": "tool", "name": "add"}}
    messages = list(client.beta.messages.tool_runner(**fields, max_iterations=2))
    assert len(messages) == len(asked) == 2, (messages, asked)


def structures():
    class Sum(BaseModel):
        model_config = ConfigDict(extra="forbid")
        a: Literal[23, 58, 81]  # the SDK takes bounds of numbers out of a schema

    parsed = client.messages.parse(**FIELDS | {"max_tokens": 100}, output_format=Sum)
    assert type(parsed.parsed_output) is Sum
    with client.messages.stream(**FIELDS | {"max_tokens": 100}, output_format=Sum) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


def errors():
    refused(anthropic.BadRequestError, "temperature", extra_body={"temperature": -1})
    refused(anthropic.BadRequestError, "messages", messages=[])
    refused(anthropic.BadRequestError, "prompt is too long", messages=[{"role": "user", "content": "word " * 5000}])
    search = {"type": "web_search_20250305", "name": "web_search"}
    refused(anthropic.BadRequestError, "web_search", tools=[search], tool_choice={"type": "tool", "name": "web_search"})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    refused(anthropic.BadRequestError, "could not process image", messages=[{"role": "user", "content": [image]}])
    refused(anthropic.BadRequestError, "other", tools=[ADD], tool_choice={"type": "tool", "name": "other"})
    refused(anthropic.NotFoundError, model="other")
    assert [model.id for model in client.models.list()] == ["demo"]


def pictures():
    seeing = anthropic.Anthropic(base_url=os.environ["SEEING_URL"], api_key="none", max_retries=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    used = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    asks = [
        {"role": "user", "content": [image, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result, {"type": "text", "text": "Please play seen."}]},
    ]
    assert text_of(seeing.messages.create(model="scripted", max_tokens=32, messages=asks)) == "I see 2."
    assert seeing.messages.count_tokens(model="scripted", messages=asks).input_tokens > 32


async def many():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", timeout=60) as asynchronous:

        async def ask(a):
            words = [{"role": "user", "content": f"What is {a} + 58?"}]
            async with asynchronous.messages.stream(**FIELDS | {"messages": words}) as stream:
                return await stream.get_final_text()

        sums = [str(a + 58) in text for a, text in enumerate(await asyncio.gather(*map(ask, range(16))))]
        assert sum(sums) >= 13, sums


messages()
streams()
tools()
beta()
runner()
structures()
errors()
pictures()
asyncio.run(many())
