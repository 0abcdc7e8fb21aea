"""smolagents: its agent that calls tools, with and without a stream. The only tool ends the work.

Its own system prompt is longer than the demo's context. Numbers are bounded, as a small model goes on with them.
"""

import os

from smolagents import OpenAIModel, Tool, ToolCallingAgent

DIGITS = {"type": "integer", "description": "A number.", "minimum": 0, "maximum": 99}


class Answer(Tool):
    name, description, output_type = "final_answer", "Ends the work.", "integer"
    inputs = {"answer": DIGITS}  # noqa: RUF012 (the library wants an attribute of the class)

    def forward(self, answer: int) -> int:
        return answer


def steps_of(agent, **fields):
    found = agent.run("What is 23 + 58?", stream=True, **fields)
    steps = [step for step in found if type(step).__name__ == "ActionStep"]
    assert steps and not any(step.error for step in steps), steps
    assert all(step.tool_calls and step.token_usage.output_tokens > 0 for step in steps), steps
    return steps


for stream in (False, True):
    model = OpenAIModel(
        "demo", api_base=os.environ["DEMO_URL"] + "/v1", api_key="none", temperature=0, parallel_tool_calls=False
    )
    agent = ToolCallingAgent(tools=[Answer()], model=model, max_steps=1, stream_outputs=stream)
    agent.prompt_templates["system_prompt"] = "Be brief."
    (first,) = steps_of(agent)
    assert first.is_final_answer and int(first.observations) in range(100), first
    (again,) = steps_of(agent, reset=False)  # after the call and its result
    assert again.token_usage.input_tokens > first.token_usage.input_tokens
