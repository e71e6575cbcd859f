"""The analysis of commands of the form `python [options] script.py ...` and `python [options] -m module ...`. Pure. A
fork server can replace them; spawner.py asks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Options that mean the same for a server that runs another script first. Not -c, -i, -x and those that only print.
_FLAGS = re.compile(r"-[bBdEIOPqsSuv]+")
_WITH_VALUE = re.compile(r"-[bBdEIOPqsSuv]*[WX]")
_MODULE = re.compile(r"-[bBdEIOPqsSuv]*m")


@dataclass(frozen=True)
class PythonCommand:
    """A Python command. `target` is the part after the interpreter's options: a script, or "-m" and a module; then its
    arguments."""

    python: str
    options: tuple[str, ...]
    target: tuple[str, ...]


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Return None for any other command, as far as its words tell."""
    if not command or not re.fullmatch(r"python[0-9.]*", command[0].rpartition("/")[2]):
        return None
    options, rest = list[str](), list(command[1:])
    while rest:
        word = rest[0]
        if word == "--check-hash-based-pycs" or _WITH_VALUE.fullmatch(word):
            options += rest[:2]
            rest = rest[2:]
        elif _MODULE.fullmatch(word) and len(rest) > 1:
            flags = word[:-1]
            return PythonCommand(command[0], (*options, *([flags] if flags != "-" else [])), ("-m", *rest[1:]))
        elif _FLAGS.fullmatch(word) or (_WITH_VALUE.match(word) and "importtime" not in word):
            options.append(rest.pop(0))
        elif word.endswith(".py") and not word.startswith("-") and "importtime" not in options:
            return PythonCommand(command[0], tuple(options), tuple(rest))
        else:
            return None
    return None
