"""The documentation: its links lead somewhere, and the files that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from text.tools import REASONING_PARSERS, TOOL_PARSERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_files_are_there(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target} has no #{anchor}"
    if page.name in ("seeds.md", "extend.md"):  # they name vLLM's and made-up files
        return
    for name in re.findall(r"`(?:python )?((?:\w+/)*\w+\.py)[` ]", text):
        places = (name, f"bench/{name}", f"tests/{name}", f"tests/*/{name}")
        exists = any(next(ROOT.glob(place), None) for place in places)
        assert exists or name.startswith("modeling_"), f"{name} is not there"  # that is transformers'


def test_all_parsers_are_named() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert not [name for name in {*TOOL_PARSERS, *REASONING_PARSERS} if f"`{name}`" not in page]
