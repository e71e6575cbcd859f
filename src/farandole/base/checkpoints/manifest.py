"""The manifest of a checkpoint, in the file that is written last: without it a folder is no checkpoint. Pure."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import msgspec

from farandole.base.membership import Progress
from farandole.errors import ConfigError

FORMAT = 1
_SUM = "crc32"  # in the file; one that an earlier version wrote has none


class FileSum(msgspec.Struct, frozen=True):
    """Size and CRC-32 of a file."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, data: bytes) -> FileSum:
        return cls(len(data), zlib.crc32(data))


class Manifest(msgspec.Struct, frozen=True):
    """The manifest of a checkpoint.

    rule        the rule of the state: step or commit
    run_id, step, epoch, cursor, boundary_number   the progress of the state
    generation  number of the generation that wrote it
    workers     number of workers at that time
    written_s   seconds since 1970, for people
    files       all files beside this one
    digest      of all tensors, in the order in which they were written (state/state_digest.py)
    """

    format: int
    rule: Literal["step", "commit"]
    run_id: int
    step: int
    epoch: int
    cursor: int
    boundary_number: int = msgspec.field(name="boundary")  # its name in the files
    generation: int
    workers: int
    written_s: float
    files: dict[str, FileSum]
    digest: str = ""

    @property
    def progress(self) -> Progress:
        """Progress of the state. A job resumes from the checkpoint with the highest one in a folder."""
        return Progress(self.run_id, self.step, self.epoch, self.cursor, self.boundary_number)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as a file. Its entry crc32 is that of all other entries."""
    content = msgspec.to_builtins(manifest)
    return msgspec.json.format(msgspec.json.encode({**content, _SUM: _sum_of(content)}))


def decode(data: bytes, where: str) -> Manifest:
    """Return the manifest in `data`. Raises ConfigError, with `where` in it, for anything but an undamaged manifest of
    this format."""
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise ConfigError(f"{where} has format {version}, and this version of Farandole reads format {FORMAT}")
        content = msgspec.json.decode(data, type=dict[str, Any])
        if content.pop(_SUM, (expected := _sum_of(content))) != expected:
            raise ConfigError(f"{where} is damaged: its checksum differs from its content")
        return msgspec.json.decode(data, type=Manifest)
    except ValueError as error:  # msgspec's own errors, and UnicodeDecodeError
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is not the manifest of a checkpoint: {error}") from None


def _sum_of(content: dict[str, Any]) -> int:
    return zlib.crc32(msgspec.json.encode({name: value for name, value in content.items() if name != _SUM}))


class _Version(msgspec.Struct, frozen=True):
    format: int
