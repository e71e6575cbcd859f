"""The texts of the site that come from the code: the commands from their parsers, the events and the fields of
`farandole status --json` from their classes."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import msgspec

from farandole.base import membership
from farandole.base.events.event import Event
from farandole.base.events.kinds import KINDS, MODULES
from farandole.job.launch import cli
from farandole.integrations.horovod import horovodrun
from farandole.base.wire import control

WORDS = {"kubernetes": ("kubernetes", "manifest")}
"""Commands whose options are those of a further word."""


# Commands -------------------------------------------------------------------------------------------------------------


class _Found(Exception):
    """Carries the parser that was about to read the arguments."""


def _stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
    raise _Found(parser)


def parser_of(run: Callable[[], object]) -> argparse.ArgumentParser:
    """Return the parser with which this call reads its arguments; the call ends there."""
    with mock.patch.object(argparse.ArgumentParser, "parse_args", _stop):
        try:
            run()
        except _Found as found:
            parser: argparse.ArgumentParser = found.args[0]
            return parser
    raise AssertionError("no arguments were read")


def command_names() -> list[str]:
    """Return all commands of `farandole`, as its own help lists them."""
    (action,) = (action for action in parser_of(lambda: cli.main([]))._actions if action.dest == "command")
    assert action.choices is not None
    return [*action.choices]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command, by its words: `farandole status`."""
    found = {}
    for name in command_names():
        words = WORDS.get(name, (name,))
        found[" ".join(("farandole", *words))] = parser_of(lambda words=words: cli.main(words))
    return found | {"horovodrun": parser_of(lambda: horovodrun.main([]))}


def commands() -> str:
    """Return a section for each command, with its usage and its options."""
    return "\n\n".join(_command(name, parser) for name, parser in parsers().items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    parts = [f"## `{name}`", _prose(parser.description or ""), f"```text\n{inspect.cleandoc(usage)}\n```"]
    for group in parser._action_groups:
        rows = [row for action in group._group_actions if (row := _row(parser, action))]
        if rows:
            title = group.title if group.title not in (None, "options", "positional arguments") else None
            parts.append(f"**{title[0].upper()}{title[1:]}**" if title else "")
            parts.append("\n".join(("| option | meaning |", "|---|---|", *rows)))
    parts.append(_prose(parser.epilog or ""))
    return "\n\n".join(part for part in parts if part)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if action.help == argparse.SUPPRESS or action.dest == "help":
        return ""
    formatter = parser._get_formatter()
    if action.option_strings:
        value = "" if action.nargs == 0 else " " + formatter._format_args(action, action.dest.upper())
        first, *others = action.option_strings
        name = ", ".join([f"`{first}{value}`", *(f"`{other}`" for other in others)])
    else:
        name = f"`{formatter._format_args(action, action.dest)}`"
    text = formatter._expand_help(action) if action.help else ""
    return f"| {name} | {_cell(text)} |"


# Events ---------------------------------------------------------------------------------------------------------------


def all_events() -> Iterator[tuple[str, list[type[Event]]]]:
    """Yield what each file of events is about, with its events."""
    for module in MODULES:
        heading = (inspect.getdoc(module) or "").removesuffix(".")
        yield heading, [kind for kind in KINDS.values() if kind.__module__ == module.__name__]


def events_text() -> str:
    """Return a table of events for each file of events."""
    parts = []
    for heading, kinds in all_events():
        rows = [
            f"| `{kind.__name__}` | {kind.level} | {_cell(_docstring(kind))} | {_fields(dataclasses.fields(kind))} |"
            for kind in kinds
        ]
        parts.append(f"## {heading}\n\n| event | level | meaning | fields |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _fields(fields: Sequence[dataclasses.Field[Any]]) -> str:
    return ", ".join(f"`{field.name}`: {_type(field.type)}" for field in fields)


def _docstring(kind: type) -> str:
    """Return the class's own docstring; a dataclass without one gets its signature, which is none."""
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    return "" if text.startswith(f"{kind.__name__}(") else text


# Status ---------------------------------------------------------------------------------------------------------------

STATUS = (
    control.Status,
    control.WorkerSummary,
    membership.WorkerTelemetry,
    control.HostStatus,
    control.SlotInBackoff,
    control.PastEvent,
)


def status_text() -> str:
    """Return a table of fields for each object in `farandole status --json`."""
    return "\n\n".join(map(_object, STATUS))


def _object(kind: type[msgspec.Struct]) -> str:
    text, _, described = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")
    meanings = _attributes(described)
    rows = [
        f"| `{field.name}` | {_type(kind.__annotations__[field.name])} | {_cell(meanings.get(field.name, ''))} |"
        for field in msgspec.structs.fields(kind)
    ]
    return f"## {kind.__name__}\n\n{_prose(text)}\n\n| field | type | meaning |\n|---|---|---|\n" + "\n".join(rows)


def _attributes(text: str) -> dict[str, str]:
    """Read the section "Attributes" of a docstring: `name: meaning`, or `name, name: meaning`."""
    found: dict[str, str] = {}
    for names, meaning in re.findall(r"^    ([\w, ]+): (.*(?:\n {6,}.*)*)", text, re.MULTILINE):
        for name in names.split(", "):
            found[name] = " ".join(meaning.split())
    return found


# Text -----------------------------------------------------------------------------------------------------------------


def _type(annotation: object) -> str:
    """Return a type as JSON has it."""
    text = str(annotation)
    for pattern, name in (
        (r"tuple\[(\w+), \.\.\.\]", r"list of \1"),
        (r"\bstr\b", "text"),
        (r"\b(int|float)\b", "number"),
        (r"\bbool\b", "true or false"),
        (r" \| None", " or null"),
    ):
        text = re.sub(pattern, name, text)
    return text


def _cell(text: str) -> str:
    return _prose(" ".join(text.split())).replace("|", "\\|")


def _prose(text: str) -> str:
    """Return text for people as Markdown: nothing in it is markup, except code between backquotes."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", part) for part in parts)


TEXTS: dict[str, Callable[[], str]] = {"commands": commands, "events": events_text, "status": status_text}
