"""The scripts of examples/: each runs as its first line says, prints what it is there to show, and stays short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PRINTED = {  # patterns: the demo may get other weights
    "chat": [r"What is 23 \+ 58\? 81", r"Spell stone backwards\. .+"],
    "batch": [rf"What is {n} \+ {n}\? \d+ \(\d+ tokens, stop\)" for n in range(20, 28)] + [r"\d+ tokens"],
    "own_policy": [
        r"fcfs {'0': 3, '1': 7, '2': 11, '3': 15, '4': 19}",
        r"own_policy:Shortest {'4': 3, '3': 7, '2': 11, '1': 15, '0': 19}",
    ],
    "own_proposer": [r"ordinary text: \d drafts .*", r"one token, again and again: 1[5-9] drafts .*"],
    "own_logits": [r"\(\) \[9(, 9){7}\]", r"\('own_logits:NoRepeat',\) \[9(, 11, 9){3}, 11\]"],
}


def test_these_are_all_and_they_are_short() -> None:
    scripts = {path.stem: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == PRINTED.keys()
    assert not [name for name, text in scripts.items() if text.count("\n") > 30]
    assert not [name for name, text in scripts.items() if f"`PYTHONPATH=. python examples/{name}.py" not in text]


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_shows(tmp_path: Path, name: str) -> None:
    plot = tmp_path / "out.svg"
    command = [sys.executable, f"examples/{name}.py", *([str(plot)] if name == "own_policy" else [])]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert re.fullmatch("\n".join([*PRINTED[name], ""]), ran.stdout), ran
    if name == "own_policy":
        points = ElementTree.parse(plot).getroot()
        assert [point.get("fill") for point in points] == ["gray"] * 5 + ["teal"] * 5
