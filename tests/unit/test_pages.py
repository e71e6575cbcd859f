"""The code blocks of the documentation: each has a language, shell commands have options that exist."""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import msgspec
import pytest
import yaml

from farandole.base.command_parser import value_counts
from farandole.job.launch.arguments import split_command
from tests.support.pages import ROOT, Block, blocks_of_docstrings, blocks_of_pages, pages

LANGUAGES = {
    "python": "run by tests/integration/test_documentation.py",
    "sh": "its commands have options that exist",
    "diff": "made of two files, by tests/integration/test_migrations.py",
    "yaml": "parsed",
    "toml": "parsed",
    "dockerfile": "none of ours: what a user's image may look like",
    "text": "no code: output, diagrams",
}
"""The languages of blocks, and how each is tested."""

WITH_COMMAND = {"farandole run", "farandole torchrun", "farandole kubernetes manifest", "horovodrun"}
BLOCKS = [*blocks_of_pages()]


def test_every_block_of_a_page_has_a_language() -> None:
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []


def test_no_page_has_an_indented_block_which_has_no_language() -> None:
    for page in pages():
        lines = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split("\n")
        for before, line in zip(["", *lines], lines, strict=False):
            assert not (line.startswith("    ") and not before) or _is_in_list(lines, line), f"{page.name}: {line}"


def _is_in_list(lines: list[str], line: str) -> bool:
    """Return whether an indented line continues an item of a list, or a directive."""
    start = lines.index(line)
    above = next((each for each in reversed(lines[:start]) if each and not each.startswith(" ")), "")
    return re.match(r"\d+\. |- |!!! |\?\?\? |=== ", above) is not None


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_can_be_read(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.code)
    elif block.language == "yaml":
        yaml.safe_load(block.code)
    elif block.language == "toml":
        tomllib.loads(block.code)
    elif block.language == "sh":
        check_all(block.code)


def test_examples_of_docstrings_can_be_read() -> None:
    for block in blocks_of_docstrings():
        if block.language == "doctest":
            assert doctest.DocTestParser().get_examples(block.code), block.place
        else:
            ast.parse(block.code)


def test_a_reason_not_to_run_a_block_mentions_files_that_exist() -> None:
    reasons = {block.not_run for block in (*BLOCKS, *blocks_of_docstrings()) if block.not_run}
    assert reasons
    for reason in reasons:
        (first, *_) = mentioned = re.findall(r"(?:tests|examples)/[\w/]+\.py", reason)
        assert first, reason
        assert all((ROOT / path).exists() for path in mentioned), reason


# Shell commands -------------------------------------------------------------------------------------------------------


def commands(code: str) -> Iterator[list[str]]:
    """Yield the commands of a block, as words."""
    for line in code.replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        is_file = False  # of a redirection
        for token in [*lexer, ";"]:
            if re.fullmatch(r"[&;|]+", token):
                yield words
                words = []
            elif not is_file and not re.fullmatch(r"[<>]+", token):
                words.append(token)
            is_file = re.fullmatch(r"[<>]+", token) is not None


@cache
def from_code() -> ModuleType:
    """Return the module that makes the page of the commands; it is no part of the package."""
    path = ROOT / "docs" / "_build" / "from_code.py"
    spec = importlib.util.spec_from_file_location("from_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    return dict(from_code().parsers())


def check_all(code: str) -> None:
    for words in commands(code):
        check(words)


def check(words: list[str]) -> None:
    """Check a command: options of ours exist and their values can be read; so do targets of make and extras of pip."""
    words = words[1:] if words[:1] == ["exec"] else words
    if words[:3] == ["python", "-m", "farandole"]:
        words = ["farandole", *words[3:]]
    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert [each for each in re.findall(r"farandole\[([\w-]+)", " ".join(words)) if each not in extras] == []
    if words[:1] == ["make"]:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [each for each in words[1:] if "=" not in each and each not in targets] == []
    for name, parser in parsers().items():
        ours = name.split()
        if words[: len(ours)] == ours:
            rest = words[len(ours) :]
            if {"--help", "--version", "--check-build"} & {*rest}:
                return
            if name in WITH_COMMAND:
                rest, _ = split_command(rest, value_counts(parser))
            elif "--" in rest:
                rest = rest[: rest.index("--")]
            read(parser, rest, " ".join(words))
            return
    assert words[:1] not in (["farandole"], ["horovodrun"]), f"no such command: {' '.join(words)}"


def read(parser: argparse.ArgumentParser, words: list[str], line: str) -> None:
    words = [re.sub(r"^(\$\(.*|[A-Z]|\$\w+)$", "1", word) for word in words]  # what stands for a number
    try:
        parser.parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"{line}: options that cannot be read") from error


@pytest.mark.parametrize(
    "line",
    [
        "farandole run -np 4 --no-such-option python train.py",
        "farandole status --no-such-option",
        "farandole no-such-command",
        "make no-such-target",
        "pip install 'farandole[no-such-extra]'",
        "sleep 1; farandole scale many",
    ],
)
def test_a_command_that_cannot_work_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        check_all(line)


# The texts that come from the code ------------------------------------------------------------------------------------


def test_the_page_of_the_commands_has_every_command_and_option() -> None:
    text = from_code().commands()
    for name, parser in parsers().items():
        assert f"## `{name}`" in text
        for action in parser._actions:
            is_hidden = action.help == argparse.SUPPRESS or action.dest == "help"
            assert is_hidden or all(f"`{flag}" in text for flag in action.option_strings), action


def test_the_page_of_the_events_has_every_event() -> None:
    names = [
        name
        for file in (ROOT / "src/farandole/base/events").glob("*.py")
        for name in re.findall(r"^class (\w+)\(Event\)", file.read_text(), re.MULTILINE)
    ]
    text = from_code().events_text()
    assert [name for name in names if f"| `{name}` |" not in text] == []
    assert re.findall(r"^\| `(\w+)` \| \w+ \|  \|", text, re.MULTILINE) == [], "events without a meaning"


def test_every_field_of_the_status_has_a_meaning() -> None:
    text = from_code().status_text()
    for kind in from_code().STATUS:
        assert f"## {kind.__name__}" in text
    assert re.findall(r"^\| `\w+` \| [^|]+ \|  \|$", text, re.MULTILINE) == []


def test_every_example_is_on_its_page() -> None:
    text = (ROOT / "docs" / "examples.md").read_text()
    parts = {"resnet.py", "images.py"}  # what the scripts beside them import
    scripts = [path for kind in ("py", "ipynb") for path in (ROOT / "examples").rglob(f"*.{kind}")]
    named = [path for path in scripts if path.name not in parts and path.parent.name != "tutorial"]
    assert len(named) > 8
    assert [path for path in named if f"`{path.relative_to(ROOT)}`" not in text] == []
    assert [path for path in scripts if path.parent.name == "tutorial" and f"`{path.name}`" not in text] == []


def test_every_object_within_the_status_has_a_table() -> None:
    kinds = from_code().STATUS

    def within(hint: object) -> Iterator[type]:
        for inner in get_args(hint) or (hint,):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield inner
                yield from within_fields(inner)
            elif inner is not hint:
                yield from within(inner)

    def within_fields(kind: type) -> Iterator[type]:
        return (each for hint in get_type_hints(kind).values() for each in within(hint))

    assert {kinds[0], *within_fields(kinds[0])} == set(kinds)


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    assert {str(Path(each)) for each in listed} == {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
