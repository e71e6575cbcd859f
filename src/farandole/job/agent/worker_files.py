"""What a worker leaves in files: its error file, where torch's `@record` writes the exception that ends it, and its
return for the caller of farandole.run().

The format of error files is that of torch/distributed/elastic/multiprocessing/errors/error_handler.py of torch 2.13;
user code may write them as well, or leave them damaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from farandole.base.machine import wall_time_s
from farandole.base.wire.function_call import PART_BYTES, ReturnPart
from farandole.base.wire.messages import RecordedError

LONGEST_ERROR_FILE_BYTES = 1 << 20
"""A larger error file is not read."""

LONGEST_TRACEBACK = 1 << 16
"""Characters of a traceback that are kept: its end names the error."""


class ErrorFiles:
    """The error files of the workers of one agent, in `folder`.

    lasts   the files stay after the job, in the folders in which torchrun puts them: attempt_0/0/error.json for the
            first worker of rank 0. Else the folder is removed with the job, and each worker has a file of its own.
    """

    def __init__(self, folder: Path, lasts: bool) -> None:
        self._folder, self._lasts = folder, lasts
        self._paths: dict[str, Path] = {}

    def prepare(self, worker: str, attempt: int, rank: int | None) -> Path | None:
        """Return the path for the error file of a worker that is about to start. There is no such file yet. None: the
        folder cannot be made; the worker runs without the file."""
        folder = self._folder / worker
        if self._lasts:
            place = worker if rank is None else str(rank)
            folder = self._folder / f"attempt_{attempt}" / place
            if folder / "error.json" in self._paths.values():  # of a worker that still runs: ranks may change
                folder = folder.with_name(worker)
        path = folder / "error.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        except OSError:
            return None
        self._paths[worker] = path
        return path

    def take(self, worker: str) -> RecordedError | None:
        """Return the error that a worker has left, now that it has ended; None if there is none."""
        path = self._paths.pop(worker, None)
        error = None if path is None else read_error_file(path)
        return error if error is None or self._lasts else msgspec.structs.replace(error, file="")


def read_error_file(path: Path) -> RecordedError | None:
    """Return the error in the file; None when there is no such file, or it has no error that can be read."""
    try:
        if path.stat().st_size > LONGEST_ERROR_FILE_BYTES:
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    error = content.get("message") if isinstance(content, dict) else None
    if isinstance(error, str):  # the form of other error handlers
        return RecordedError(error, "", _whole_number(content.get("timestamp")), str(path))
    if not isinstance(error, dict):
        return None
    more = error.get("extraInfo")
    more = more if isinstance(more, dict) else {}
    traceback = more.get("py_callstack")
    return RecordedError(
        message=str(error.get("message", "")),
        traceback=traceback[-LONGEST_TRACEBACK:] if isinstance(traceback, str) else "",
        time_s=_whole_number(more.get("timestamp")),
        file=str(path),
    )


def _whole_number(value: object) -> int:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return max(0, int(value))  # type: ignore[call-overload, no-any-return]
    return 0


# Returns, on their way to the coordinator -----------------------------------------------------------------------------


class Returns:
    """Sends each return in parts, the next one when the coordinator has received the one before."""

    def __init__(self) -> None:
        self._received: dict[str, asyncio.Event] = {}  # by worker: set when its last part was received
        self._waits = True

    async def send(self, worker: str, path: Path, send: Callable[[ReturnPart], None]) -> None:
        """Send what is in the file of a worker, and remove it; nothing if there is none."""
        if not path.exists():  # it was killed, or has exited early
            return
        received = self._received[worker] = asyncio.Event()
        with path.open("rb") as file:
            age_s = max(0.0, wall_time_s() - os.fstat(file.fileno()).st_mtime)
            data = file.read(PART_BYTES)
            while data:
                following = file.read(PART_BYTES)
                send(ReturnPart(worker, data, not following, age_s))
                if following and self._waits:
                    await received.wait()
                    received.clear()
                data = following
        del self._received[worker]
        path.unlink(missing_ok=True)

    def on_received(self, worker: str) -> None:
        """Send the next part of this worker's return."""
        if worker in self._received:
            self._received[worker].set()

    def stop_waiting(self) -> None:
        """Send the remaining parts without an answer: there will be none."""
        self._waits = False
        for received in self._received.values():
            received.set()
