"""The file of a Tracker: a CSV file to which one worker appends, and which other processes read while it grows."""

from __future__ import annotations

import atexit
import csv
import functools
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping

from farandole.base.machine import now_s
from farandole.errors import ConfigError

_COLUMNS = ("run", "step", "name", "value")
_HEADER = ",".join(_COLUMNS) + "\n"
_WRITE_EVERY_S = 0.2
_LONGEST_WAIT_S = 0.3
_LOOK_EVERY_S = 0.2

Row = tuple[str, int, str, float]


class MetricsFile:
    """The end that writes. Records, the values of a step each, are appended at once or, where the last ones were less
    than 0.2 s ago, together with later ones: a system call in each step is what most of a log() would cost. Where no
    later ones come, a thread appends them. It only watches while they come: a process of which two threads want the
    interpreter makes its steps more slowly."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._run = ""
        self._descriptor: int | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()  # protects the fields below
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self._written_s = -_WRITE_EVERY_S
        self._failure: OSError | None = None  # of the thread
        self._is_watched = False

    def __reduce__(self) -> tuple[type[MetricsFile], tuple[str]]:
        return MetricsFile, (self.path,)  # a copy is closed

    def open(self, run: str) -> dict[str, int]:
        """Open the file, and return the newest step of each name that it has of this run.

        A line that a killed process has left incomplete is removed.

        Raises:
            ConfigError: The file is not one of a Tracker.
            OSError: It cannot be written.
        """
        self.close()
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read()
            whole = data.rfind(b"\n") + 1
            newest: dict[str, int] = {}
            for row_run, step, name, _ in parse(data[:whole], self.path):
                if row_run == run:
                    newest[name] = max(step, newest.get(name, step))
            os.ftruncate(descriptor, whole)
            if not whole:
                os.write(descriptor, _HEADER.encode())
        except BaseException:
            os.close(descriptor)
            raise
        self._run, self._descriptor, self._process = run, descriptor, os.getpid()
        atexit.register(self.flush)
        return newest

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step, within 0.3 s. They must not change.

        Raises:
            OSError: They, or earlier ones, cannot be written.
        """
        with self._lock:
            self._raise_failure()
            self._waiting.append((step, values))
            if now_s() - self._written_s >= _WRITE_EVERY_S:
                self._append()
            elif not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="farandole-metrics", daemon=True).start()

    def flush(self) -> None:
        """Append what waits. Raises OSError when that fails, or has failed before. A forked child appends nothing: its
        parent does."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._raise_failure()
            self._append()

    def close(self) -> None:
        """Append what waits, and close the file. Raises OSError as flush() does; the file is closed nevertheless."""
        try:
            self.flush()
        finally:
            atexit.unregister(self.flush)
            with self._lock:
                self._waiting.clear()
                if self._descriptor is not None:
                    os.close(self._descriptor)
                    self._descriptor = None

    def _append(self) -> None:
        if not self._waiting:
            return
        assert self._descriptor is not None
        waiting, self._waiting = self._waiting, []
        lines = [
            f"{self._run},{step},{_field(name)},{value!r}\n"
            for step, values in waiting
            for name, value in values.items()
        ]
        data = memoryview("".join(lines).encode())
        while data:
            data = data[os.write(self._descriptor, data) :]
        self._written_s = now_s()

    def _watch(self) -> None:
        """Append what has waited for too long, until nothing waits."""
        pause, pause_s = threading.Event(), _LONGEST_WAIT_S
        while True:
            pause.wait(pause_s)
            with self._lock:
                pause_s = self._written_s + _LONGEST_WAIT_S - now_s()
                if pause_s > 0 and self._waiting:
                    continue
                self._is_watched = False
                try:
                    self._append()
                except OSError as error:
                    self._failure = error
                return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


@functools.lru_cache(1024)
def _field(text: str) -> str:
    """Return a text as a field of a CSV file: with quotation marks where it needs them."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([text])
    return line.getvalue()


def parse(data: bytes, path: str) -> Iterator[Row]:
    """Yield the rows of whole lines. Raises ConfigError for a file that is not one of a Tracker."""
    if not data:
        return
    lines = csv.reader(io.StringIO(data.decode("utf-8", "replace")))
    try:
        for line in lines:
            if tuple(line) != _COLUMNS:
                run, step, name, value = line
                yield run, int(step), name, float(value)
    except (ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path} is not a file of a Tracker, whose columns are {_HEADER.strip()}: {error}; give the Tracker the "
            f"path of a file of its own"
        ) from None


class MetricsReader:
    """Reads the file of a `Tracker` in another process, also while the job writes it.

    Each value comes once, whatever happened to the worker that writes. A process that feeds a tracker such as
    TensorBoard, MLflow or Weights & Biases with it keeps one run open, however often the workers change
    ([logging](logging.md)).

    Args:
        path: The file. It need not exist yet.
        from_start: Also read what the file has of its newest run already; else only what is appended after now.

    Raises:
        OSError: The file exists and cannot be examined.

    Examples:
        ```python
        metrics = fd.elastic.MetricsReader("metrics.csv", from_start=True)
        losses = {step: values["loss"] for step, values in metrics.read() if "loss" in values}
        ```
    """

    def __init__(self, path: str | os.PathLike[str], from_start: bool = False) -> None:
        self._path = os.fspath(path)
        self._run = ""
        self._newest: dict[str, int] = {}
        self._position = 0
        if not from_start and os.path.exists(self._path):
            self._position = os.path.getsize(self._path)

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Return what was not returned before: steps, and their values by name.

        Raises:
            ConfigError: The file is not one of a Tracker.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._position += whole
        records: list[tuple[int, dict[str, float]]] = []
        for run, step, name, value in parse(data[:whole], self._path):
            if run != self._run:  # another job, or the same one from its beginning
                self._run, self._newest = run, {}
                records.clear()
            if step <= self._newest.get(name, -1):
                continue
            self._newest[name] = step
            if not records or records[-1][0] != step:
                records.append((step, {}))
            records[-1][1][name] = value
        return records

    def follow(self, is_over: Callable[[], object]) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield steps and their values by name, as they are written, until the job is over and all of them have come.

        Args:
            is_over: Returns whether the job is over: something else than None and False, so that it may be the method
                poll() of a subprocess.Popen.

        Returns:
            An iterator, which waits for new values.

        Raises:
            ConfigError: The file is not one of a Tracker.
        """
        pause = threading.Event()
        while True:
            result = is_over()
            yield from self.read()
            if result is not None and result is not False:
                return
            pause.wait(_LOOK_EVERY_S)
