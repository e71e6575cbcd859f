"""What the workers print, in files: `rank.N/stdout` and `rank.N/stderr`, the layout of Horovod's
--output-filename. Used by output.py, in its writer thread."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import BinaryIO

from farandole.errors import ConfigError
from farandole.launch.writer import write_all


def make_writable(directory: Path) -> None:
    """Make the directory, and try whether files can be written there. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"--output-filename {directory}: no files can be written there ({error.strerror})") from error


class RankFiles:
    """Appends to files below `directory`; a replacement goes on in the files of the worker it replaces."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[tuple[str, str], BinaryIO] = {}

    def append(self, folder: str, stream: str, data: bytes) -> None:
        """Write `data` at the end of the file `folder`/`stream`. Raises OSError."""
        file = self._files.get((folder, stream))
        if file is None:
            (self._directory / folder).mkdir(exist_ok=True)
            file = (self._directory / folder / stream).open("ab", buffering=0)
            self._files[folder, stream] = file
        write_all(file, data)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
