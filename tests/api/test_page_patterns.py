"""No text that a model writes takes the page long: its patterns, run by Node on texts that are hard for them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
SCRIPT = Path(__file__).with_name("page_patterns.mjs")
WEB = Path(__file__).parents[2] / "web"


@pytest.mark.full
@pytest.mark.skipif(NODE is None, reason="there is no Node on the path")
def test_every_pattern_of_the_page_is_linear(tmp_path: Path) -> None:
    shutil.copytree(WEB, tmp_path / "web")
    (tmp_path / "web" / "package.json").write_text('{"type": "module"}')  # as the page's script tag says
    done = subprocess.run([NODE, SCRIPT, tmp_path / "web"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["slow"] and report["patterns"] >= 20
