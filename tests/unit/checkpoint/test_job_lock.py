"""One job at a time in a folder, with numbers that were never used before."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.base.checkpoints.folder import JobLock, has_lost_it, lock
from farandole.base.checkpoints.store import LocalStore
from farandole.errors import ConfigError


def numbers(taken: JobLock) -> tuple[int, int]:
    return taken.counted.run_id, taken.counted.generation


def test_a_second_job_is_told_so_until_the_first_one_is_gone(tmp_path: Path) -> None:
    first = lock(LocalStore(tmp_path / "new" / "folder"))
    with pytest.raises(ConfigError, match="another job is using this folder"):
        lock(LocalStore(tmp_path / "new" / "folder"))
    first.close()
    lock(LocalStore(tmp_path / "new" / "folder")).close()


def test_what_was_counted_is_known_to_the_next_job_and_never_goes_back(tmp_path: Path) -> None:
    first = lock(LocalStore(tmp_path))
    assert numbers(first) == (0, 0)
    first.count(1, 7)
    first.count(1, 3)
    first.close()
    second = lock(LocalStore(tmp_path))
    assert numbers(second) == (1, 7)
    second.close()


def test_a_damaged_count_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(b"\0\0")
    taken = lock(LocalStore(tmp_path))
    assert numbers(taken) == (0, 0)
    taken.close()


def test_a_place_where_no_folder_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="no checkpoints can be written there"):
        lock(LocalStore(tmp_path / "file"))


def test_where_locks_do_not_hold_the_later_job_has_the_place_and_the_earlier_one_counts_no_more(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = lock(store)
    first.count(1, 3)
    first.close()
    assert not has_lost_it(store, first.owner)
    second = lock(store)
    assert has_lost_it(store, first.owner)
    assert not has_lost_it(store, second.owner)
    first.count(1, 9)
    second.close()
    third = lock(store)
    assert numbers(third) == (1, 3)
    third.close()
