"""LangChain, by langchain-openai."""

import asyncio
import os
from typing import Annotated

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

URL = os.environ["DEMO_URL"] + "/v1"
FIELDS = {"model": "demo", "base_url": URL, "api_key": "none", "temperature": 0, "max_retries": 0}
SUM = "What is 23 + 58?"

Digits = Annotated[int, Field(ge=0, le=99)]


@tool
def add(a: Digits, b: Digits) -> int:
    """Adds."""
    return a + b


class Sum(BaseModel):
    """A sum."""

    model_config = ConfigDict(extra="forbid")
    a: Digits
    b: Digits


def chat():
    model = ChatOpenAI(**FIELDS)
    answer = model.invoke(SUM)
    assert "81" in answer.content and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["input_tokens"] > 0 and answer.response_metadata["model_name"] == "demo"
    turns = [SystemMessage("Be brief."), HumanMessage(SUM), AIMessage("81"), HumanMessage("What is 2 + 3?")]
    assert model.invoke(turns).usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
    chunks = list(model.stream(SUM, stream_usage=True))
    joined = sum(chunks[1:], chunks[0])
    assert joined.content == answer.content and joined.usage_metadata == answer.usage_metadata
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    chain = ChatPromptTemplate.from_template("What is {a} + {b}?") | model | StrOutputParser()
    sums = [str(a + 58) in text for a, text in enumerate(chain.batch([{"a": a, "b": 58} for a in range(16)]))]
    assert sum(sums) >= 13, sums
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(SUM).response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in scored)
    assert "8" not in model.bind(stop=["8"]).invoke(SUM).content
    assert ChatOpenAI(**FIELDS, n=2).generate([[HumanMessage(SUM)]]).generations[0][1].text == answer.content


async def asynchronous():
    model = ChatOpenAI(**FIELDS)
    texts = [chunk.content async for chunk in model.astream(SUM)]
    assert "81" in "".join(texts)
    assert ["81" in answer.content for answer in await model.abatch([SUM] * 4)] == [True] * 4
    events = [event["event"] async for event in model.astream_events(SUM)]
    assert "on_chat_model_stream" in events and events[-1] == "on_chat_model_end"


def responses():
    model = ChatOpenAI(**FIELDS, use_responses_api=True)
    answer = model.invoke(SUM)
    assert "81" in answer.text and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream(SUM)) == answer.text
    follows = ChatOpenAI(**FIELDS, use_responses_api=True, use_previous_response_id=True)
    longer = follows.invoke([HumanMessage(SUM), follows.invoke(SUM), HumanMessage("What is 2 + 3?")])
    assert longer.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def tools(**fields):
    model = ChatOpenAI(**FIELDS, **fields)
    for choice in ("any", "add"):
        bound = model.bind_tools([add], tool_choice=choice, parallel_tool_calls=False, strict=choice == "any")
        asked = bound.invoke(SUM)
        (call,) = asked.tool_calls
        assert call["name"] == "add" and not asked.invalid_tool_calls
        chunks = list(bound.stream(SUM))
        (streamed,) = sum(chunks[1:], chunks[0]).tool_calls
        assert streamed["args"] == call["args"] and sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 2
    result = add.invoke(call)
    assert int(result.content) == sum(call["args"].values())
    free = model.bind_tools([add])
    assert free.invoke([HumanMessage(SUM), asked, result]).type == "ai"
    broken = {"name": "add", "args": '{"a": ', "id": "call_1", "error": "cut", "type": "invalid_tool_call"}
    turns = [HumanMessage(SUM), AIMessage("", invalid_tool_calls=[broken]), ToolMessage("cut", tool_call_id="call_1")]
    assert free.invoke(turns).type == "ai"


def structures(**fields):
    model = ChatOpenAI(**FIELDS, **fields)
    for method in ("function_calling", "json_schema"):
        for strict in (None, True):
            follows = model.with_structured_output(Sum, method=method, strict=strict)
            found = follows.invoke(SUM)
            assert type(found) is Sum and list(follows.stream(SUM))[-1] == found
        raw = model.with_structured_output(Sum.model_json_schema(), method=method, include_raw=True).invoke(SUM)
        assert raw["parsing_error"] is None and Sum(**raw["parsed"])


def completions():
    model = OpenAI(**FIELDS, max_tokens=8)
    text = model.invoke("To be, or not")
    assert text and "".join(model.stream("To be, or not")) == text
    assert model.batch(["To be, or not"] * 3) == [text] * 3


def errors():
    try:
        ChatOpenAI(**FIELDS | {"temperature": -1}).invoke(SUM)
    except openai.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a negative temperature is not refused")
    try:
        ChatOpenAI(**FIELDS).invoke("word " * 5000)
    except openai.BadRequestError as error:
        assert type(error).__name__ == "OpenAIContextOverflowError", repr(error)  # LangChain's own
    else:
        raise AssertionError("a prompt that is too long is not refused")


def embeddings():
    url = os.environ["EMBEDDER_URL"] + "/v1"
    texts = ["To be", "or not to be", "that is the question"]
    # LangChain cuts texts by OpenAI's tokenizer, unless it is told not to.
    model = OpenAIEmbeddings(model="embedder", base_url=url, api_key="none", check_embedding_ctx_length=False)
    found = model.embed_documents(texts)
    assert [len(vector) for vector in found] == [64] * 3
    query = model.embed_query(texts[1])
    assert max(abs(a - b) for a, b in zip(found[1], query, strict=True)) < 1e-5
    assert len(asyncio.run(model.aembed_query("To be"))) == 64


chat()
asyncio.run(asynchronous())
responses()
for fields in ({}, {"use_responses_api": True}):
    tools(**fields)
    structures(**fields)
completions()
errors()
embeddings()
