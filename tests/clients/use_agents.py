"""OpenAI's Agents SDK, by the API of responses and by that of chats."""

import asyncio
import os
from typing import Annotated

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, ConfigDict, Field

set_tracing_disabled(True)  # it would send what happens to OpenAI
SUM = "What is 23 + 58?"
client = openai.AsyncOpenAI(base_url=os.environ["DEMO_URL"] + "/v1", api_key="none", max_retries=0)
Digits = Annotated[int, Field(ge=0, le=99)]


@function_tool
def add(a: Digits, b: Digits) -> int:
    """Adds."""
    return a + b


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: Digits
    b: Digits


def agent_of(kind, tools=(), output_type=None, **settings):
    model, settings = kind(model="demo", openai_client=client), ModelSettings(**{"temperature": 0} | settings)
    return Agent(name="adder", model=model, model_settings=settings, tools=[*tools], output_type=output_type)


async def plain(kind):
    agent = agent_of(kind, max_tokens=32)
    result = await Runner.run(agent, SUM)
    assert "81" in result.final_output and result.context_wrapper.usage.output_tokens > 0
    again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "What is 2 + 3?"}])
    assert again.context_wrapper.usage.input_tokens > result.context_wrapper.usage.input_tokens
    streamed = Runner.run_streamed(agent, SUM)
    deltas = []
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            deltas.append(event.data.delta)
    assert "".join(deltas) == streamed.final_output == result.final_output and len(deltas) > 1
    session = SQLiteSession("sums")
    for question in (SUM, "What is 2 + 3?"):
        kept = await Runner.run(agent, question, session=session)
    assert len(await session.get_items()) == 4
    assert kept.context_wrapper.usage.input_tokens > result.context_wrapper.usage.input_tokens
    instructed = agent.clone(instructions="Be brief.")
    more = await Runner.run(instructed, SUM, run_config=RunConfig(tracing_disabled=True))
    assert more.context_wrapper.usage.input_tokens > result.context_wrapper.usage.input_tokens


async def tools(kind):
    """The model must call the tool, and then answers as it likes."""
    agent = agent_of(kind, [add], tool_choice="required", parallel_tool_calls=False)
    result = await Runner.run(agent, SUM)
    names = [item.type for item in result.new_items]
    assert names[:2] == ["tool_call_item", "tool_call_output_item"] and names[-1] == "message_output_item", names
    streamed = Runner.run_streamed(agent, SUM)
    events = [event async for event in streamed.stream_events()]
    assert [item.type for item in streamed.new_items] == names
    deltas = [event.data for event in events if event.type == "raw_response_event"]
    assert sum(delta.type == "response.function_call_arguments.delta" for delta in deltas) > 1


async def outputs(kind):
    result = await Runner.run(agent_of(kind, output_type=Sum), SUM)
    assert type(result.final_output) is Sum
    streamed = Runner.run_streamed(agent_of(kind, output_type=Sum), SUM)
    assert [event async for event in streamed.stream_events()] and streamed.final_output == result.final_output


async def handoffs(kind):
    other = agent_of(kind)
    agent = agent_of(kind, tool_choice="required", parallel_tool_calls=False).clone(name="first", handoffs=[other])
    result = await Runner.run(agent, SUM)
    assert result.last_agent is other and "handoff_output_item" in [item.type for item in result.new_items]


async def refused(kind):
    try:
        await Runner.run(agent_of(kind, temperature=-1), SUM)
    except openai.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a negative temperature is not refused")


async def stored():
    agent = agent_of(OpenAIResponsesModel)
    first = await Runner.run(agent, SUM)
    second = await Runner.run(agent, "What is 2 + 3?", previous_response_id=first.last_response_id)
    assert second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens


async def main():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        await plain(kind)
        await tools(kind)
        await outputs(kind)
        await handoffs(kind)
        await refused(kind)
    await stored()
    await client.close()


asyncio.run(main())
