"""Adds the generations of a job to the file of --timeline-filename, in which rank 0 has recorded named operations."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farandole.base.events.event import Event
from farandole.base.machine import wall_time_s
from farandole.base.wire.control import EventRecord
from farandole.job.launch.job_history import JobHistory
from farandole.job.launch.job_trace import trace_of

_WRITE_S = 10.0  # a disk that hangs must not keep a job from ending
_END_OF_ARRAY = b"\n]\n"
_START = re.compile(rb'"start_time_since_epoch_in_micros": (\d+)')
_HEAD_BYTES = 4096
_TAIL_BYTES = 1 << 20


class JobTimeline:
    """The history of one job: `on_event` for each event. The file gets it in `close()`, when no worker writes
    there any more. A file that another machine has is made here, with the generations alone. `on_trouble` is called
    with a sentence when it cannot be written."""

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self._path, self._on_trouble = path, on_trouble
        self._history, self._count = JobHistory(), 0
        self._began_us = int(wall_time_s() * 1e6)

    def close(self) -> None:
        """Write the file, with a time limit."""
        writing = threading.Thread(target=self._write, name="farandole-timeline", daemon=True)
        writing.start()
        writing.join(_WRITE_S)

    def on_event(self, event: Event) -> None:
        """Take an event that happens now."""
        self._count += 1
        record = EventRecord(1, self._count, 0.0, event.level, event.line(), event.fields())
        self._history.on_event(record, wall_time_s())

    def _write(self) -> None:
        if not self._history.generations or (self._path.exists() and not self._path.is_file()):
            return  # it may be a pipe, which has got its end
        try:
            append(self._path, self._began_us, lambda start_us: trace_of(self._history, start_us, wall_time_s()))
        except OSError as error:
            self._on_trouble(f"the timeline {self._path} lacks the generations of the job: {error.strerror}")


def append(path: Path, began_us: int, make: Callable[[int], Sequence[dict[str, Any]]]) -> None:
    """Append events to a timeline. One that has begun before the job, in microseconds since 1970, is of another job,
    and replaced. `make` returns the events for a timeline that has begun at this time. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        start = _START.search(file.read(_HEAD_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        # The last event of a process that was killed may be incomplete.
        whole = tail.rfind(_END_OF_ARRAY) if tail.endswith(_END_OF_ARRAY) else tail.rfind(b",\n")
        if start is None or whole < 0 or int(start[1]) < began_us:
            file.seek(0)
            values = {"name": "farandole", "start_time_since_epoch_in_micros": began_us}
            head = {"name": "process_name", "ph": "M", "pid": 0, "args": values}
            lines, before = [head, *make(began_us)], b"[\n"
        else:
            file.seek(size - len(tail) + whole)
            lines, before = list(make(int(start[1]))), b",\n"
        file.truncate()
        file.write(before + b",\n".join(json.dumps(each).encode() for each in lines) + _END_OF_ARRAY)
