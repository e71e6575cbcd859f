"""Where a job begins, from what is in its folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.base.checkpoints.folder import MANIFEST, CheckpointFolder, write_file
from farandole.base.checkpoints.manifest import FORMAT, Manifest
from farandole.base.env import CheckpointEnv, read_checkpoint_env
from farandole.base.events.generation_events import GenerationStarted
from farandole.base.events.job_events import StateLost
from farandole.base.membership import Origin
from farandole.errors import ConfigError
from farandole.job.launch.checkpoint_place import beginning


def publish(folder: Path, step: int, run_id: int, generation: int) -> Path:
    checkpoints = CheckpointFolder(folder)
    name = checkpoints.begin(step)
    files = {"state.json": write_file(checkpoints.store, f"{name}/state.json", [b"{}"])}
    checkpoints.publish(name, Manifest(FORMAT, "step", run_id, step, 1, 2, 3, generation, 4, 0.0, files))
    return folder / name


def test_without_checkpoints_nothing_is_known_and_nothing_is_said() -> None:
    with beginning(None) as begun:
        assert (begun.origin, begun.environment, begun.notes) == (None, {}, ())


def test_an_empty_folder_is_a_beginning(tmp_path: Path) -> None:
    with beginning(CheckpointEnv(str(tmp_path / "new"), "10m", 3)) as begun:
        assert begun.origin == Origin(1, 0)
        assert begun.notes == ()
        told = read_checkpoint_env(begun.environment)
        assert told is not None
        assert (told.folder, told.every, told.keep, told.resume, told.run_id) == (
            str(tmp_path / "new"),
            "10m",
            3,
            "",
            1,
        )


def test_the_newest_is_gone_on_from_and_what_was_never_published_is_removed(tmp_path: Path) -> None:
    publish(tmp_path, 5, 1, 1)
    newest = publish(tmp_path, 9, 2, 6)
    begun_only = tmp_path / CheckpointFolder(tmp_path).begin(20)
    with beginning(CheckpointEnv(str(tmp_path), "10m", 2)) as begun:
        assert begun.origin == Origin(3, 6, has_checkpoint=True)
        assert begun.notes == (f"resuming from {newest}: epoch 1, step 9",)
        told = read_checkpoint_env(begun.environment)
        assert told is not None
        assert told.resume == newest.name
    assert not begun_only.exists()


def test_each_start_has_a_run_id_of_its_own_and_generations_are_never_used_twice(tmp_path: Path) -> None:
    publish(tmp_path, 9, 2, 6)
    settings = CheckpointEnv(str(tmp_path), "10m", 2)
    with beginning(settings) as begun:
        assert begun.origin == Origin(3, 6, has_checkpoint=True)
        for number in (7, 8):
            begun.watch(GenerationStarted(number, ("w0",), False, 0.0))
        begun.watch(StateLost(4, "w0 was killed"))
    with beginning(settings) as begun:
        assert begun.origin == Origin(5, 8, has_checkpoint=True)


def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path) -> None:
    good, bad = publish(tmp_path, 5, 1, 1), publish(tmp_path, 9, 1, 1)
    (bad / MANIFEST).write_bytes(b"{")
    with beginning(CheckpointEnv(str(tmp_path), "10m", 2)) as begun:
        assert str(bad) in begun.notes[0]
        assert begun.notes[1].startswith(f"resuming from {good}")


def test_with_damaged_ones_only_a_job_does_not_silently_start_at_the_beginning(tmp_path: Path) -> None:
    (publish(tmp_path, 5, 1, 1) / MANIFEST).write_bytes(b"{")
    with (
        pytest.raises(ConfigError, match="no checkpoint in it can be read"),
        beginning(CheckpointEnv(str(tmp_path), "10m", 2)),
    ):
        pass
