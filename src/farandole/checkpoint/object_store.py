"""Checkpoints at an address that fsspec supports: s3://, gs://, abfs://, hdfs:// and others. Nothing is ever renamed.

fsspec comes with torch; the package for an address (s3fs, gcsfs, adlfs) is the user's choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import fsspec  # type: ignore[import-untyped]

from farandole.errors import ConfigError


class ObjectStore:
    """A Store (store.py) at an address, `place`. Raises ConfigError when no installed package can reach it.

    An object exists when its upload has ended, and not before. In a store that shows a partial object, at worst a
    manifest cannot be read, and there is no checkpoint.
    """

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.place)
        except (ImportError, ValueError) as error:  # the package is missing, or the scheme is unknown
            raise ConfigError(
                f"--checkpoint {place}: this address cannot be reached from here ({error}); install the package that "
                f"fsspec needs for it (s3:// s3fs, gs:// gcsfs, abfs:// adlfs), or give a folder"
            ) from error

    def make(self) -> None:
        with _as_os_error():
            self._files.makedirs(self._root, exist_ok=True)

    def folders(self) -> list[str]:
        with _as_os_error():
            self._files.invalidate_cache()  # include what others wrote since
            try:
                entries = self._files.ls(self._root, detail=True)
            except FileNotFoundError:  # a prefix without any objects
                return []
        return [each["name"].rstrip("/").rpartition("/")[2] for each in entries if each["type"] == "directory"]

    def make_folder(self, name: str) -> None:
        """Do nothing: the first file with this prefix in its name creates the folder."""

    def size(self, name: str) -> int | None:
        with _as_os_error():
            try:
                return int(self._files.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str) -> bytes:
        with _as_os_error():
            return cast(bytes, self._files.cat_file(self._path(name)))

    def open(self, name: str) -> BinaryIO:
        with _as_os_error():
            return cast(BinaryIO, self._files.open(self._path(name), "rb"))

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        with _as_os_error():
            file = self._files.open(self._path(name), "wb")
        try:
            yield cast(BinaryIO, file)
        except BaseException:
            _abandon(file)
            raise
        with _as_os_error():
            file.close()

    def put(self, name: str, data: bytes, forced: bool) -> None:
        with _as_os_error():
            self._files.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        with _as_os_error(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def _abandon(file: Any) -> None:
    """End an upload without the object, if the store can; else a part of it remains, and is removed as unpublished."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        if isinstance(file, fsspec.spec.AbstractBufferedFile):
            file.closed = True  # otherwise it would be uploaded when it is freed
        else:
            file.close()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Return a context that turns all errors into OSError. The errors of packages differ; callers expect those of a
    disk."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
