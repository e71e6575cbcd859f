"""A terminal for tests: a screen that shows what a terminal would show, and a real pseudo-terminal for a command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

_SEQUENCE = re.compile(r"\x1b\[([0-9;:?]*)([A-Za-z])")


class Screen:
    """All rows that a terminal has ever had, without an end to scroll out of. Texts wider than it continue in the next
    row. Each character keeps the colours that were in force."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self._rows: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._colours = ""
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Show these bytes; a sequence may be cut off at their end."""
        text = self._rest + data.decode("utf-8", "replace")
        self._rest, index = "", 0
        while index < len(text):
            if text[index] == "\x1b":
                found = _SEQUENCE.match(text, index)
                if found is None:
                    self._rest = text[index:]
                    return
                self._obey(found[1], found[2])
                index = found.end()
                continue
            self._put(text[index])
            index += 1

    def _obey(self, parameters: str, action: str) -> None:
        if action == "m":
            self._colours = "" if parameters.strip("0") == "" else f"{self._colours};{parameters}".strip(";")
        elif action == "K":
            assert parameters in ("", "0"), parameters
            del self._rows[self._row][self._column :]
        else:
            raise AssertionError(f"the sequence {action} with {parameters!r} was not expected")

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\a":
            return
        elif character == "\n":
            self._begin_row()
        else:
            if self._column >= self.columns:
                self._begin_row()
                self._column = 0
            row = self._rows[self._row]
            row += [(" ", "")] * (self._column - len(row))
            row[self._column : self._column + 1] = [(character, self._colours)]
            self._column += 1

    def _begin_row(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])

    @property
    def rows(self) -> list[str]:
        """The texts of all rows."""
        return ["".join(character for character, _ in row) for row in self._rows]

    @property
    def colours(self) -> list[set[str]]:
        """The colours that occur in each row."""
        return [{colours for _, colours in row} for row in self._rows]

    @property
    def last(self) -> str:
        """The row in which the cursor is."""
        return self.rows[self._row]


class OnTerminal:
    """A command on a pseudo-terminal that controls it, as in a window; it is killed on leaving the `with`."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.screen = Screen(columns)
        self._terminal, theirs = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._terminal)

    def resize(self, columns: int) -> None:
        """Give the terminal another width; what it shows already stays as it is."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.screen.columns = columns

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._terminal, keys)

    def wait_until(self, condition: Callable[[Screen], bool], timeout_s: float) -> None:
        """Show what comes until the screen fulfils the condition. Raises AssertionError with the screen."""
        deadline_s = time.monotonic() + timeout_s
        while not condition(self.screen):
            assert time.monotonic() < deadline_s, "\n".join(self.screen.rows)
            assert self._show(0.2), "\n".join(self.screen.rows)

    def wait(self, timeout_s: float) -> int:
        """Show everything until the command has ended; return its exit code."""
        deadline_s = time.monotonic() + timeout_s
        while self._show(0.2):
            assert time.monotonic() < deadline_s, "\n".join(self.screen.rows)
        return self.process.wait(timeout_s)

    def _show(self, within_s: float) -> bool:
        """Show what comes within this time; return False at the end: nothing has the terminal open any more."""
        if select.select([self._terminal], [], [], within_s)[0]:
            with contextlib.suppress(OSError):  # EIO: pty(7)
                if data := os.read(self._terminal, 65536):
                    self.screen.feed(data)
                    return True
            return False
        return True
