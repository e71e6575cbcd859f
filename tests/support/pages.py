"""The code blocks of the documentation: those of the pages, of the README, and the examples in docstrings."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farandole"

NOT_RUN = {
    "src/farandole/integrations/frameworks/": "slow to import: tests/integration/test_framework_examples.py",
    "src/farandole/testing/lab/": "it needs root: tests/integration/test_lab.py",
    "src/farandole/integrations/spark/": "it needs Parquet files and pyarrow: tests/engines/test_spark.py",
}
"""Reasons not to run examples of docstrings, by the beginnings of their places."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)
_EXAMPLES = re.compile(r"^Examples:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block: its place, its language, its text, and the reason why it is not run, if it is not."""

    place: str
    language: str
    code: str
    not_run: str = ""


def pages() -> list[Path]:
    """Return all pages for readers."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of_pages() -> Iterator[Block]:
    for page in pages():
        yield from fences(page.read_text(), str(page.relative_to(ROOT)))


def fences(text: str, name: str, first_line: int = 1) -> Iterator[Block]:
    """Yield the fenced blocks of a text. `<!-- not run: REASON -->` above a block keeps it from being run."""
    for match in _FENCE.finditer(text):
        reason = _MARK.search(text, 0, match.start())
        line = first_line + text.count("\n", 0, match.start())
        code = textwrap.dedent(match["code"])
        yield Block(f"{name}:{line}", match["language"], code, reason[1] if reason else "")


def blocks_of_docstrings() -> Iterator[Block]:
    """Yield the section "Examples" of each docstring: a fenced block, or lines for doctest."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if "Examples:\n" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            found = _EXAMPLES.search(ast.get_docstring(node) or "")
            if found:
                text, place = textwrap.dedent(found[1]), f"{path.relative_to(ROOT)}:{node.lineno}"
                fenced = [*fences(text, place)]
                reason = next((why for folder, why in NOT_RUN.items() if place.startswith(folder)), "")
                for block in fenced or [Block(place, "doctest", text)]:
                    yield replace(block, not_run=reason)
