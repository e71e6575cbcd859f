"""The error file of a worker: torch's `@record` writes the exception there that ends it.

The format is that of torch/distributed/elastic/multiprocessing/errors/error_handler.py of torch 2.13; user code may
write the file as well, or leave it damaged.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec

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
