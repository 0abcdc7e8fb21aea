"""The server with a model that keeps to a script: `python scripted_model.py server.py FLAGS`, run from the repository.

All is the server's own but for the tokens, which no engine makes. What a request is answered depends on its prompt
alone, so that a program may ask again: on the script that its user named last ("Please play NAME."), and on how many
answers come after that.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import server  # noqa: E402
from plan import EngineCoreRequest  # noqa: E402
from processes.client import MPClient, Stream  # noqa: E402
from scripted import TOKENIZER, ScriptedClient  # noqa: E402

# By the demo's chat template: what the user says, and what an answer begins with and a prompt ends with.
ASKED = re.compile(r"<\|user\|>(?!<tool_response>)(?:(?!<\|).)*Please play ([a-z-]+)\.", re.DOTALL)
ANSWER = "<|assistant|>"
NOTHING = "I have no script for this."


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CUT = '<tool_call>\n{"name": "%s", "arguments": {"%s": "ls -'  # the model ends in the middle of its call
SEEN = "<think>I have seen it.</think>The file is there."
SCRIPTS = {  # what the model says when it is asked to play one: its first answer, its second, …
    "claude-files": [
        "I write it.\n" + call("Write", file_path="hello.txt", content='Hello "world" </tool_call>\n\té日本\n'),
        CUT % ("Bash", "command"),
        call("Read", file_path="hello.txt") + "\n" + call("Bash", command="wc -l hello.txt; exit 3"), SEEN,
    ],
    "claude-tools": [
        call("ToolSearch", query="select:NotebookEdit,WebSearch"), call("WebSearch", query="caches"), "I looked.",
    ],
    "claude-picture": [call("Read", file_path="pixel.png"), "I see {pictures}."],
    "seen": ["I see {pictures}."],
    "claude-goes-on": ["We can still talk."],
    "codex-files": [
        "I write it.\n" + call("exec_command", cmd="printf 'Hello \"world\" </tool_call>\\n' > hello.txt"),
        CUT % ("exec_command", "cmd"),
        call("exec_command", cmd="cat hello.txt") + "\n" + call("exec_command", cmd="exit 3"),
        call("multi_agent_v1__spawn_agent", message="Please play codex-helper."), SEEN,
    ],
    "codex-helper": [call("exec_command", cmd="echo helped > helped.txt"), "I helped."],
    "codex-patch": [
        call("apply_patch", input='*** Begin Patch\n*** Add File: new.txt\n+Hello "world"\n*** End Patch'), SEEN,
    ],
    "codex-picture": [call("view_image", path="pixel.png"), "I see {pictures}."],
    "codex-goes-on": ["We can still talk."],
    "codex-title": ['{"title": "Hello"}'],
}  # fmt: skip


def answer(prompt: str) -> str:
    """What the model says after a prompt."""
    if not (found := [*ASKED.finditer(prompt)]):
        return NOTHING
    answers = SCRIPTS[found[-1][1]]
    return answers[min(prompt.count(ANSWER, found[-1].end()), len(answers)) - 1]


@functools.cache
def model() -> ScriptedClient:
    return ScriptedClient()


def add_request(client: MPClient, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
    """In place of the method of this name, whose request would go to an engine."""
    stream = stream or Stream()
    stream.clients.add(client)
    says = answer(TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False))
    model().says = says.replace("{pictures}", str(len(request.pictures)))
    return model().add_request(request, stream)


if __name__ == "__main__":
    MPClient.add_request = add_request  # type: ignore[method-assign]
    server.main(sys.argv[2:])
