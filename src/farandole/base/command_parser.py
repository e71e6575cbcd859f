"""The parser of each command: its errors are a line, with a suggestion."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from typing import NoReturn

USAGE_ERROR = 2

# The beginning of argparse's message about unknown options.
_UNKNOWN_FLAGS = "unrecognized arguments: "
_UNKNOWN_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


_WORKERS = "write -np N for all workers, or -H HOST:SLOTS for those of each host; or use `farandole torchrun`"
_ELSEWHERE = {
    "gloo": "torch's Gloo was slower than all others, and for comparison only: leave --transport out",
    "stop": "a job ends with its launcher, by Ctrl-C or `kill -INT PID`; `farandole jobs` shows the PID",
    "--nproc-per-node": _WORKERS,
    "--nproc_per_node": _WORKERS,
}
"""What other programs have under these names, and where it is here."""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without a page of usage, and suggests the intended option."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}{self._meant(message)}\nTry '{self.prog} --help'.\n")

    def _meant(self, message: str) -> str:
        """Return the known name that is most similar to the unknown one."""
        if message.startswith(_UNKNOWN_FLAGS):
            unknown, known = message.removeprefix(_UNKNOWN_FLAGS).split()[0], [*self._option_string_actions]
        elif found := _UNKNOWN_CHOICE.search(message):
            unknown, known = found[1], re.findall(r"[\w-]+", found[2])
        else:
            return ""
        if (expected := unknown.partition("=")[0]) in _ELSEWHERE:
            return f"; {_ELSEWHERE[expected]}"
        close = difflib.get_close_matches(unknown.partition("=")[0], known, n=1)
        return f"; did you mean {close[0]}?" if close else ""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a command prints its answer for programs. Errors are text on standard error, also
    then."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def value_counts(parser: argparse.ArgumentParser) -> Mapping[str, int]:
    """Return the number of values of each flag that has values."""
    counts: dict[str, int] = {}
    for action in parser._actions:
        count = 1 if action.nargs is None else action.nargs
        if isinstance(count, int) and count:
            counts |= dict.fromkeys(action.option_strings, count)
    return counts
