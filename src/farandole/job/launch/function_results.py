"""A function on its way to the workers, and what they return: their results, or the traceback of the first failure."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from farandole.base.machine import now_s
from farandole.base.wire.call_messages import ReturnPart
from farandole.base.wire.function_call import LARGEST_BYTES, Call, Return
from farandole.errors import FatalError
from farandole.job.coordinator.transition import Outcome


class FunctionFailed(FatalError):
    """The job of farandole.run() failed. `traceback` is that of the first worker that raised; empty when none did."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)
        self.reason, self.traceback = reason, traceback

    def __str__(self) -> str:
        return f"{self.reason}\n\nThe first worker that raised:\n{self.traceback}" if self.traceback else self.reason


def encoded(call: Callable[[], Any]) -> bytes:
    """Return the call as it travels. Raises TypeError when it cannot be sent."""
    try:
        pickled: bytes = cloudpickle.dumps(call)
    except Exception as error:
        raise TypeError(
            f"the function or its arguments cannot be sent to the workers: {error}; create objects that cannot be "
            "pickled (locks, open files, connections) inside the function"
        ) from error
    if len(pickled) > LARGEST_BYTES:
        raise TypeError(
            f"the function and its arguments take {len(pickled)} bytes when pickled, at most {LARGEST_BYTES} can be "
            "sent to the workers; load large data inside the function"
        )
    search_path = tuple(entry or str(Path.cwd()) for entry in sys.path)
    return msgspec.msgpack.encode(Call(search_path, pickled))


class Returns:
    """The returns of the workers, each in a file of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}  # by worker, also of those that are not complete
        self._results: dict[int, Path] = {}  # by rank; the last one counts
        self._errors: list[tuple[float, Path]] = []  # with the time of the exception, on this machine's clock
        self.workers = 0
        """The number of workers in the last generation, as far as one of them has left a result."""

    def add(self, part: ReturnPart) -> None:
        """Take the next part of a return."""
        path = self._files.setdefault(part.worker, self._folder / str(len(self._files)))
        with path.open("ab") as file:
            file.write(part.data)
        if part.is_last:
            returned = self._read(path)
            if returned.is_error:
                self._errors.append((now_s() - part.age_s, path))
            else:
                self._results[returned.rank] = path
                self.workers = max(self.workers, returned.size)

    def result(self, rank: int) -> bytes | None:
        """Return the pickled result of a rank; None: it has left none."""
        return self._read(self._results[rank]).data if rank in self._results else None

    def first_traceback(self) -> str:
        """Return the traceback of the worker that raised first: its exception most likely caused those of the
        others."""
        return self._read(min(self._errors)[1]).data.decode() if self._errors else ""

    def _read(self, path: Path) -> Return:
        return msgspec.msgpack.decode(path.read_bytes(), type=Return)


def result_of(returns: Returns, rank: int, outcome: Outcome) -> Any:
    """Return the result of a rank. Raises FunctionFailed when there is none, or it cannot be read."""
    pickled = returns.result(rank)
    if pickled is None:
        raise FunctionFailed(
            f"{outcome.reason} But rank {rank} left no result: it ended before its function returned, as by "
            "sys.exit(0)."
        )
    try:
        # Written by our own workers, and received from agents that have proved the token.
        return pickle.loads(pickled)
    except Exception as error:
        raise FunctionFailed(f"the result of rank {rank} cannot be unpickled: {error}") from error
