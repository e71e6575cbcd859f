"""A bit that has changed anywhere in a checkpoint, or an end that is missing, leads to the checkpoint before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.base.checkpoints.folder import MANIFEST, CheckpointFolder
from farandole.base.checkpoints.manifest import FORMAT, Manifest
from farandole.training.checkpoint.file_format import STATE, TENSORS, write_files
from farandole.training.checkpoint.restore import read_newest
from farandole.training.checkpoint.snapshot import to_json

pytestmark = pytest.mark.core

FILES = (MANIFEST, STATE, TENSORS)


def write(place: Path, step: int) -> Path:
    """Write a checkpoint."""
    value = {
        "step": step,
        "weight": torch.arange(6.0).view(2, 3) + step,
        "numbers": torch.tensor([step], dtype=torch.int64),
        "complex": torch.complex(torch.ones(2), torch.zeros(2)),
        "empty": torch.empty(0, 4),
    }
    folder = CheckpointFolder(place)
    name = folder.begin(step)
    files = write_files(folder.store, name, *to_json(value))
    manifest = Manifest(FORMAT, "step", 1, step, 2, 3, 4, 5, 6, 1700000000.25, files, digest="0123456789abcdef")
    folder.publish(name, manifest)
    return place / name


def damages(data: bytes) -> Iterator[bytes]:
    """The data with a changed bit in each byte, and without its last bytes."""
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        yield bytes(changed)
    for size in (0, 1, 7, 8, len(data) // 2, len(data) - 1):
        yield data[:size]


def found(place: Path, warn: Callable[[str], None]) -> tuple[int, Any]:
    checkpoint, value = read_newest(CheckpointFolder(place), warn)
    return checkpoint.manifest.step, value


@pytest.mark.parametrize("file", FILES)
def test_damage_at_any_place_leads_to_the_checkpoint_before(tmp_path: Path, file: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2) / file
    data = path.read_bytes()
    assert found(tmp_path, lambda _: None)[0] == 2
    for damaged in damages(data):
        path.write_bytes(damaged)
        warnings: list[str] = []
        step, value = found(tmp_path, warnings.append)
        # Without the name of its checksum a manifest is one of an earlier version: the rest of it is undamaged.
        assert step == 1 or (file == MANIFEST and damaged.count(b'"crc32"') < data.count(b'"crc32"')), damaged
        assert value["step"] == step
        assert torch.equal(value["weight"], torch.arange(6.0).view(2, 3) + step)
        assert torch.equal(value["complex"], torch.complex(torch.ones(2), torch.zeros(2)))
        seen = [str(each) for each in CheckpointFolder(tmp_path).complete()[1]]  # of these the launcher warns
        assert step == 2 or warnings or seen


@pytest.mark.parametrize("size", [0, 1, 64])
def test_files_of_no_known_form_lead_to_the_checkpoint_before(tmp_path: Path, size: int) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    for file in FILES:
        kept = newest.with_name("kept")
        shutil.copytree(newest, kept)
        (newest / file).write_bytes(bytes(range(size)))
        assert found(tmp_path, lambda _: None)[0] == 1
        shutil.rmtree(newest)
        kept.rename(newest)
