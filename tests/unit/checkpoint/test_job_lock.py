"""One job at a time in a folder, with numbers that were never used before."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.checkpoint.job_lock import Counted, lock
from farandole.errors import ConfigError


def test_a_second_job_is_told_so_until_the_first_one_is_gone(tmp_path: Path) -> None:
    first = lock(tmp_path / "new" / "folder")
    with pytest.raises(ConfigError, match="another job is using this folder"):
        lock(tmp_path / "new" / "folder")
    first.close()
    lock(tmp_path / "new" / "folder").close()


def test_what_was_counted_is_known_to_the_next_job_and_never_goes_back(tmp_path: Path) -> None:
    first = lock(tmp_path)
    assert first.counted == Counted(0, 0)
    first.count(1, 7)
    first.count(1, 3)
    first.close()
    second = lock(tmp_path)
    assert second.counted == Counted(1, 7)
    second.close()


def test_a_damaged_count_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(b"\0\0")
    taken = lock(tmp_path)
    assert taken.counted == Counted(0, 0)
    taken.close()


def test_a_place_where_no_folder_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="no checkpoints can be written there"):
        lock(tmp_path / "file")
