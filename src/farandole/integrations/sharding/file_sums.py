"""Checksums of the files of a sharded checkpoint, which torch's distributed checkpoints lack. pieces.py uses them."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import msgspec

from farandole.training.collectives.transport import Transport

logger = logging.getLogger("farandole")

_SUMS = "farandole-sums.json"
_METADATA = ".metadata"
_SLICE_BYTES = 1 << 22


class FileSum(msgspec.Struct, frozen=True):
    """Size and CRC-32 of a file."""

    size_bytes: int
    crc32: int


def write_sums(folder: Path, rank: int, transport: Transport) -> None:
    """Write the checksums of a checkpoint that DCP has written. A collective. Raises OSError.

    Each rank reads its own files, which its host may still have in memory.
    """
    mine = {path.name: _sum_of(path) for path in folder.glob(f"__{rank}_*")}
    if rank == 0:
        mine[_METADATA] = _sum_of(folder / _METADATA)
    by_rank = transport.all_gather(msgspec.json.encode(mine))
    if rank == 0:
        sums: dict[str, FileSum] = {}
        for each in by_rank:
            sums |= msgspec.json.decode(each, type=dict[str, FileSum])
        unfinished = folder / f"{_SUMS}.tmp"
        unfinished.write_bytes(msgspec.json.encode(sums))
        unfinished.replace(folder / _SUMS)


def damage(folder: Path, transport: Transport) -> list[str]:
    """Return in what the files of a checkpoint differ from the written ones, alike on all ranks; empty for undamaged
    ones. A collective: each rank reads a part of the files."""
    found = transport.all_gather(own_damage(folder, transport.rank, transport.size).encode())
    return [each.decode() for each in found if each]


def own_damage(folder: Path, rank: int, size: int) -> str:
    """Return in what this rank's part of the files differs from the written ones; empty for undamaged ones."""
    try:
        sums = msgspec.json.decode((folder / _SUMS).read_bytes(), type=dict[str, FileSum])
        for name, expected in sorted(sums.items())[rank::size]:
            if name != Path(name).name or _sum_of(folder / name) != expected:
                return f"{folder / name} is damaged: its checksum differs from the one in {_SUMS}"
        if _METADATA not in sums:
            return f"{folder / _SUMS} is damaged: it lacks {_METADATA}"
    except FileNotFoundError as error:
        if error.filename != str(folder / _SUMS):
            return str(error)
        if rank == 0:
            logger.warning("%s has no checksums: whether it is damaged is not checked", folder)
    except (OSError, ValueError) as error:
        return f"{folder / _SUMS} and its files cannot be read: {error}"
    return ""


def _sum_of(path: Path) -> FileSum:
    size = crc = 0
    with path.open("rb") as file:
        while part := file.read(_SLICE_BYTES):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return FileSum(size, crc)
