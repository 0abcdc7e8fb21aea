"""The documentation: its links lead somewhere, and the files that it names are there.

As a script it writes the table of fields in docs/api.md anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from api.checks import Face
from api.faces import FACES
from text.tools import REASONING_PARSERS, TOOL_PARSERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

API = ROOT / "docs" / "api.md"
TABLES = ("\n\nGeneration:\n\n", "\n\nOther routes:\n\n", "\n\n[//]: # (the end of the tables)\n")  # around them
WORDS = frozenset(("yes", "ignored", "no", ""))  # the others are names


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
    if page.name in (
        "seeds.md",
        "extend.md",
    ):  # which name vLLM's and made-up files
        return
    for name in re.findall(r"`(?:python )?((?:\w+/)*\w+\.py)[` ]", text):
        places = (name, f"bench/{name}", f"tests/{name}", f"tests/*/{name}")
        found = any(next(ROOT.glob(place), None) for place in places)
        assert found or name.startswith("modeling_"), f"{name} is not there"  # that is transformers'


def kind_of(face: Face, name: str) -> str:
    """What a route does with a field."""
    if field := face.fields.get(face.aliases.get(name, name)):
        return "ignored" if field.ignored else "yes"
    return face.elsewhere.get(name) or ("no" if name in face.not_yet else "")


def table_of(faces: Sequence[Face]) -> str:
    """A row for all fields of which these routes do the same, in Markdown."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for f in faces for name in (*f.fields, *f.aliases, *f.elsewhere, *f.not_yet)):
        kinds = tuple(kind_of(face, name) for face in faces)
        rows.setdefault(tuple(kind if kind in WORDS else "=" for kind in kinds), []).append(
            f"`{name}`" + "".join(f" (`{kind}`)" for kind in sorted({*kinds} - WORDS))
        )
    head = ["| field |" + "".join(f" {face.name} |" for face in faces), "|---|" + "---|" * len(faces)]
    return "\n".join(head + [f"| {', '.join(names)} | {' | '.join(kinds)} |" for kinds, names in rows.items()])


def with_tables(text: str) -> str:
    """The page with tables that are true."""
    first, then = text.split(TABLES[0])[0], text.split(TABLES[2])[1]
    answers = [face for face in FACES if "thinking_token_budget" in {*face.fields, *face.not_yet}]
    prompts = [face for face in FACES if face not in answers]
    return first + TABLES[0] + table_of(answers) + TABLES[1] + table_of(prompts) + TABLES[2] + then


def test_all_parsers_are_named() -> None:
    assert not [name for name in {*TOOL_PARSERS, *REASONING_PARSERS} if f"`{name}`" not in API.read_text()]


def test_the_tables_of_fields_are_true() -> None:
    assert API.read_text() == with_tables(API.read_text()), "PYTHONPATH=. python tests/test_docs.py writes them anew"


if __name__ == "__main__":
    API.write_text(with_tables(API.read_text()))
