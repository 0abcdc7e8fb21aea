"""OpenAI's SDK for Python."""

import asyncio
import json
import os

import openai
from pydantic import BaseModel, ConfigDict, Field

URL = os.environ["DEMO_URL"] + "/v1"
SUM = [{"role": "user", "content": "What is 23 + 58?"}]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)


class Multiply(BaseModel):
    """Multiplies two numbers."""

    model_config = ConfigDict(extra="forbid")
    a: int = Field(ge=0, le=999)
    b: int = Field(ge=0, le=999)


PRODUCT = {"model": "demo", "messages": [{"role": "user", "content": "What is 12 * 34?"}], "temperature": 0}
TOOL = openai.pydantic_function_tool(Multiply, name="multiply")
TWELVE = Multiply(a=12, b=34)


def refused(kind, call, *words, **fields):
    """The error of a call that must be refused."""
    try:
        call(**fields)
    except kind as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError(f"{fields} is not refused")


def chat():
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=SUM, temperature=0, logprobs=True, top_logprobs=3, seed=1, n=2,
        extra_headers={"X-Request-Id": "my-name"},
    )  # fmt: skip
    answer = raw.parse()
    assert raw.request_id == "my-name" and answer._request_id == "my-name"
    text = answer.choices[0].message.content
    assert "81" in text and answer.choices[1].message.content == text
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0
    entries = answer.choices[0].logprobs.content
    # `stop` came by the last token, which is no text.
    assert "".join(entry.token for entry in entries).startswith(text)
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


def streams():
    fields = {"model": "demo", "messages": SUM, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content and sum(map(bool, texts)) > 1
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(texts) and {"chunk", "content.delta", "content.done"} <= {*kinds}


def completions():
    fields = {"model": "demo", "temperature": 0, "max_tokens": 8}
    answer = client.completions.create(**fields, prompt=["To be, or not", "Once"], logprobs=2, echo=True)
    assert [choice.text[:4] for choice in answer.choices] == ["To b", "Once"]
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None and len(found.tokens) == len(found.text_offset)
    streamed = client.completions.create(**fields, prompt="To be, or not", stream=True)
    assert "To be, or not" + "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    ended = client.completions.create(**fields, prompt=[5, 6, 7], stop=["e"], extra_body={"ignore_eos": True})
    assert "e" not in ended.choices[0].text


def responses():
    answer = client.responses.create(model="demo", input="What is 23 + 58?", temperature=0)
    assert "81" in answer.output_text and answer.status == "completed"
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    items = client.responses.input_items.list(answer.id).data
    assert items[0].content[0].text == "What is 23 + 58?"
    again = client.responses.create(model="demo", input="What is 2 + 3?", previous_response_id=answer.id)
    assert again.previous_response_id == answer.id and again.usage.input_tokens > answer.usage.input_tokens
    with client.responses.stream(model="demo", input="What is 23 + 58?", temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == answer.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    client.responses.delete(answer.id)
    refused(openai.NotFoundError, client.responses.retrieve, response_id=answer.id)


def tools():
    create = client.chat.completions.create
    asked = create(**PRODUCT, tools=[TOOL]).choices[0]
    (call,) = asked.message.tool_calls
    assert asked.finish_reason == "tool_calls" and call.function.name == "multiply"
    assert json.loads(call.function.arguments) == TWELVE.model_dump()
    result = {"role": "tool", "tool_call_id": call.id, "content": "408"}
    turns = [*PRODUCT["messages"], asked.message, result]
    assert "408" in create(**PRODUCT | {"messages": turns}, tools=[TOOL]).choices[0].message.content
    parts = [chunk.choices[0].delta.tool_calls for chunk in create(**PRODUCT, tools=[TOOL], stream=True)]
    functions = [part.function for found in parts if found for part in found]
    assert functions[0].name == "multiply" and not any(function.name for function in functions[1:])
    assert "".join(function.arguments or "" for function in functions) == call.function.arguments
    for choice in ("required", {"type": "function", "function": {"name": "multiply"}}):
        forced = client.chat.completions.parse(**PRODUCT, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        assert [call.function.parsed_arguments for call in forced.choices[0].message.tool_calls] == [TWELVE]
    assert create(**PRODUCT, tools=[TOOL], tool_choice="none").choices[0].message.tool_calls is None
    with client.chat.completions.stream(**PRODUCT, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == TWELVE


def objects():
    parsed = client.chat.completions.parse(**PRODUCT, response_format=Multiply).choices[0].message
    assert parsed.parsed == Multiply.model_validate_json(parsed.content)
    with client.chat.completions.stream(**PRODUCT, response_format=Multiply) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.parsed
    fields = {"model": "demo", "input": "What is 12 * 34?", "temperature": 0}
    assert client.responses.parse(**fields, text_format=Multiply).output_parsed == parsed.parsed
    flat = [openai.pydantic_function_tool(Multiply, name="multiply")["function"] | {"type": "function"}]
    (call,) = client.responses.create(**fields, tools=flat).output
    assert call.type == "function_call" and json.loads(call.arguments) == TWELVE.model_dump()
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "408"}]
    asked = [{"role": "user", "content": fields["input"]}, call, *result]
    assert "408" in client.responses.create(**fields | {"input": asked}, tools=flat).output_text
    with client.responses.stream(**fields, tools=flat) as stream:
        assert "response.function_call_arguments.delta" in {event.type for event in stream}
        assert stream.get_final_response().output[0].arguments == call.arguments


def errors():
    create = client.chat.completions.create
    error = refused(openai.BadRequestError, create, "temperature", model="demo", messages=SUM, temperature=-1)
    assert error.param == "temperature" and error.type == "invalid_request_error"
    error = refused(openai.NotFoundError, create, model="other", messages=SUM)
    assert error.code == "model_not_found"
    long = [{"role": "user", "content": "word " * 5000}]
    error = refused(openai.BadRequestError, create, "maximum context length", model="demo", messages=long)
    assert error.code == "context_length_exceeded"
    error = refused(openai.BadRequestError, create, model="demo", messages=SUM, extra_body={"temprature": 1})
    assert error.code == "unknown_parameter" and "temperature" in str(error)
    error = refused(openai.BadRequestError, create, model="demo", messages=[])
    assert error.param == "messages"
    refused(openai.BadRequestError, client.embeddings.create, "task", model="demo", input="a")
    assert "81" in create(model="demo", messages=SUM, temperature=0).choices[0].message.content


async def many():
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", timeout=60) as asynchronous:

        async def ask(a):
            words = [{"role": "user", "content": f"What is {a} + 58?"}]
            stream = await asynchronous.chat.completions.create(
                model="demo", messages=words, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        sums = [str(a + 58) in text for a, text in enumerate(await asyncio.gather(*map(ask, range(32))))]
        assert sum(sums) >= 28, sums
        # One that leaves in the middle does no harm.
        stream = await asynchronous.completions.create(
            model="demo", prompt="To be", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        assert "81" in await ask(23)


def embeddings():
    embedder = openai.OpenAI(base_url=os.environ["EMBEDDER_URL"] + "/v1", api_key="none", max_retries=0)
    coded = embedder.embeddings.create(model="embedder", input=["To be", "or not"])  # in base64, as it asks
    plain = embedder.embeddings.create(model="embedder", input=["To be", "or not"], encoding_format="float")
    for one, other in zip(coded.data, plain.data, strict=True):
        assert len(one.embedding) == 64 and abs(sum(x * x for x in one.embedding) - 1) < 1e-4
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6
    assert len(embedder.embeddings.create(model="embedder", input=[5, 6], dimensions=8).data[0].embedding) == 8


chat()
streams()
completions()
responses()
tools()
objects()
errors()
asyncio.run(many())
embeddings()
