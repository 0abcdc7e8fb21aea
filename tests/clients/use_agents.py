"""OpenAI's Agents SDK, by the API of responses and by that of chats."""

import asyncio
import os

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    set_tracing_disabled,
)

set_tracing_disabled(True)  # it would send what happens to OpenAI
SUM = "What is 23 + 58?"
client = openai.AsyncOpenAI(base_url=os.environ["DEMO_URL"] + "/v1", api_key="none", max_retries=0)


def agent_of(kind, **settings):
    model = kind(model="demo", openai_client=client)
    return Agent(name="adder", model=model, model_settings=ModelSettings(**{"temperature": 0} | settings))


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
        await refused(kind)
    await stored()
    await client.close()


asyncio.run(main())
