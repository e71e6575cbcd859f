"""Where checkpoints lie: a folder, or an object store that fsspec knows. All other files here go through a Store.

What a store must be able to do is little, since not all of them can more: no rename, no lock, no forcing of bytes
onto a disk. A checkpoint is safe without these because its manifest comes last.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from farandole.errors import ConfigError


class Store(Protocol):
    """Files by name, such as `job.json` or `step-…/state.json`. Everything may raise OSError.

    place  as people write it
    """

    place: str

    def make(self) -> None:
        """Have the place itself; the ones above it, too."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders in it."""
        ...

    def make_folder(self, name: str) -> None: ...

    def size(self, name: str) -> int | None:
        """In bytes; None where there is no such file."""
        ...

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError where there is no such file."""
        ...

    def open(self, name: str) -> BinaryIO:
        """For reading."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A new file for writing. Left without an exception, all of it will be there after a power failure."""
        ...

    def put(self, name: str, data: bytes, forced: bool) -> None:
        """A small file in one go, in place of the old one. With `forced` it comes after everything that was created in
        its folder, also when the power fails."""
        ...

    def remove(self, name: str) -> None:
        """A file that may be gone already."""
        ...

    def remove_folder(self, name: str) -> None:
        """With all that is in it, as far as possible; raises nothing."""
        ...


def open_store(place: str) -> Store:
    """Raises ConfigError, saying what to do, for a place that no package here knows how to reach, and for one that
    only this process could see."""
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
    from farandole.checkpoint.object_store import ObjectStore  # fsspec takes a moment to load

    return ObjectStore(place)


def normalized(place: str) -> str:
    """A place that means the same from another working directory. Raises ConfigError for an empty one."""
    if not place.strip():
        raise ConfigError("--checkpoint needs a folder, or an address such as s3://bucket/job")
    return place if "://" in place else str(Path(place).absolute())


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """write(2) may take a part only."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) :]
