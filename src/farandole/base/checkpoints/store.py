"""The storage of checkpoints: a folder, or an object store that fsspec supports. All other files here use a Store.

A store needs few abilities, since some have no more: no rename, no lock, no flush to disk. A checkpoint is safe without
these because its manifest is written last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from farandole.errors import ConfigError


class Store(Protocol):
    """Files by name, such as `job.json` or `step-…/state.json`. All methods may raise OSError.

    place  as people write it
    """

    place: str

    def make(self) -> None:
        """Create the place and its parents."""

    def folders(self) -> list[str]:
        """Return the names of the folders in it."""

    def make_folder(self, name: str) -> None: ...

    def size(self, name: str) -> int | None:
        """Return the size in bytes; None where there is no such file."""

    def read(self, name: str) -> bytes:
        """Return the contents of a file. Raises FileNotFoundError where there is no such file."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Create a file for writing. After an exit without an exception, all of it survives a power failure."""

    def put(self, name: str, data: bytes, forced: bool) -> None:
        """Replace a small file atomically. With `forced` it comes after all files that were created in its folder, even
        at a power failure."""

    def remove(self, name: str) -> None:
        """Remove a file, which may be gone already."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder with its contents, as far as possible; raises nothing."""


def open_store(place: str) -> Store:
    """Return the store at a place. Raises ConfigError, with advice, for a place that no installed package can reach,
    and for one that only this process could see."""
    scheme, is_address, rest = place.partition("://")
    if not is_address or scheme in ("file", "local"):
        path = Path(rest if is_address else place)
        if is_address and not path.is_absolute():
            raise ConfigError(f"--checkpoint {place}: an absolute path is needed, as in file:///data/job")
        return LocalStore(path)
    if scheme == "memory":
        raise ConfigError(
            f"--checkpoint {place}: such files are in the memory of one process, which neither the other workers nor "
            f"the next job can read; give a folder, or an address such as s3://bucket/job"
        )
    return ObjectStore(place)


def normalized(place: str) -> str:
    """Return a place that is valid in any working directory. Raises ConfigError for an empty one."""
    if not place.strip():
        raise ConfigError("--checkpoint needs a folder, or an address such as s3://bucket/job")
    return place if "://" in place else str(Path(place).absolute())


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all bytes: one write(2) may take only a part."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) :]


# A folder of a file system, local or mounted --------------------------------------------------------------------------


class LocalStore:
    """A Store in a folder, `path`. Files are flushed to disk, and replaced by a rename."""

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


# An address that fsspec supports: s3://, gs://, abfs://, hdfs:// and others -------------------------------------------
#
# fsspec comes with torch; the package for an address (s3fs, gcsfs, adlfs) is the user's choice. Nothing is ever
# renamed.


class ObjectStore:
    """A Store at an address, `place`. Raises ConfigError when no installed package can reach it.

    An object exists when its upload has ended, and not before. In a store that shows a partial object, at worst a
    manifest cannot be read, and there is no checkpoint.
    """

    def __init__(self, place: str) -> None:
        import fsspec  # type: ignore[import-untyped]  # with asyncio and ssl, for which other jobs should not wait

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
    from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

    with contextlib.suppress(Exception):
        if isinstance(file, AbstractBufferedFile):
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
