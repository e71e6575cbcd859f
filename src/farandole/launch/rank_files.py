"""The workers' output in files: `rank.N/stdout` and `rank.N/stderr`, the layout of Horovod's --output-filename. Used by
output.py, in its writer thread.

The output of a worker before it has a rank is in `wN/` until then.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from farandole.errors import ConfigError
from farandole.launch.nonblocking_writer import write_all

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class RankFile:
    """The file for lines."""

    folder: str
    stream: str


@dataclass(frozen=True)
class Move:
    """A move: the contents of folder `old` of a stream go to the end of that in folder `new`."""

    old: str
    new: str
    stream: str


def make_writable(directory: Path) -> None:
    """Make the directory, and try whether files can be written there. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"--output-filename {directory}: no files can be written there ({error.strerror})") from error


class RankFiles:
    """Appends to files below `directory`; a replacement continues in the files of the worker that it replaces."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[RankFile, BinaryIO] = {}

    def append(self, target: RankFile, data: bytes) -> None:
        """Write `data` at the end of this file. Raises OSError."""
        write_all(self._open(target), data)

    def move(self, asked: Move) -> None:
        """Append the old file, if it has any data, to the new one, and remove the old one. Raises OSError."""
        old, new = RankFile(asked.old, asked.stream), RankFile(asked.new, asked.stream)
        file = self._files.pop(old, None)
        if file is None:
            return
        file.close()
        with self._path(old).open("rb") as early:
            while data := early.read(_COPY_BYTES):
                write_all(self._open(new), data)
        self._path(old).unlink()
        with contextlib.suppress(OSError):  # the other stream is still there
            self._path(old).parent.rmdir()

    def _open(self, target: RankFile) -> BinaryIO:
        file = self._files.get(target)
        if file is None:
            path = self._path(target)
            path.parent.mkdir(exist_ok=True)
            file = self._files[target] = path.open("ab", buffering=0)
        return file

    def _path(self, target: RankFile) -> Path:
        return self._directory / target.folder / target.stream

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
