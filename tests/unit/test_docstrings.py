"""Docstrings begin with a noun or a verb: a sentence, or an imperative."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "farandole"
MOST = 0.03
"""The part of the docstrings that may begin otherwise."""

PRONOUNS = "they it its their he she we our ours you your these those this that nobody somebody everybody nothing"
RELATIVES = "what whether who whom whose which where when how why whatever whoever wherever"
PREPOSITIONS = "of in on at by for from to with without within behind before after as until under over between since if"
FRAGMENTS = frozenset(f"{PRONOUNS} {RELATIVES} {PREPOSITIONS}".split())


def docstrings() -> Iterator[tuple[str, str]]:
    """Each with the place where it stands."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", text


def test_docstrings_are_sentences() -> None:
    every = list(docstrings())
    first = [(place, text.split()[0].strip("`*'\".,:;()[]").lower(), text.splitlines()[0]) for place, text in every]
    fragments = [f"{place}: {line}" for place, word, line in first if word in FRAGMENTS]
    assert len(fragments) <= MOST * len(every), "\n".join(fragments)
