"""A line that stays at the bottom of a terminal while everything else scrolls above it. The threads of report.py and
output.py use it.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO, TextIO

from farandole.base.env import read_terminal_name
from farandole.job.launch.output import unbuffered, write_all
from farandole.job.launch.progress_line import Part, fitted

COLUMNS = 80
"""The width of a terminal that does not tell its own."""

_ERASE = b"\r\x1b[K"  # ECMA-48: CR, and EL from the cursor to the end of the line
_PLAIN = b"\x1b[0m"  # SGR
_COLOUR = re.compile(rb"\x1b\[([0-9;:]*)m")
_MOST_COLOURS = 16
_CANNOT_REDRAW = ("", "dumb", "unknown")


def job_line(choice: str, *, is_quiet: bool) -> TerminalLine | None:
    """Return the line of a job on the terminal of standard error, by one of PROGRESS (job_spec.py) and by whether the
    user wants to see only warnings and the result; None: there is none."""
    is_wanted = wants_line(
        choice,
        is_quiet=is_quiet,
        is_terminal=sys.stderr.isatty(),
        is_output_piped=_is_pipe(sys.stdout),
        terminal=read_terminal_name(),
    )
    return TerminalLine(sys.stderr) if is_wanted else None


def wants_line(choice: str, *, is_quiet: bool, is_terminal: bool, is_output_piped: bool, terminal: str) -> bool:
    """Return whether a line is drawn. A program that reads the output through a pipe, such as tee, may write to the
    same terminal, where it does not know of the line."""
    if choice != "auto":
        return choice == "always"
    return is_terminal and terminal not in _CANNOT_REDRAW and not is_output_piped and not is_quiet


def _is_pipe(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # a notebook's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class TerminalLine:
    """The line, on the terminal of `stream`. Every call waits for the terminal; any thread may make it.

    Nothing but erasing one line and colours is needed of the terminal, and no mode of it is changed. So there is
    nothing to restore after SIGKILL, and what other programs write to the terminal is never overwritten. The cursor is
    at the end of the line. While this process is in the background of its shell nothing is drawn.
    """

    def __init__(self, stream: TextIO, columns: Callable[[], int] | None = None) -> None:
        self._raw = unbuffered(stream)
        self._columns = self._terminal_columns if columns is None else columns
        self._lock = threading.Lock()
        self._parts: Sequence[Part] = ()
        self._is_drawn = False
        self._is_over = False
        self._is_at_start = True  # of a line that is empty but for ours
        self._colours: tuple[bytes, ...] = ()  # that the output above has left on

    def write(self, raw: BinaryIO, data: bytes) -> None:
        """Write to an unbuffered stream, which is this terminal or not: above the line. Raises OSError."""
        if not self._is_terminal(raw):
            write_all(raw, data)
            return
        with self._lock:
            before = self._erasure()
            self._colours = colours_after(self._colours, data)
            self._is_at_start = data.endswith(b"\n")
            write_all(raw, before + data + self._drawing())

    def show(self, parts: Sequence[Part]) -> None:
        """Draw the line anew, with other contents. Raises OSError."""
        with self._lock:
            self._parts = parts
            write_all(self._raw, self._erasure() + self._drawing())

    def end(self) -> None:
        """Erase the line for good. Raises OSError. Idempotent."""
        with self._lock:
            self._is_over = True
            write_all(self._raw, self._erasure())

    def _erasure(self) -> bytes:
        """Return the bytes that erase the line; those of the colours in which the output continues follow."""
        if not self._is_drawn:
            return b""
        self._is_drawn = False
        return _ERASE + b"".join(self._colours) if self._is_in_foreground() else b""

    def _drawing(self) -> bytes:
        """Return the bytes that draw the line where the cursor is; empty where it cannot be drawn now."""
        if self._is_over or not self._is_at_start or not self._is_in_foreground():
            return b""
        text = fitted(self._parts, self._columns() - 1)  # in the last column some terminals begin another line
        self._is_drawn = bool(text)
        return (_PLAIN if self._colours and text else b"") + text.encode("ascii", "replace")

    def _is_terminal(self, raw: BinaryIO) -> bool:
        try:
            return raw is self._raw or os.path.samestat(os.fstat(raw.fileno()), os.fstat(self._raw.fileno()))
        except (AttributeError, OSError, ValueError):
            return False

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._raw.fileno()) == os.getpgrp()
        except (AttributeError, OSError, ValueError):  # not the terminal that controls this process, or none
            return True

    def _terminal_columns(self) -> int:
        try:
            return os.get_terminal_size(self._raw.fileno()).columns or COLUMNS
        except (AttributeError, OSError, ValueError):
            return COLUMNS


def colours_after(before: tuple[bytes, ...], data: bytes) -> tuple[bytes, ...]:
    """Return the sequences of colours that are in force after `data`, if those of `before` were at its beginning."""
    if b"\x1b[" not in data:
        return before
    colours = dict.fromkeys(before)
    for found in _COLOUR.finditer(data):
        if found[1].strip(b"0") == b"":
            colours.clear()
            continue
        colours.pop(found[0], None)  # the newest of several comes last
        colours[found[0]] = None
    return tuple(colours)[-_MOST_COLOURS:]
