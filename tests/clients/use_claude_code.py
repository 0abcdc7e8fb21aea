"""Claude Code against a model that keeps to a script."""

import json
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

sys.path.insert(0, str(Path(os.environ["CLIENTS"]).parent))
import agent_bodies as bodies

URL, SEEING_URL = os.environ["SCRIPTED_URL"], os.environ["SEEING_URL"]


def run(prompt, *flags, url=URL):
    """What the program prints: an object a line."""
    inherited = {key: os.environ[key] for key in ("PATH", "HOME")}
    ours = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "scripted",
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
    assert lines[-1]["result"] == "I see 0." and "removed" in json.dumps(blocks(lines, "text"))
    lines = run("Please play claude-goes-on.", "--resume", lines[-1]["session_id"])
    assert lines[-1]["result"] == "We can still talk."

    lines = run("Please play claude-picture.", url=SEEING_URL)
    assert lines[-1]["result"] == "I see 1." and "removed" not in json.dumps(blocks(lines, "text"))
    lines = run("Please play claude-picture.", "--resume", lines[-1]["session_id"], url=SEEING_URL)
    assert lines[-1]["result"] == "I see 2."


by_the_program()
