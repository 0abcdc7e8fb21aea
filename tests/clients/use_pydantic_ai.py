"""Pydantic AI: tools, and output that follows a schema, by the API of chats and by that of responses."""

import asyncio
import os
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SUM = "What is 23 + 58?"
provider = OpenAIProvider(base_url=os.environ["DEMO_URL"] + "/v1", api_key="none")


Digits = Annotated[int, Field(ge=0, le=99)]


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: Digits
    b: Digits


def agent_of(kind, **fields):
    return Agent(kind("demo", provider=provider), model_settings={"temperature": 0, "max_tokens": 400}, **fields)


async def texts(kind):
    agent = agent_of(kind, instructions="Be brief.")
    first = await agent.run(SUM)
    assert "81" in first.output and first.usage.output_tokens > 0
    await agent.run("What is 2 + 3?", message_history=first.all_messages())
    async with agent.run_stream(SUM) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == first.output and len(pieces) > 1


async def outputs(kind):
    for form in (Sum, ToolOutput(Sum, name="sum", strict=True), NativeOutput(Sum, strict=True)):
        agent = agent_of(kind, output_type=form)
        found = await agent.run(SUM)
        assert type(found.output) is Sum, found
        async with agent.run_stream(SUM) as stream:
            grown = [each async for each in stream.stream_output(debounce_by=None)]
        assert grown[-1] == found.output


async def tools(kind):
    """The model must call a tool, and after that can only answer."""
    late = PrepareOutputTools(lambda context, tools: tools if context.run_step > 1 else [])
    agent, asked = agent_of(kind, output_type=Sum, capabilities=[late]), []

    @agent.tool_plain(prepare=lambda context, tool: tool if context.run_step == 1 else None)
    def add(a: Digits, b: Digits) -> int:
        """Adds."""
        asked.append((a, b))
        return a + b

    found = await agent.run("Add.", model_settings={"parallel_tool_calls": False})
    assert len(asked) == 1 and type(found.output) is Sum, found.all_messages()


async def main():
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        await texts(kind)
        await outputs(kind)
        await tools(kind)


asyncio.run(main())
