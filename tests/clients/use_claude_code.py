"""Claude Code, and the bodies that it sends by Anthropic's SDK, against a model that keeps to a script."""

import json
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import anthropic

sys.path.insert(0, str(Path(os.environ["CLIENTS"]).parent))
import agent_bodies as bodies

URL = os.environ["SCRIPTED_URL"]
SCRIPT = "Please play claude-bodies."
client = anthropic.Anthropic(base_url=URL, auth_token="none", max_retries=0, timeout=60)
named = {"model", "messages", "system", "tools", "metadata", "max_tokens", "thinking", "context_management"}


def fields(messages, **more):
    """A body as the SDK's arguments."""
    body = bodies.claude_code(messages, model="scripted", **more)
    text = json.dumps(body).replace("What does hello.py do?", SCRIPT)
    body = json.loads(text) | {"betas": bodies.CLAUDE_HEADERS["Anthropic-Beta"].split(",")}
    body.pop("stream")
    extra = {key: body.pop(key) for key in [*body] if key not in {*named, "output_config", "betas"}}
    return body | {"extra_body": extra}


def answers(messages, **more):
    """The blocks of an answer; the same whole, from events, and as the SDK joins them."""
    asked = fields(messages, **more)
    with client.beta.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    whole = client.beta.messages.create(**asked)
    assert (whole.stop_reason, whole.usage) == (final.stop_reason, final.usage)
    found = [
        [block.model_dump(include={"type", "text", "thinking", "name", "input"}) for block in message.content]
        for message in (whole, final)
    ]
    assert found[0] == found[1], found
    return found[0]


def by_the_sdk():
    first, second, third = (answers(turn) for turn in bodies.CLAUDE_TURNS)
    assert [block["type"] for block in first] == ["thinking", "text", "tool_use", "tool_use"], first
    assert first[2]["input"] == {"path": "hello.py"} and first[3]["input"] == {}
    assert second[0]["input"] == {"path": "a", "content": '"</tool_call>" {\n'}
    assert [block["text"] for block in third] == ["It says hi."]
    try:
        client.beta.messages.create(**fields(bodies.claude_picture(shown=True)))
    except anthropic.BadRequestError as error:
        assert "could not process image" in str(error).lower(), error
    else:
        raise AssertionError("a picture is not refused")
    assert answers(bodies.claude_picture(shown=False)) == third
    asked = fields(bodies.CLAUDE_TURNS[1])
    counted = client.beta.messages.count_tokens(**{key: asked[key] for key in ("model", "messages", "system", "tools")})
    assert counted.input_tokens > 2000


def run(prompt, *flags):
    """What the program prints: an object a line."""
    inherited = {key: os.environ[key] for key in ("PATH", "HOME")}
    ours = {
        "ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    command = ["claude", "-p", prompt, *flags, "--output-format", "stream-json", "--verbose"]
    command += ["--allowedTools", "Read,Write,Bash,ToolSearch,WebSearch"]
    done = subprocess.run(
        command, env=inherited | ours, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=120
    )
    print(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and lines[-1]["type"] == "result" and not lines[-1]["is_error"], lines[-1]
    return lines


def blocks(lines, kind):
    contents = [line["message"]["content"] for line in lines if line["type"] in ("assistant", "user")]
    return [block for content in contents for block in content if isinstance(block, dict) and block["type"] == kind]


def by_the_program():
    lines = run("Please play claude-files.")
    assert Path("hello.txt").read_text() == 'Hello "world" </tool_call>\n\té日本\n'
    assert lines[-1]["result"] == "The file is there."
    _, cut, read, ran = (block["input"] for block in blocks(lines, "tool_use"))
    assert "__unparsedToolInput" in cut and read == {"file_path": "hello.txt"} and ran["command"].endswith("exit 3")
    results = [block.get("is_error", False) for block in blocks(lines, "tool_result")]
    assert results == [False, True, False, True] and [b["thinking"] for b in blocks(lines, "thinking")], results

    lines = run("Please play claude-tools.")
    assert lines[-1]["result"] == "I looked."
    found = blocks(lines, "tool_result")
    assert found[0]["content"][0] == {"type": "tool_reference", "tool_name": "NotebookEdit"}
    assert "I have no script" in found[1]["content"]  # a model without the web answers from what it knows

    Path("pixel.png").write_bytes(b64decode(bodies.PICTURE))
    lines = run("Please play claude-picture.")
    assert lines[-1]["result"] == "It was a picture." and "removed" in json.dumps(blocks(lines, "text"))
    lines = run("Please play claude-goes-on.", "--resume", lines[-1]["session_id"])
    assert lines[-1]["result"] == "We can still talk."


by_the_sdk()
by_the_program()
