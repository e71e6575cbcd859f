"""The size of the source: a number here only goes down, or its commit says why not, and what it made superfluous."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "farandole"

LINES = {
    "base": 6953,
    "job": 19844,
    "training": 28210,
    "integrations": 28004,
    "testing": 2527,
    "doors": 574,
}
"""The most lines of each storey, in its Python files."""

LONGEST = 500

SIZES = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}


def lines_by_storey() -> Counter[str]:
    found: Counter[str] = Counter()
    for file, size in SIZES.items():
        first = file.partition("/")[0]
        found[first if first in LINES else "doors"] += size
    return found


@pytest.mark.parametrize("storey", LINES)
def test_a_storey_does_not_grow(storey: str) -> None:
    assert lines_by_storey()[storey] <= LINES[storey]


def test_no_file_becomes_long() -> None:
    too_long = {file: size for file, size in SIZES.items() if size > LONGEST}
    assert too_long == {}


def test_the_budget_has_no_room_to_grow() -> None:
    slack = {storey: most - lines_by_storey()[storey] for storey, most in LINES.items()}
    assert {storey: lines for storey, lines in slack.items() if lines > 200} == {}


def test_what_a_process_has_once_is_an_object_and_no_global_statement() -> None:
    """The rest: a flag of a forked server, what a patch of torch and Horovod's registry have once for good."""
    trees = [ast.parse(path.read_text()) for path in ROOT.rglob("*.py")]
    assert sum(isinstance(node, ast.Global) for tree in trees for node in ast.walk(tree)) <= 4
