"""Quotes functions of the code in docs/story.md: `python docs/quote.py` writes them anew.

A line `<!-- scheduler.py: Scheduler.add -->` has a block of Python after it: the function or class of that name, as the
file has it. A test fails while the page and the code differ.
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
STORY = ROOT / "docs" / "story.md"
MOST_LINES = 40
QUOTE = re.compile(r"(<!-- ([\w/]+\.py): ([\w.]+) -->\n```python\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)


def source_of(file: str, name: str) -> str:
    """The lines of a function, method or class, without its indentation and decorators.

    Raises:
        ValueError: the file has no such name, or it takes more than 40 lines.
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
    if len(lines) > MOST_LINES:
        raise ValueError(f"{name} of {file} has {len(lines)} lines; at most {MOST_LINES} can be quoted")
    return textwrap.dedent("".join(lines))


def quoted(page: str) -> str:
    """The page with its quotes as the code is now."""
    return QUOTE.sub(lambda quote: quote[1] + source_of(quote[2], quote[3]), page)


if __name__ == "__main__":
    STORY.write_text(quoted(STORY.read_text()))
