"""`--events FILE`: all events of a job, one JSON object a line. Used by cli.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from farandole.clock import now_s, wall_time_s
from farandole.errors import ConfigError
from farandole.events import Event
from farandole.launch.nonblocking_writer import BackgroundWriter


class EventFile:
    """Appends lines to the file, each as soon as possible. A line that cannot be written is dropped: a full disk does
    not end the training. `on_trouble(sentence)` is called for the first such line; from any thread.

    Beside the event's own fields a line has `time`, seconds since 1970, `clock_s`, on the machine's monotonic clock,
    and `level`. Raises ConfigError when the file cannot be opened for writing.
    """

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self._path, self._on_trouble = path, on_trouble
        try:
            # Do not wait for a reader of a pipe: there may never be one.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(
                f"--events {path} cannot be written: {error.strerror}; name a file in a folder that is there"
            ) from error
        os.set_blocking(self._descriptor, True)
        self._is_torn = self._has_failed = False
        self._writer: BackgroundWriter[str] = BackgroundWriter("events", self._write, self._on_dropped)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on_event(self, event: Event) -> None:
        """Append the event. Never waits."""
        stamps = {"time": round(wall_time_s(), 6), "clock_s": round(now_s(), 6), "level": event.level}
        self._writer.put("", json.dumps({**stamps, **event.fields()}).encode() + b"\n")

    def close(self) -> None:
        """Write the remaining lines; waits for that with a time limit."""
        if self._writer.close():
            os.close(self._descriptor)

    def _write(self, _: str, data: bytes) -> None:
        rest = b"\n" + data if self._is_torn else data
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
                self._is_torn = True  # a part of a line may have been written
        except OSError as error:
            self._complain(f"{error.strerror}")
        else:
            self._is_torn = False

    def _on_dropped(self, dropped_bytes: int) -> None:
        self._complain(f"it takes too long, {dropped_bytes} bytes are lost")

    def _complain(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_trouble(f"--events {self._path}: {why}; events are missing there from now on")
