"""Damage in the files of a sharded checkpoint is found, wherever it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from farandole.errors import ConfigError
from farandole.integrations.sharding import pieces
from farandole.integrations.sharding.file_sums import damage, own_damage, write_sums
from farandole.training.collectives.alone import AloneTransport
from farandole.training.worker import context


def saved(folder: Path) -> Path:
    save({"weight": torch.arange(12.0), "step": 3}, checkpoint_id=folder, no_dist=True)
    write_sums(folder, 0, AloneTransport())
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_changed_bit_in_any_file_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "0000000001-000001")
    files = sorted(folder.iterdir())
    assert len(files) == 3
    assert damage(folder, AloneTransport()) == []
    for file in files:
        data = file.read_bytes()
        for place in range(0, len(data), 17):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            assert damage(folder, AloneTransport()), (file, place)
        file.write_bytes(data[:-1])
        assert damage(folder, AloneTransport()), file
        file.write_bytes(data)
    assert damage(folder, AloneTransport()) == []


@pytest.fixture
def _alone() -> Iterator[None]:
    context.init()
    yield
    context.shutdown()


@pytest.mark.usefixtures("_alone")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_newest_undamaged_checkpoint_is_used_with_a_warning_and_without_one_training_does_not_begin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = saved(tmp_path / "0000000001-000001"), saved(tmp_path / "0000000002-000001")
    assert pieces.newest_stored(tmp_path) == newer
    (newer / ".metadata").write_bytes(b"")
    assert pieces.newest_stored(tmp_path) == older
    assert f"the checkpoint {newer} cannot be read" in caplog.text
    (older / "farandole-sums.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match="has no checkpoint that can be read"):
        pieces.newest_stored(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_each_rank_reads_a_part_of_the_files(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    next(folder.glob("*.distcp")).unlink()
    assert [bool(own_damage(folder, rank, 2)) for rank in range(2)].count(True) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_checkpoint_of_an_earlier_version_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path)
    (folder / "farandole-sums.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert damage(folder, AloneTransport()) == []
    assert "has no checksums" in caplog.text
