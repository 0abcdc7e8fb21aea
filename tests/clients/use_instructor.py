"""Instructor, in its modes that ask for a tool, for a JSON schema, and for any JSON object."""

import asyncio
import os

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

FIELDS = {"base_url": os.environ["DEMO_URL"] + "/v1", "api_key": "none", "max_retries": 0}
ASK = {"model": "demo", "messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0}


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


class Anything(BaseModel):
    """No schema holds the model to the keys: Instructor only tells it."""

    a: int | str | None = None


MODES = {"TOOLS": Sum, "TOOLS_STRICT": Sum, "JSON_SCHEMA": Sum, "JSON": Anything}


def synchronous(mode, kind):
    client = instructor.from_openai(openai.OpenAI(**FIELDS), mode=mode)
    found, raw = client.chat.completions.create_with_completion(**ASK, response_model=kind, max_retries=0)
    assert isinstance(found, kind), (mode, found)
    assert raw.usage.completion_tokens > 0, (mode, raw)
    grown = [each.model_dump() for each in client.chat.completions.create_partial(**ASK, response_model=kind)]
    kind.model_validate(grown[-1])
    assert kind is Anything or (None in grown[0].values() and len(grown) > 2)


async def asynchronous(mode, kind):
    async with openai.AsyncOpenAI(**FIELDS) as openai_client:
        client = instructor.from_openai(openai_client, mode=mode)
        found = await client.chat.completions.create(**ASK, response_model=kind, max_retries=0)
        assert isinstance(found, kind)


for name, kind in MODES.items():
    synchronous(instructor.Mode[name], kind)
    asyncio.run(asynchronous(instructor.Mode[name], kind))
responses = instructor.from_openai(openai.OpenAI(**FIELDS), mode=instructor.Mode.RESPONSES_TOOLS)
ask = {"model": "demo", "input": "What is 23 + 58?", "temperature": 0}
assert isinstance(responses.responses.create(**ask, response_model=Sum, max_retries=0), Sum)
