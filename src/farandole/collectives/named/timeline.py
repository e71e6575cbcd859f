"""Record the events of each named operation in a file for Perfetto or chrome://tracing. engine.py calls it.

One rank writes it, rank 0. A caller never waits for the disk: a thread writes, and when it cannot keep up, events are
left out, which the file notes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque

from farandole.clock import now_ns, wall_time_s
from farandole.collectives.named.operation_requests import Kind
from farandole.collectives.named.timeline_writer import BEGIN, CYCLE, END, INSTANT, Record, TimelineWriter

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
        self._tell(BEGIN, name, f"NEGOTIATE_{kind.name}")

    def rank_ready(self, name: str, rank: int) -> None:
        """Record that a rank has submitted it."""
        self._tell(INSTANT, name, str(rank))

    def negotiate_end(self, name: str) -> None:
        """Record that it is decided."""
        self._tell(END, name, "")

    def begin(self, name: str, activity: str) -> None:
        """Record that it, or a part of it, is executed; activities may be nested."""
        self._tell(BEGIN, name, activity)

    def end(self, name: str) -> None:
        """Record the end of the last activity that began."""
        self._tell(END, name, "")

    def cycle(self) -> None:
        """Record the start of a round of negotiation."""
        recording = self._recording
        if recording is not None and recording.marks_cycles:
            recording.tell(CYCLE, "", "CYCLE_START")

    def _tell(self, mark: str, name: str, text: str) -> None:
        recording = self._recording
        if recording is not None:
            recording.tell(mark, name, text)

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

    def tell(self, mark: str, name: str, text: str) -> None:
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
            logger.warning("timeline %s: the disk hangs; the file may lack its end", self.path)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._pause_s):
                self._write()
            self._write()
        except OSError as error:
            self.has_failed = True
            self._records.clear()
            logger.warning("timeline %s: %s; nothing more is recorded, training goes on", self.path, error)
        finally:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _write(self) -> None:
        dropped, self._dropped = self._dropped, 0
        count = len(self._records)
        self._writer.add((self._records.popleft() for _ in range(count)), dropped)
