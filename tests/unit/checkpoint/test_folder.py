"""A folder of checkpoints: what counts as one, which are kept, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.base.checkpoints.folder import MANIFEST, CheckpointFolder, write_file
from farandole.base.checkpoints.manifest import FORMAT, Manifest


def publish(folder: CheckpointFolder, step: int, run_id: int = 1) -> Path:
    name = folder.begin(step)
    files = {"state.json": write_file(folder.store, f"{name}/state.json", [b"{}"])}
    folder.publish(name, manifest(step, run_id, files=files))
    return Path(folder.store.place) / name


def manifest(step: int, run_id: int = 1, **more: object) -> Manifest:
    at = {"run_id": run_id, "step": step, "epoch": 0, "cursor": step, "boundary_number": step}
    return Manifest(**{"format": FORMAT, "rule": "step", "generation": 1, "workers": 1, "written_s": 0.0, **at, **more})


def newest(folder: CheckpointFolder) -> Path:
    return Path(folder.complete()[0][0].place)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    older = publish(folder, 5)
    begun = folder.begin(9)
    write_file(folder.store, f"{begun}/state.json", [b"{}"])
    (tmp_path / begun / f"{MANIFEST}.new").write_bytes(b"{}")
    assert [each.name for each in folder.complete()[0]] == [older.name]


def test_two_of_one_step_are_two(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert publish(folder, 5) != publish(folder, 5)
    assert len(folder.complete()[0]) == 2


def test_the_newest_has_the_highest_progress_and_a_later_run_id_wins(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    publish(folder, 100)
    publish(folder, 80)
    assert newest(folder).name.startswith("step-000000000100-")
    later = publish(folder, 90, run_id=2)
    assert newest(folder) == later


def test_the_newest_ones_are_kept_and_what_was_never_published_before_them_is_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    abandoned = tmp_path / folder.begin(1)
    paths = [publish(folder, step) for step in (10, 20, 30)]
    being_written = tmp_path / folder.begin(40)
    own = tmp_path / "step-by-step"
    own.mkdir()
    folder.retain(2)
    assert not abandoned.exists()
    assert [path.exists() for path in [*paths, being_written, own]] == [False, True, True, True, True]
    folder.remove_unpublished()
    assert [path.exists() for path in [*paths, being_written, own]] == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is not the manifest"),
        (b"{}", "is not the manifest"),
        (b"\xff\xfe", "is not the manifest"),
        (b'{"format": 99}', "has format 99, and this version of Farandole reads format 1"),
        (b'{"format": 1, "rule": "other"}', "is not the manifest"),
    ],
)
def test_a_damaged_manifest_is_named_and_never_removed(tmp_path: Path, text: bytes, why: str) -> None:
    folder = CheckpointFolder(tmp_path)
    good, bad = publish(folder, 5), publish(folder, 9)
    (bad / MANIFEST).write_bytes(text)
    found, damaged = folder.complete()
    assert [each.name for each in found] == [good.name]
    assert [each.name for each in damaged] == [bad.name]
    assert why in damaged[0].why
    folder.retain(1)
    folder.remove_unpublished()
    assert bad.exists()


def test_a_checkpoint_with_a_file_that_is_missing_or_cut_short_is_damaged(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    missing, short = publish(folder, 5), publish(folder, 9)
    (missing / "state.json").unlink()
    (short / "state.json").write_bytes(b"{")
    found, damaged = folder.complete()
    assert found == []
    assert {each.name for each in damaged} == {missing.name, short.name}
    assert all("expected 2" in each.why for each in damaged)
