"""The faults that are planted: what is changed in the text of a file, and what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.mutants import find_mutants


def faults(source: str) -> list[str]:
    """Return what becomes of the only changed line, for each mutant of a source of one line."""
    return [mutant.apply(source) for mutant in find_mutants("a.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b < c", ["a = b <= c"]),
        ("a = (b) is not c", ["a = (b) is c"]),
        ("a = b not in c", ["a = b in c"]),
        ("a = b and c and d", ["a = b or c and d", "a = b and c or d"]),
        ("a = not b", ["a = b"]),
        ("a = b - c", ["a = b + c"]),
        ("a = 3", ["a = 4"]),
        ("a = True", ["a = False"]),
        ("a = min(b, c)", ["a = max(b, c)"]),
        ("a = b if c else d", ["a = b if not (c) else d"]),
        ("a = [b for b in c if d(b)]", ["a = [b for b in c if not (d(b))]"]),
        ("a.b = c", ["pass"]),
        ("a[b] += c", ["pass"]),
        ("a(b)", ["pass"]),
        ("await a(b)", ["pass"]),
        ("raise a", ["pass"]),
        ("größe(b < c)", ["pass", "größe(b <= c)"]),
    ],
)
def test_one_thing_is_changed(source: str, expected: list[str]) -> None:
    assert sorted(faults(source)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "a: Literal[1] | None",
        "logger.info('%d', b + 1)",
        "a = f'{b + 1} of {c}'",
        "import a",
        "a = b",
        "def a(b: int | None) -> Literal[3]: yield",
    ],
)
def test_what_no_test_has_to_notice_is_left_alone(source: str) -> None:
    assert faults(source) == []


def test_a_condition_is_negated_once() -> None:
    assert faults("while a == b: c") == ["while a != b: c"]
    assert faults("if not a: b") == ["if a: b"]
    assert faults("if a: b") == ["if not (a): b"]


def test_a_mutant_has_the_name_of_its_function_and_shows_the_lines_that_change() -> None:
    source = (
        "class A:\n    async def b(self):\n        def c():\n            return (\n                d()\n            )\n"
    )
    (mutant,) = find_mutants("a.py", source)
    assert (mutant.function, mutant.line) == ("A.b.<locals>.c", 5)
    assert mutant.diff(source) == "-                d()\n+                None"


def test_all_mutants_of_a_file_can_be_compiled() -> None:
    source = Path(__file__).read_text()
    mutants = find_mutants("a.py", source)
    assert len(mutants) > 10
    for mutant in mutants:
        ast.parse(mutant.apply(source))
