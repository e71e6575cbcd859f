"""Record the events of each named operation in a file for Perfetto or chrome://tracing. engine.py calls it.

One rank writes it, rank 0. A caller never waits for the disk: a thread writes, and when it cannot keep up, events are
left out, which the file notes. When rank 0 is lost, the next one continues the file. At the end of the job the launcher
adds the generations of all ranks (launch/job_timeline.py).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from farandole.base.machine import now_ns, wall_time_s
from farandole.integrations.horovod.named.stages import Kind
from farandole.training.collectives import world

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
        self._was_started = False

    @property
    def is_on(self) -> bool:
        recording = self._recording
        return recording is not None and not recording.has_failed

    def start(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Record into a new file from now on, in place of the one before. Nothing changes if it is that file.
        `mark_cycles` shows each round of negotiation too. Raises OSError when the file cannot be written; the timeline
        is off then."""
        with self._lock:
            self._was_started = True
            wanted = os.path.abspath(path)
            if self._recording is not None and self._recording.path == wanted and not self._recording.has_failed:
                self._recording.marks_cycles = mark_cycles
                return
            self._stop()
            try:
                self._recording = _Recording(wanted, mark_cycles, self._pause_s, self._most_records)
            except OSError as error:
                raise OSError(error.errno, f"the timeline cannot be written: {error.strerror}", wanted) from error

    def continue_file(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Continue the file of another rank 0, which has ended, unless this process had a timeline before. A file that
        cannot be continued is one warning."""
        with self._lock:
            if not self._was_started:
                self._was_started = True
                self._recording = _Recording(
                    os.path.abspath(path), mark_cycles, self._pause_s, self._most_records, continues=True
                )

    def forget(self) -> None:
        """Leave the file to the process that has forked this one, and has the thread that writes it."""
        self._lock, self._recording = threading.Lock(), None

    def stop(self) -> None:
        """Stop recording; all events are in the file when this returns. Does nothing while it is off."""
        with self._lock:
            self._stop()

    def negotiate_start(self, name: str, kind: Kind) -> None:
        """Record that the first rank has submitted an operation; more calls until end() change nothing."""
        self._record(BEGIN, name, f"NEGOTIATE_{kind.name}")

    def rank_ready(self, name: str, rank: int) -> None:
        """Record that a rank has submitted it."""
        self._record(INSTANT, name, str(rank))

    def begin(self, name: str, activity: str) -> None:
        """Record that it, or a part of it, is executed; activities may be nested."""
        self._record(BEGIN, name, activity)

    def end(self, name: str) -> None:
        """Record the end of the last activity that began, or that it is decided."""
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
    """The recording of one file, from start to stop, and the thread that writes it. A new file is opened here, one that
    is continued in the thread: its former writer may still be ending."""

    def __init__(
        self, path: str, marks_cycles: bool, pause_s: float, most_records: int, continues: bool = False
    ) -> None:
        self.path, self.marks_cycles = path, marks_cycles
        self._pause_s, self._most_records = pause_s, most_records
        self.has_failed = False
        self._start_ns, self._start_us = now_ns(), int(wall_time_s() * 1e6)
        self._writer = None if continues else TimelineWriter(path, self._start_us)
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
            if self._writer is None:
                self._writer = TimelineWriter(self.path, self._start_us, continues=True)
            while not self._stopping.wait(self._pause_s):
                self._write(self._writer)
            self._write(self._writer)
        except OSError as error:
            self.has_failed = True
            self._records.clear()
            logger.warning("timeline %s: %s; the recording ends, training continues", self.path, error)
        finally:
            if self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.close()

    def _write(self, writer: TimelineWriter) -> None:
        dropped, self._dropped = self._dropped, 0
        count = len(self._records)
        writer.add((self._records.popleft() for _ in range(count)), dropped)


# The file: Chrome's trace format, a valid JSON array after each write -------------------------------------------------

Record: TypeAlias = tuple[int, str, str, str]
"""Nanoseconds since the start; one of the marks below; name of the operation; text (activity, or rank)."""

BEGIN, END, INSTANT, CYCLE = "B", "E", "X", "i"

_END_OF_ARRAY = b"\n]\n"
_NEGOTIATE = "NEGOTIATE_"

# The parts of a file that are needed to continue it, as json.dumps() writes them below.
_START = re.compile(rb'"start_time_since_epoch_in_micros": (\d+)')
_NAMED = re.compile(rb'"name": "process_name", "ph": "M", "pid": (\d+), "args": \{"name": ("(?:[^"\\]|\\.)*")')
_MARKED = re.compile(rb'"ph": "([BE])",[^\n]*?"pid": (\d+)')


class TimelineWriter:
    """Writes one file. Each operation's name is shown as a process of its own, as in Horovod.

    With `continues` the events of another process stay in the file, and its open activities end where this one begins.
    The file of a process that still lives is waited for.

    Raises OSError when the file cannot be created or written; the data written before stays.
    """

    def __init__(self, path: str, start_us: int, continues: bool = False) -> None:
        self._processes: dict[str, int] = {}
        self._open: dict[str, list[str]] = {}
        self._offset_us = self._last_us = 0
        # Unbuffered: a forked child must not write the content of an inherited buffer again.
        mode = "r+b" if continues and os.path.isfile(path) else "wb"
        self._file = open(path, mode, buffering=0)  # noqa: SIM115 - closed by close()
        try:
            # A file that cannot be overwritten (a pipe) gets the end of the array when it is closed.
            self._can_seek = self._file.seekable()
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_EX if mode == "r+b" else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (mode == "r+b" and self._continue(start_us)):
                head = _process(0, "farandole", {"start_time_since_epoch_in_micros": start_us})
                self._write(b"[\n" + b",\n".join(map(_json, head)))
        except BaseException:
            self._file.close()
            raise

    def _continue(self, start_us: int) -> bool:
        """Prepare to write behind the last whole event. Return False for a file that is not a timeline; it is empty
        then."""
        data = self._file.read()
        start, end = _START.search(data), data.rfind(_END_OF_ARRAY)
        if end < 0:
            end = data.rfind(b",\n")  # the last event may be incomplete
        if start is None or end < 0:
            end = 0
        self._file.seek(end)
        self._file.truncate()
        if not end or start is None:
            return False
        self._offset_us = self._last_us = max(0, start_us - int(start[1]))
        named = {json.loads(name): int(number) for number, name in _NAMED.findall(data, 0, end)}
        self._processes = {name: number for name, number in named.items() if number}
        is_open: Counter[int] = Counter()
        for mark, number in _MARKED.findall(data, 0, end):
            is_open[int(number)] += 1 if mark == b"B" else -1
        ends = [self._end(name) for name, number in self._processes.items() for _ in range(is_open[number])]
        self._write(b"".join(b",\n" + _json(event) for event in [*ends, self._marker("another rank 0 continues")]))
        return True

    def add(self, records: Iterable[Record], dropped: int = 0) -> None:
        """Write these records, in this order. `dropped` is the number of records lost after them."""
        events: list[Mapping[str, object]] = []
        for time_ns, mark, name, text in records:
            self._last_us = self._offset_us + time_ns // 1000
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
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=process_timeline.forget)


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
