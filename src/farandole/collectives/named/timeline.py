"""Record the events of each named operation in a file for Perfetto or chrome://tracing. engine.py calls it.

One rank writes it, rank 0. A caller never waits for the disk: a thread writes, and when it cannot keep up, events are
left out, which the file notes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from farandole.collectives import world
from farandole.collectives.named.stages import Kind
from farandole.machine import now_ns, wall_time_s

logger = logging.getLogger("farandole")

_STOP_TIMEOUT_S = 5.0  # a disk that hangs must not keep a job from ending


class Timeline:
    """A timeline that can be started and stopped at any time, from any thread, also while operations run.

    It outlives generations. All methods but start() and stop() do nothing while it is off, and are cheap then.

    Args:
        pause_s: The time between two writes, in seconds: the delay of an event in the file.
        most_records: The highest number of events that wait in memory (100,000 are about 20 MB).
    """

    def __init__(self, pause_s: float = 0.02, most_records: int = 100_000) -> None:
        self._pause_s, self._most_records = pause_s, most_records
        self._lock = threading.Lock()
        self._recording: _Recording | None = None

    @property
    def is_on(self) -> bool:
        recording = self._recording
        return recording is not None and not recording.has_failed

    def start(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Record into a new file from now on, in place of the one before. Nothing changes if it is that file.

        `mark_cycles` shows each round of negotiation too. Raises OSError when the file cannot be written; the timeline
        is off then.
        """
        with self._lock:
            wanted = os.path.abspath(path)
            if self._recording is not None and self._recording.path == wanted and not self._recording.has_failed:
                self._recording.marks_cycles = mark_cycles
                return
            self._stop()
            try:
                self._recording = _Recording(wanted, mark_cycles, self._pause_s, self._most_records)
            except OSError as error:
                raise OSError(error.errno, f"the timeline cannot be written: {error.strerror}", wanted) from error

    def stop(self) -> None:
        """Stop recording; all events are in the file when this returns. Does nothing while it is off."""
        with self._lock:
            self._stop()

    def negotiate_start(self, name: str, kind: Kind) -> None:
        """Record that the first rank has submitted an operation; more calls until negotiate_end() change nothing."""
        self._record(BEGIN, name, f"NEGOTIATE_{kind.name}")

    def rank_ready(self, name: str, rank: int) -> None:
        """Record that a rank has submitted it."""
        self._record(INSTANT, name, str(rank))

    def negotiate_end(self, name: str) -> None:
        """Record that it is decided."""
        self._record(END, name, "")

    def begin(self, name: str, activity: str) -> None:
        """Record that it, or a part of it, is executed; activities may be nested."""
        self._record(BEGIN, name, activity)

    def end(self, name: str) -> None:
        """Record the end of the last activity that began."""
        self._record(END, name, "")

    def cycle(self) -> None:
        """Record the start of a round of negotiation."""
        recording = self._recording
        if recording is not None and recording.marks_cycles:
            recording.record(CYCLE, "", "CYCLE_START")

    def _record(self, mark: str, name: str, text: str) -> None:
        recording = self._recording
        if recording is not None:
            recording.record(mark, name, text)

    def _stop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()


class _Recording:
    """The recording of one file, from start to stop, and the thread that writes it."""

    def __init__(self, path: str, marks_cycles: bool, pause_s: float, most_records: int) -> None:
        self.path, self.marks_cycles = path, marks_cycles
        self._pause_s, self._most_records = pause_s, most_records
        self.has_failed = False
        self._start_ns = now_ns()
        self._writer = TimelineWriter(path, int(wall_time_s() * 1e6))
        self._records: deque[Record] = deque()  # appending and taking are atomic, so no lock is held for them
        self._dropped = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-timeline", daemon=True)
        self._thread.start()

    def record(self, mark: str, name: str, text: str) -> None:
        if self.has_failed:
            return
        if len(self._records) >= self._most_records:
            self._dropped += 1  # two threads may count one instead of two; only the gap matters
            return
        self._records.append((now_ns() - self._start_ns, mark, name, text))

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("timeline %s: the disk does not respond; the file may lack its end", self.path)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._pause_s):
                self._write()
            self._write()
        except OSError as error:
            self.has_failed = True
            self._records.clear()
            logger.warning("timeline %s: %s; the recording ends, training continues", self.path, error)
        finally:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _write(self) -> None:
        dropped, self._dropped = self._dropped, 0
        count = len(self._records)
        self._writer.add((self._records.popleft() for _ in range(count)), dropped)


# The file: Chrome's trace format, a valid JSON array after each write -------------------------------------------------

Record: TypeAlias = tuple[int, str, str, str]
"""Nanoseconds since the start; one of the marks below; name of the operation; text (activity, or rank)."""

BEGIN, END, INSTANT, CYCLE = "B", "E", "X", "i"

_END_OF_ARRAY = b"\n]\n"
_NEGOTIATE = "NEGOTIATE_"


class TimelineWriter:
    """Writes one file. Each operation's name is shown as a process of its own, as in Horovod.

    Raises OSError when the file cannot be created or written; the data written before stays.
    """

    def __init__(self, path: str, start_us: int) -> None:
        # Unbuffered: a forked child must not write the content of an inherited buffer again.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            # A file that cannot be overwritten (a pipe) gets the end of the array when it is closed.
            self._can_seek = self._file.seekable()
            self._processes: dict[str, int] = {}
            self._open: dict[str, list[str]] = {}
            self._last_us = 0
            head = _process(0, "farandole", {"start_time_since_epoch_in_micros": start_us})
            self._write(b"[\n" + b",\n".join(map(_json, head)))
        except BaseException:
            self._file.close()
            raise

    def add(self, records: Iterable[Record], dropped: int = 0) -> None:
        """Write these records, in this order. `dropped` is the number of records lost after them."""
        events: list[Mapping[str, object]] = []
        for time_ns, mark, name, text in records:
            self._last_us = time_ns // 1000
            events += self._events(mark, name, text)
        if dropped:
            events.append(self._marker(f"{dropped} events left out: the disk is too slow"))
            events += [self._end(name) for name, stack in self._open.items() for _ in stack]
            self._open.clear()
        if events:
            self._write(b"".join(b",\n" + _json(event) for event in events))

    def close(self) -> None:
        """End the array, unless that was done before."""
        try:
            if not self._can_seek:
                self._write_all(_END_OF_ARRAY)
        finally:
            self._file.close()

    def _events(self, mark: str, name: str, text: str) -> list[Mapping[str, object]]:
        if mark == CYCLE:
            return [self._marker(text)]
        stack = self._open.setdefault(name, [])
        if mark == END:
            # Its beginning was before the file's: nothing to end.
            return [self._end(name)] if stack and stack.pop() else []
        if mark == BEGIN:
            if text in stack and text.startswith(_NEGOTIATE):
                return []  # the first rank began it; the others are shown when they are ready
            stack.append(text)
        process = self._processes.get(name)
        new: list[Mapping[str, object]] = []
        if process is None:
            process = self._processes[name] = len(self._processes) + 1
            new = [*_process(process, name)]
        event: dict[str, object] = {"ph": mark, "name": text, "ts": self._last_us, "pid": process, "tid": 0}
        if mark == INSTANT:
            event["dur"] = 0
        return [*new, event]

    def _end(self, name: str) -> Mapping[str, object]:
        return {"ph": END, "ts": self._last_us, "pid": self._processes[name], "tid": 0}

    def _marker(self, text: str) -> Mapping[str, object]:
        return {"ph": CYCLE, "name": text, "ts": self._last_us, "pid": 0, "tid": 0, "s": "g"}

    def _write(self, more: bytes) -> None:
        if not self._can_seek:
            self._write_all(more)
            return
        self._write_all(more + _END_OF_ARRAY)
        self._file.seek(-len(_END_OF_ARRAY), 1)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


def _process(number: int, name: str, more: Mapping[str, object] | None = None) -> list[Mapping[str, object]]:
    return [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name, **(more or {})}},
        {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}},
    ]


def _json(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode()


# The timeline of this process, which outlives generations and shutdown() ----------------------------------------------

process_timeline = Timeline()
"""The timeline of every NamedCollectives of this process."""

atexit.register(process_timeline.stop)  # the last events are in the file too


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the named operations of all ranks into a file, in Chrome's trace format (see ui.perfetto.dev).

    All ranks may call it; rank 0 writes. It replaces the file before, if there is one.

    Args:
        file_path: The file to write.
        mark_cycles: Show each round of negotiation too.

    Raises:
        NotInitialized: Called before init().
        OSError: The file cannot be written.

    Examples:
        >>> fd.start_timeline(f"{folder}/timeline.json")
        >>> result = fd.allreduce(torch.ones(1), name="shown")
        >>> fd.stop_timeline()
    """
    if world.current().placement.rank == 0:
        process_timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the file of start_timeline(); it is complete when this returns.

    See the example of `start_timeline`.

    Raises:
        NotInitialized: Called before init().
    """
    process_timeline.stop()
