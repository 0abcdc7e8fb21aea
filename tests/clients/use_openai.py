"""OpenAI's SDK for Python."""

import asyncio
import os

import openai

URL = os.environ["DEMO_URL"] + "/v1"
SUM = [{"role": "user", "content": "What is 23 + 58?"}]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)


def refused(kind, call, *words, **fields):
    """The error of a call that must be refused."""
    try:
        call(**fields)
    except kind as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError(f"{fields} is not refused")


def models():
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    refused(openai.NotFoundError, client.models.retrieve, model="org/other")


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


models()
chat()
streams()
completions()
responses()
errors()
asyncio.run(many())
embeddings()
