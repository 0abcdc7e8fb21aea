"""Quotes the code in docs/story.md: `python docs/quote.py` writes the quotes anew.

A line `<!-- scheduler.py: Scheduler.add -->` has a block of Python after it: the function or class of that name, as the
file has it. Parts of it are quoted by how their first and their last lines begin. A line `...` stands for what is left
out:

    <!-- scheduler.py: Scheduler.add, "def add", "limit =" to "number, first" -->

A test fails while the page and the code differ.
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
STORY = ROOT / "docs" / "story.md"
MOST_LINES = 40
PART = re.compile(r'"([^"]+)"(?:\s+to\s+"([^"]+)")?')
MARKER = r'<!-- (?P<file>[\w/]+\.py): (?P<name>[\w.]+)(?P<parts>(?:,\s+"[^"]+"(?:\s+to\s+"[^"]+")?)*) -->\n'
QUOTE = re.compile(rf"(?P<opening>{MARKER}```python\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


def source_of(file: str, name: str) -> list[str]:
    """The lines of a function, method or class, without its indentation and decorators.

    Raises:
        ValueError: the file has no such name.
    """
    text = (ROOT / file).read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        parts = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", "") == part]
        if not parts:
            raise ValueError(f"{file} has no {name}")
        (node,) = parts
    assert isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno
    lines = text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines)).splitlines(keepends=True)


def line_at(lines: list[str], beginning: str, first: int) -> int:
    """The index of the next line, from the `first` on, that begins so; a ValueError if there is none."""
    for i in range(first, len(lines)):
        if lines[i].strip().startswith(beginning):
            return i
    raise ValueError(f"no line after line {first} of the quoted code begins with {beginning!r}")


def parts_of(lines: list[str], parts: list[tuple[str, str]]) -> list[str]:
    """The lines of these parts, which are in the order of the code, with `...` for each gap.

    Each part is how its first line and its last one begin; one of a single line has an empty end.
    """
    chosen: list[str] = []
    end = 0  # of the lines so far
    for first, last in parts:
        begin = line_at(lines, first, end)
        chosen += dots(lines[end:begin])
        end = 1 + (line_at(lines, last, begin) if last else begin)
        chosen += lines[begin:end]
    return chosen + dots(lines[end:])


def dots(left_out: list[str]) -> list[str]:
    """What stands for these lines: `...`, indented as the first of them; nothing for blank ones."""
    indents = [line[: len(line) - len(line.lstrip())] for line in left_out if line.strip()]
    return [f"{indents[0]}...\n"] if indents else []


def quote(file: str, name: str, parts: str = "") -> str:
    """The code that a marker asks for, whose `parts` are as it spells them; empty: all.

    Raises:
        ValueError: the file has no such name, or this has no such line; or the quote has more than 40 lines.
    """
    lines = source_of(file, name)
    try:
        chosen = parts_of(lines, PART.findall(parts)) if parts else lines
    except ValueError as error:
        raise ValueError(f"{name} of {file}: {error}") from None
    if len(chosen) > MOST_LINES:
        raise ValueError(f"the quote of {name} of {file} has {len(chosen)} lines; at most {MOST_LINES} are allowed")
    return "".join(chosen)


def quoted(page: str) -> str:
    """The page with its quotes as the code is now."""
    return QUOTE.sub(lambda match: match["opening"] + quote(match["file"], match["name"], match["parts"]), page)


if __name__ == "__main__":
    STORY.write_text(quoted(STORY.read_text()))
