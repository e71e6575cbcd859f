"""The division of bytes into the lines that a terminal would have shown. Pure; used by process.py.

Progress bars redraw one line again and again with carriage returns. Several workers cannot redraw in place on one
terminal, so a line that is being redrawn is passed on as a separate line every few seconds, and once more when it is
complete.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_LINE_BYTES = 1 << 16
"""A longer line is passed on in pieces of this size: one line must not fill the agent's memory."""

REDRAW_S = 5.0
"""A line that is redrawn with carriage returns is passed on at most this often before it is complete."""


class LineSplitter:
    """Splits bytes into lines without their ends. The bytes of a line are not changed; text that a carriage return
    (other than one before a newline) overwrites is dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn_s = float("-inf")

    @property
    def unfinished(self) -> bytes:
        """The text so far of the line that has no end yet."""
        return _visible(self._rest)

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that `data` completes, and perhaps one that is being redrawn."""
        *complete, rest = (self._rest + data).split(b"\n")
        lines = [piece for line in complete for piece in _pieces(_visible(line))]
        # The last carriage return may be half of a line's end: only text before one with text after it is overwritten.
        overwritten, carriage_return, _ = rest.rstrip(b"\r").rpartition(b"\r")
        if carriage_return:
            rest = rest[len(overwritten) + 1 :]
            latest = _visible(overwritten)
            if latest.strip() and now_s - self._redrawn_s >= REDRAW_S:
                self._redrawn_s = now_s
                lines += _pieces(latest)
        while len(rest) > LONGEST_LINE_BYTES:
            lines.append(rest[:LONGEST_LINE_BYTES])
            rest = rest[LONGEST_LINE_BYTES:]
        self._rest = rest
        return lines

    def end(self) -> list[bytes]:
        """Return the last line at the end of the stream, if that line has no end."""
        unfinished, self._rest = self.unfinished, b""
        return [unfinished] if unfinished else []


def _visible(line: bytes) -> bytes:
    """Return the text that remains of a line on a terminal after its carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _pieces(line: bytes) -> Iterator[bytes]:
    yield line[:LONGEST_LINE_BYTES]
    for start in range(LONGEST_LINE_BYTES, len(line), LONGEST_LINE_BYTES):
        yield line[start : start + LONGEST_LINE_BYTES]
