"""Codex, and the bodies that it sends by OpenAI's SDK, against a model that keeps to a script."""

import json
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import openai

sys.path.insert(0, str(Path(os.environ["CLIENTS"]).parent))
import agent_bodies as bodies

URL = os.environ["SCRIPTED_URL"] + "/v1"
SCRIPT = "Please play codex-bodies."
SHOWN = {"type", "name", "namespace", "arguments", "input", "content", "status"}
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)


def answers(items):
    """The items of an answer; the same whole, and by the events of a stream."""
    body = json.loads(json.dumps(bodies.codex(items, model="scripted")).replace("What does hello.py do?", SCRIPT))
    body.pop("stream")
    extra = {"extra_body": {"client_metadata": body.pop("client_metadata")}}
    whole = client.responses.create(**body, **extra)
    with client.responses.create(**body, **extra, stream=True) as stream:
        events = list(stream)
    assert events[0].type == "response.created" and events[-1].type == "response.completed", events[-1]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output and events[-1].response.usage == whole.usage
    found = [[item.model_dump(include=SHOWN) for item in output] for output in (whole.output, done)]
    assert found[0] == found[1], found
    return found[0]


def by_the_sdk():
    first, second, third = map(answers, bodies.CODEX_TURNS)
    assert [item["type"] for item in first] == ["reasoning", "message", "function_call", "function_call"], first
    assert (first[2]["name"], first[2]["arguments"]) == ("Read", '{"path": "hello.py"}')
    assert (first[3]["namespace"], first[3]["name"]) == ("crew", "Start")
    patch = '*** Begin Patch\n*** Add File: é.txt\n+"</tool_call>"\n*** End Patch\n'
    assert (second[0]["type"], second[0]["name"], second[0]["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert [item["content"][0]["text"] for item in third] == ["It says hi."]
    try:
        answers(bodies.codex_picture(shown=True))
    except openai.BadRequestError as error:
        assert "does not represent a valid image" in str(error) and error.param.endswith(".image_url"), error
    else:
        raise AssertionError("a picture is not refused")
    assert answers(bodies.codex_picture(shown=False)) == third


def run(*arguments, code=0, model="scripted", provider="manta", variables=None):
    """What the program prints: an object a line. Its last message is in `last.txt`."""
    home = Path("codex-home")
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[model_providers.manta]\nname = "Manta"\nbase_url = "{URL}"\nwire_api = "responses"\n'
    )
    flags = ["--json", "--skip-git-repo-check", "-m", model, "-o", "last.txt", "-s", "danger-full-access"]
    flags += ["-c", f"model_provider={provider}"] if provider else []
    inherited = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "CODEX_HOME": str(home.resolve())}
    done = subprocess.run(
        ["codex", "exec", *flags, *arguments], env=inherited | (variables or {}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == code, done.returncode
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def last():
    return Path("last.txt").read_text()


def by_the_program():
    lines = run("Please play codex-files.")
    assert Path("hello.txt").read_text() == 'Hello "world" </tool_call>\n' and last() == "The file is there."
    items = [line["item"] for line in lines if line["type"] == "item.completed"]
    assert lines[-1]["usage"]["reasoning_output_tokens"] > 0, lines[-1]
    codes = [item["exit_code"] for item in items if item["type"] == "command_execution"]
    assert sorted(codes) == [0, 0, 3] and any(item["type"] == "collab_tool_call" for item in items), items
    run("resume", "--last", "Please play codex-goes-on.")
    assert last() == "We can still talk."

    lines = run("Please play codex-patch.", model="gpt-5.5")  # which it knows, and so gives it other tools
    assert Path("new.txt").read_text() == 'Hello "world"\n' and last() == "The file is there."

    Path("pixel.png").write_bytes(b64decode(bodies.PICTURE))
    lines = run("Please play codex-picture.", code=1)
    assert "Invalid image" in lines[-1]["error"]["message"], lines[-1]

    Path("title.json").write_text(json.dumps(bodies.CLAUDE_FORMAT["schema"]))
    run("Please play codex-title.", "--output-schema", "title.json")
    assert json.loads(last()) == {"title": "Hello"}

    local = ("--oss", "--local-provider", "lmstudio")  # whose own wire this is
    run("Please play codex-goes-on.", *local, provider=None, variables={"CODEX_OSS_BASE_URL": URL})
    assert last() == "We can still talk."


by_the_sdk()
by_the_program()
