"""The line at the bottom of a terminal: everything else scrolls above it undamaged, and it leaves nothing behind."""

from __future__ import annotations

import io
import os
import pty

import pytest

from farandole.job.launch.progress_line import Part
from farandole.job.launch.terminal_line import TerminalLine, colours_after, wants_line
from tests.support.terminal import Screen

PARTS = (Part(1, "epoch 1: 40%"), Part(2, "step 200"), Part(3, "4 workers"))
TEXT = "epoch 1: 40% | step 200 | 4 workers"


class Drawn:
    """A line on a screen."""

    def __init__(self, columns: int = 80) -> None:
        self.bytes = io.BytesIO()
        self.columns = columns
        stream = io.TextIOWrapper(self.bytes)
        self.line = TerminalLine(stream, columns=lambda: self.columns)
        self._stream = stream

    def say(self, data: bytes) -> None:
        self.line.write(self.bytes, data)

    @property
    def screen(self) -> Screen:
        screen = Screen(self.columns)
        screen.feed(self.bytes.getvalue().replace(b"\n", b"\r\n"))
        return screen

    @property
    def rows(self) -> list[str]:
        return self.screen.rows


def test_output_scrolls_above_the_line_which_leaves_nothing_behind() -> None:
    drawn = Drawn()
    drawn.say(b"[0] one\n")
    drawn.line.show(PARTS)
    assert drawn.rows == ["[0] one", TEXT]
    drawn.say(b"[1] two\n[0] three\n")
    assert drawn.rows == ["[0] one", "[1] two", "[0] three", TEXT]
    drawn.line.show(PARTS[:1])
    assert drawn.rows[3:] == ["epoch 1: 40%"]
    drawn.line.end()
    drawn.line.end()
    drawn.line.show(PARTS)
    drawn.say(b"[farandole] success\n")
    assert drawn.rows == ["[0] one", "[1] two", "[0] three", "[farandole] success", ""]


def test_without_a_line_the_bytes_are_as_they_were() -> None:
    drawn = Drawn()
    data = b"[0] \x1b[31mred\r\nplain\n"
    drawn.say(data)
    drawn.line.end()
    assert drawn.bytes.getvalue() == data


def test_what_goes_to_another_file_is_not_touched() -> None:
    drawn, other = Drawn(), io.BytesIO()
    drawn.line.show(PARTS)
    drawn.line.write(other, b"[0] one\n")
    assert other.getvalue() == b"[0] one\n"
    assert drawn.rows == [TEXT]


@pytest.mark.parametrize("columns", [1, 2, 5, 12, 13, 14, 25, 36, 37])
def test_the_line_never_reaches_the_last_column_however_narrow_the_terminal(columns: int) -> None:
    drawn = Drawn(columns)
    drawn.line.show(PARTS)
    drawn.say(b"a\n")
    drawn.say(b"b\n")
    assert drawn.rows[:2] == ["a", "b"]
    assert len(drawn.rows) == 3
    assert len(drawn.rows[2]) < columns
    drawn.line.end()
    assert drawn.rows == ["a", "b", ""]


def test_a_terminal_that_becomes_narrower_is_written_on_within_its_new_width() -> None:
    drawn = Drawn(80)
    drawn.line.show(PARTS)
    drawn.columns = 20
    drawn.line.show(PARTS)
    drawn.say(b"x\n")
    lines = drawn.bytes.getvalue().replace(b"\x1b[K", b"").split(b"\r")
    assert [len(line) for line in lines[2:]] == [len("x\nepoch 1: 40%")]


def test_a_line_without_its_end_is_not_overwritten() -> None:
    drawn = Drawn()
    drawn.line.show(PARTS)
    drawn.say(b"half")
    drawn.line.show(PARTS)
    assert drawn.rows == ["half"]
    drawn.say(b" whole\n")
    assert drawn.rows == ["half whole", TEXT]


def test_colours_of_the_output_stay_on_above_and_do_not_reach_the_line() -> None:
    drawn = Drawn()
    drawn.line.show(PARTS)
    drawn.say(b"\x1b[31mred\n")
    drawn.say(b"still red\n")
    drawn.line.show(PARTS)
    drawn.say(b"\x1b[1mbold, too\n")
    drawn.say(b"\x1b[0mplain\n")
    assert drawn.rows == ["red", "still red", "bold, too", "plain", TEXT]
    assert drawn.screen.colours == [{"31"}, {"31"}, {"31;1"}, {""}, {""}]


def test_colours_that_are_left_on() -> None:
    assert colours_after((), b"plain") == ()
    assert colours_after((), b"\x1b[31mred\x1b[0m plain \x1b[1m") == (b"\x1b[1m",)
    assert colours_after((b"\x1b[1m",), b"\x1b[32m\x1b[31m\x1b[32m") == (b"\x1b[1m", b"\x1b[31m", b"\x1b[32m")
    assert colours_after((b"\x1b[1m",), b"\x1b[m") == ()
    assert len(colours_after((), b"".join(b"\x1b[38;5;%dm" % number for number in range(200)))) == 16


def shows(terminal: int, text: str) -> bool:
    """Whether this comes next from a terminal, which may hand it on in pieces."""
    came = b""
    while len(came) < len(text):
        came += os.read(terminal, len(text) - len(came))
    return came.decode() == text


def test_a_real_terminal_tells_its_width_again_for_each_drawing() -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream:
        line = TerminalLine(stream)
        line.show(PARTS)  # a new terminal says 0 columns: unknown
        assert shows(ours, TEXT)
        with open(os.dup(theirs), "wb", buffering=0) as same_terminal:
            line.write(same_terminal, b"x\n")
        assert shows(ours, f"\r\x1b[Kx\r\n{TEXT}")
    os.close(ours)


def test_in_the_background_of_its_shell_it_neither_draws_nor_erases(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "wb", buffering=0) as raw, io.TextIOWrapper(raw) as stream:  # type: ignore[type-var]
        line = TerminalLine(stream)
        line.show(PARTS)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
        line.write(raw, b"x\n")
        line.show(PARTS)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        line.show(PARTS)
        assert shows(ours, f"{TEXT}x\r\n{TEXT}")
    os.close(ours)


@pytest.mark.parametrize(
    ("choice", "is_quiet", "is_terminal", "is_output_piped", "terminal", "wanted"),
    [
        ("auto", False, True, False, "xterm", True),
        ("auto", True, True, False, "xterm", False),
        ("auto", False, False, False, "xterm", False),
        ("auto", False, True, True, "xterm", False),
        ("auto", False, True, False, "dumb", False),
        ("auto", False, True, False, "", False),
        ("never", False, True, False, "xterm", False),
        ("always", True, False, True, "", True),
    ],
)
def test_when_there_is_a_line(
    choice: str, is_quiet: bool, is_terminal: bool, is_output_piped: bool, terminal: str, wanted: bool
) -> None:
    assert wanted == wants_line(
        choice, is_quiet=is_quiet, is_terminal=is_terminal, is_output_piped=is_output_piped, terminal=terminal
    )
