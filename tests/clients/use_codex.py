"""Codex against a model that keeps to a script."""

import json
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

sys.path.insert(0, str(Path(os.environ["CLIENTS"]).parent))
import agent_bodies as bodies

URL, SEEING_URL = (os.environ[f"{name}_URL"] + "/v1" for name in ("SCRIPTED", "SEEING"))


def run(*arguments, code=0, model="scripted", provider="manta", variables=None, url=URL):
    """What the program prints: an object a line. Its last message is in `last.txt`."""
    home = Path("codex-home")
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[model_providers.manta]\nname = "Manta"\nbase_url = "{url}"\nwire_api = "responses"\n'
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
    for i in (1, 2):
        run(*("resume", "--last") * (i > 1), "Please play codex-picture.", url=SEEING_URL)
        assert last() == f"I see {i}."

    Path("title.json").write_text(json.dumps(bodies.CLAUDE_FORMAT["schema"]))
    run("Please play codex-title.", "--output-schema", "title.json")
    assert json.loads(last()) == {"title": "Hello"}

    local = ("--oss", "--local-provider", "lmstudio")  # whose own wire this is
    run("Please play codex-goes-on.", *local, provider=None, variables={"CODEX_OSS_BASE_URL": URL})
    assert last() == "We can still talk."


by_the_program()
