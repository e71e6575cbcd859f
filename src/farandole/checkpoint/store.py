"""The storage of checkpoints: a folder, or an object store that fsspec supports. All other files here use a Store.

A store needs few abilities, since some have no more: no rename, no lock, no flush to disk. A checkpoint is safe without
these because its manifest is written last.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from farandole.errors import ConfigError


class Store(Protocol):
    """Files by name, such as `job.json` or `step-…/state.json`. All methods may raise OSError.

    place  as people write it
    """

    place: str

    def make(self) -> None:
        """Create the place and its parents."""
        ...

    def folders(self) -> list[str]:
        """Return the names of the folders in it."""
        ...

    def make_folder(self, name: str) -> None: ...

    def size(self, name: str) -> int | None:
        """Return the size in bytes; None where there is no such file."""
        ...

    def read(self, name: str) -> bytes:
        """Return the contents of a file. Raises FileNotFoundError where there is no such file."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Create a file for writing. After an exit without an exception, all of it survives a power failure."""
        ...

    def put(self, name: str, data: bytes, forced: bool) -> None:
        """Replace a small file atomically. With `forced` it comes after all files that were created in its folder, even
        at a power failure."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, which may be gone already."""
        ...

    def remove_folder(self, name: str) -> None:
        """Remove a folder with its contents, as far as possible; raises nothing."""
        ...


def open_store(place: str) -> Store:
    """Return the store at a place. Raises ConfigError, with advice, for a place that no installed package can reach,
    and for one that only this process could see."""
    scheme, is_address, rest = place.partition("://")
    if not is_address or scheme in ("file", "local"):
        from farandole.checkpoint.local_store import LocalStore

        path = Path(rest if is_address else place)
        if is_address and not path.is_absolute():
            raise ConfigError(f"--checkpoint {place}: a whole path is needed, as in file:///data/job")
        return LocalStore(path)
    if scheme == "memory":
        raise ConfigError(
            f"--checkpoint {place}: such files are in the memory of one process, which neither the other workers nor "
            f"the next job can see; give a folder, or an address such as s3://bucket/job"
        )
    from farandole.checkpoint.object_store import ObjectStore  # fsspec is slow to import

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
