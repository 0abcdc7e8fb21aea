"""What is optional can be taken out by hand: without its files and its lines at the doors, the demo still serves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from served import ROOT, serving

# What the log says, and what `/metrics` counts.
KEPT = {"observe/__init__.py", "observe/logs.py", "observe/metrics.py", "observe/prometheus.py"}
PARTS: dict[str, tuple[list[str], dict[str, dict[str, str]]]] = {  # its files, and what becomes of lines at its doors
    "executors": (["executors/*.py"], {
        "core.py": {"from executors.choose import new_executor":
                    "from executor import new_local_executor as new_executor"},
        "processes/fleet.py": {"from executors.torchrun import lead_or_follow": ""},
    }),
    "observe": (["observe/*.py"], {
        "core.py": {
            "from observe.observers import observers_of": "",
            "from observe.profiles import Profiles": "",
            "        self.recorder, self.observers = observers_of(config, sizes, self.scheduler)":
            "        self.observers = []",
            "        self.profiles = Profiles(config, self.workers.call, self.observers)": "",
        },
        "scheduler.py": {"from observe.freed_blocks import WatchedBlockManager": ""},
        "worker.py": {
            "from observe.phases import DeviceClock, Phases": "",
            "from observe.profiled import Profiled": "",
            "class Worker(Profiled):": "class Worker:",
            "from observe.sanitizer import KVSanitizer": "",
        },
    }),
    "faces": (["commands/batch*.py", "commands/terminal.py", "api/anthropic*.py"], {
        "server.py": {
            "from commands import batch, terminal": "",
            '    "chat": terminal.chat,': "", '    "complete": terminal.complete,': "",
            '    "batch": batch.main,': "",
        },
        "commands/plan.py": {
            '    "chat": "talk with a model in the terminal",': "", '    "complete": "go on from a text",': "",
            '    "batch": "answer a file of requests",': "",
        },
        "api/faces.py": {"from api.anthropic import COUNT_TOKENS, MESSAGES": "", "MESSAGES, COUNT_TOKENS, ": ""},
    }),
}  # fmt: skip


def take_out(part: str, tree: Path) -> None:
    """Delete the files of a part, and change its lines at the doors, each of which must stand there just once."""
    patterns, doors = PARTS[part]
    for path in (path for pattern in patterns for path in tree.glob(pattern)):
        if str(path.relative_to(tree)) not in KEPT:
            path.unlink()
    for file, lines in doors.items():
        text = (tree / file).read_text()
        for old, new in lines.items():
            end = "" if old.endswith(" ") else "\n"  # a part of a line ends in a space
            assert text.count(old + end) == 1, f"{file} does not have just once: {old}"
            text = text.replace(old + end, new and new + end)
        (tree / file).write_text(text)


def tree_without(parts: list[str], folder: Path) -> Path:
    """A copy of the tree without some parts."""
    tree = folder / "tree"
    shutil.copytree(ROOT / "demo", tree / "demo")
    for path in (*ROOT.glob("*.py"), *ROOT.glob("*/__init__.py"), ROOT / "web"):
        if path.name == "__init__.py" or path.is_dir():
            folder = path if path.is_dir() else path.parent
            shutil.copytree(folder, tree / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, tree)
    for part in parts:
        take_out(part, tree)
    return tree


def test_nothing_else_imports_what_is_optional(tmp_path: Path):
    tree = tree_without([*PARTS], tmp_path)
    command = [sys.executable, "-c", "import async_llm, core, engine, server"]
    ran = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "parts",
    [pytest.param([*PARTS], marks=pytest.mark.full), *(pytest.param([p], marks=pytest.mark.long) for p in PARTS)],
)
def test_the_demo_serves_without(parts: list[str], tmp_path: Path):
    tree = tree_without(parts, tmp_path)
    with serving(tmp_path, "--threads", "1", root=tree) as server:
        said = [{"role": "user", "content": "What is 23 + 58?"}]
        answer = server.client().chat.completions.create(model="demo", messages=said, temperature=0)
        assert "81" in answer.choices[0].message.content
