"""What a checkpoint says of itself, in the file that is written last: without one a folder is no checkpoint. Pure."""

from __future__ import annotations

import zlib
from typing import Literal

import msgspec

from farandole.errors import ConfigError
from farandole.membership import Progress

FORMAT = 1


class FileSum(msgspec.Struct, frozen=True):
    """Size and CRC-32 of a file."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, data: bytes) -> FileSum:
        return cls(len(data), zlib.crc32(data))


class Manifest(msgspec.Struct, frozen=True):
    """One checkpoint.

    rule        whose state it is: the step rule's or the commit rule's
    run_id, step, epoch, cursor, boundary   how far the state is: its progress
    generation  number of the generation that wrote it
    workers     how many there were
    written_s   seconds since 1970, for people
    files       all files beside this one
    digest      of all tensors, in the order in which they were written (state/digest.py)
    """

    format: int
    rule: Literal["step", "commit"]
    run_id: int
    step: int
    epoch: int
    cursor: int
    boundary: int
    generation: int
    workers: int
    written_s: float
    files: dict[str, FileSum]
    digest: str = ""

    @property
    def progress(self) -> Progress:
        """The highest one of a folder is what a job goes on from."""
        return Progress(self.run_id, self.step, self.epoch, self.cursor, self.boundary)


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest))


def decode(data: bytes, where: str) -> Manifest:
    """Raises ConfigError, with `where` in it, for anything but a manifest of this format."""
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise ConfigError(f"{where} is of format {version}, and this Farandole reads format {FORMAT}")
        return msgspec.json.decode(data, type=Manifest)
    except ValueError as error:  # msgspec's own errors, and UnicodeDecodeError
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is no manifest of a checkpoint: {error}") from None


class _Version(msgspec.Struct, frozen=True):
    format: int
