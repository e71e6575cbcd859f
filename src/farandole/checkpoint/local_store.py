"""Checkpoints in a folder of a file system, local or mounted: files are flushed to disk, and replaced by a rename."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from farandole.checkpoint.store import write_all


class LocalStore:
    """A Store (store.py) in a folder, `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def folders(self) -> list[str]:
        return [path.name for path in self.path.iterdir() if path.is_dir()]

    def make_folder(self, name: str) -> None:
        (self.path / name).mkdir()

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb", buffering=0)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        with (self.path / name).open("xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())

    def put(self, name: str, data: bytes, forced: bool) -> None:
        path, unfinished = self.path / name, self.path / f"{name}.new"
        if forced:
            _force_folder(path.parent)
        with unfinished.open("wb", buffering=0) as file:
            write_all(file, data)
            if forced:
                os.fsync(file.fileno())
        unfinished.rename(path)
        if forced:
            _force_folder(path.parent)
            _force_folder(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(self.path / name, ignore_errors=True)


def _force_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
