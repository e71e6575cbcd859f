"""The state of a job in a folder: who may continue it, and what is wrong with one that cannot be continued."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from farandole.base.config import JobConfig
from farandole.base.env import CheckpointEnv
from farandole.errors import ConfigError
from farandole.job.coordinator.journal import FORMAT, SOFTWARE, Journal
from farandole.job.launch import job_state
from farandole.job.launch.checkpoint_place import beginning
from farandole.job.launch.job_state import FolderState

COMMAND, CONFIG = ("python", "train.py"), JobConfig(3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_state, "_RELEASED_S", 0.1)


def opened(
    folder: Path, *, command: tuple[str, ...] = COMMAND, config: JobConfig = CONFIG, token: bytes | None = None
) -> FolderState:
    return FolderState(folder, command, config, token)


def begun(folder: Path, *states: bytes, checkpoint: CheckpointEnv | None = None) -> FolderState:
    """A launcher that has begun, and whose coordinator has written these states."""
    state = opened(folder)
    state.begin(checkpoint)
    journal = Journal(state.journal_files, state.job_id, is_durable=True)
    for each in states:
        journal.write(each)
    return state


def killed(folder: Path, *states: bytes, checkpoint: CheckpointEnv | None = None) -> FolderState:
    """One that has died since: its locks are gone."""
    state = begun(folder, *states, checkpoint=checkpoint)
    state.close()
    return state


def change(folder: Path, **fields: object) -> None:
    job = msgspec.json.decode((folder / "job.json").read_bytes())
    (folder / "job.json").write_bytes(msgspec.json.encode({**job, **fields}))


def test_the_next_launcher_has_the_job_its_token_and_the_newest_state_in_files_of_its_own(folder: Path) -> None:
    former = killed(folder, b"one", b"two")
    state = opened(folder)
    assert state.is_continued
    assert (state.job_id, state.token) == (former.job_id, former.token)
    state.begin(None)
    assert Journal(state.journal_files, state.job_id).read() == b"two"
    assert sorted(each.name for each in folder.iterdir()) == ["job.json", "journal-2-0", "journal-2-1", "lock"]


def test_a_journal_that_was_taken_over_and_is_damaged_is_lost_and_no_job_that_begins(folder: Path) -> None:
    killed(folder, b"one", b"two")
    killed(folder)  # before its coordinator has written anything
    for path in folder.glob("journal-2-*"):
        os.truncate(path, path.stat().st_size // 2)
    state = opened(folder)
    assert (state.is_continued, "has a complete state" in state.lost) == (True, True)


def test_a_journal_stays_lost_when_the_launcher_that_found_it_so_dies_before_it_has_a_state(folder: Path) -> None:
    """Else the job would begin at step 0, while its workers train."""
    killed(folder, b"one", b"two")
    for path in folder.glob("journal-1-*"):
        os.truncate(path, path.stat().st_size // 2)
    assert killed(folder).lost
    state = opened(folder)
    assert (state.is_continued, "has no state" in state.lost) == (True, True)


def test_an_empty_journal_of_a_launcher_that_had_taken_over_is_lost(folder: Path) -> None:
    killed(folder, b"one", b"two")
    killed(folder, b"three")
    for path in folder.glob("journal-2-*"):
        os.truncate(path, 0)
    assert opened(folder).lost


def test_the_names_of_its_files_are_on_the_disk_before_the_former_journal_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure may bring the former journal back, or none, after agents were told of newer states."""
    killed(folder, b"one", b"two")
    flushed, fsync = list[set[str]](), os.fsync

    def noting_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            number = msgspec.json.decode((folder / "job.json").read_bytes())["number"]
            flushed.append({f"number {number}", *(each.name for each in folder.iterdir())})

    monkeypatch.setattr(os, "fsync", noting_fsync)
    begun(folder)
    journals = {f"journal-{number}-{index}" for number in (1, 2) for index in (0, 1)}
    assert flushed == [{"number 2", "job.json", "lock", *journals}]


def test_nobody_else_can_read_it(folder: Path) -> None:
    begun(folder, b"one")
    assert folder.stat().st_mode & 0o077 == 0
    assert all(each.stat().st_mode & 0o077 == 0 for each in folder.iterdir())
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match=r"must be a folder of this user that nobody else can enter .*: chmod 700"):
        opened(folder)


def test_a_second_launcher_is_told_who_has_the_job(folder: Path) -> None:
    begun(folder, b"one")
    expected = rf"another launcher \(process {os.getpid()} on {os.uname().nodename}\) has locked it; end that job"
    with pytest.raises(ConfigError, match=expected):
        opened(folder)


def test_a_coordinator_that_outlives_its_launcher_keeps_the_next_one_from_its_journal(folder: Path) -> None:
    former = begun(folder, b"one")
    of_coordinator = os.dup(former.journal_files[0])
    former.close()
    try:
        with pytest.raises(ConfigError, match=r"the coordinator of the former launcher .* has locked it"):
            opened(folder)
    finally:
        os.close(of_coordinator)
    assert opened(folder).is_continued


def test_a_launcher_sees_that_another_one_has_taken_over_and_leaves_the_job_to_it(folder: Path) -> None:
    former = killed(folder, b"one")  # or its network file system has released its lock
    assert former.successor() == ""
    state = opened(folder)
    state.begin(None)
    assert former.successor() == f"process {os.getpid()} on {os.uname().nodename}"
    former.end(is_over=True)
    assert (folder / "job.json").exists()


def test_a_job_that_is_over_or_has_never_begun_is_forgotten(folder: Path) -> None:
    state = begun(folder, b"one")
    state.end(is_over=False)
    assert (folder / "job.json").exists()
    state.end(is_over=True)
    assert [each.name for each in folder.iterdir()] == ["lock"]
    state.close()
    state = begun(folder)  # the coordinator could not listen
    state.end(is_over=False)
    state.close()
    assert not opened(folder, command=("another",)).is_continued


def test_a_launcher_that_died_before_the_job_began_leaves_its_number_and_token_to_the_next_one(folder: Path) -> None:
    former = killed(folder)
    state = opened(folder)
    assert not state.is_continued
    assert (state.job_id, state.token) == (former.job_id, former.token)


def test_another_command_does_not_continue_the_job(folder: Path) -> None:
    killed(folder, b"one")
    with pytest.raises(ConfigError, match=r"its job runs python train.py, not python other.py; give the same command"):
        opened(folder, command=("python", "other.py"))
    with pytest.raises(ConfigError, match=r"with other options \(num_proc 3, not 4\); give the same options"):
        opened(folder, config=JobConfig(4))
    with pytest.raises(ConfigError, match="its job has another token; give the same --token-file"):
        opened(folder, token=b"another" * 8)
    assert opened(folder, config=replace(CONFIG, tls="/other/place")).is_continued  # on another machine


def test_another_version_continues_the_job_if_it_reads_its_format(folder: Path) -> None:
    killed(folder, b"one")
    change(folder, version="0.0.1 (protocol 1)", config={"num_proc": 3}, later=1)  # it knew fewer options
    state = opened(folder)
    assert state.is_continued
    state.begin(None)
    assert msgspec.json.decode((folder / "job.json").read_bytes())["version"] == SOFTWARE


@pytest.mark.parametrize(("number", "advice"), [(1, ""), (FORMAT + 1, " or a newer one")])
def test_a_version_that_does_not_read_its_format_does_not_continue_the_job(
    folder: Path, number: int, advice: str
) -> None:
    killed(folder, b"one")
    change(folder, version="0.0.1 (protocol 1)", format=number, token=7)  # and with other fields
    expected = (
        rf"was written by Farandole 0.0.1 \(protocol 1\) in format {number}, and this is .*, which reads 2 to {FORMAT}"
    )
    with pytest.raises(
        ConfigError, match=rf"{expected}: continue with Farandole 0.0.1 \(protocol 1\){advice}; to begin"
    ):
        opened(folder)


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_job_goes_on_without_its_journal_and_the_coordinator_is_told_why(folder: Path, is_missing: bool) -> None:
    former = killed(folder, b"one", b"two")
    for index in (0, 1):
        if not is_missing:
            os.truncate(folder / f"journal-1-{index}", 20)
        elif index:
            (folder / f"journal-1-{index}").unlink()
    state = opened(folder)
    assert (state.is_continued, state.job_id, state.token) == (True, former.job_id, former.token)
    assert ("journal-1-1 is missing" if is_missing else "neither of its files, of 20 and 20 bytes,") in state.lost
    state.begin(None)
    assert state.number == 2
    assert Journal(state.journal_files, state.job_id).read() is None
    state.end(is_over=False)
    assert (folder / "job.json").exists()  # the coordinator has not begun: the agents may wait


def test_a_coordinator_that_writes_to_the_rest_of_a_journal_keeps_the_next_launcher_away(folder: Path) -> None:
    former = begun(folder, b"one")
    of_coordinator = os.dup(former.journal_files[0])
    former.close()
    (folder / "journal-1-1").unlink()
    try:
        with pytest.raises(ConfigError, match=r"the coordinator of the former launcher .* has locked it"):
            opened(folder)
    finally:
        os.close(of_coordinator)


def test_a_journal_of_another_job_and_damaged_numbers_of_the_job_are_errors(folder: Path) -> None:
    killed(folder, b"one", b"two")
    change(folder, job_id="another")
    with pytest.raises(ConfigError, match=r"the coordinator's journal is of job .*, not of another; to begin the job"):
        opened(folder)
    (folder / "job.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its job is damaged \(1 bytes\); to begin the job anew, remove"):
        opened(folder)


# With checkpoints -----------------------------------------------------------------------------------------------------


def test_a_job_that_goes_on_keeps_its_run_id_and_the_owner_of_its_checkpoints(folder: Path, tmp_path: Path) -> None:
    settings = CheckpointEnv(str(tmp_path / "checkpoints"))
    with beginning(settings, first := opened(folder)) as beginning_of_job:
        Journal(first.journal_files, first.job_id).write(b"one")
        first.close()
    with beginning(settings, opened(folder)) as later:
        assert later.environment == beginning_of_job.environment
        assert later.notes == (f"continuing job {first.job_id}, whose launcher has died",)


def test_the_place_of_checkpoints_must_be_the_same(folder: Path, tmp_path: Path) -> None:
    killed(folder, b"one")
    settings = CheckpointEnv(str(tmp_path / "checkpoints"))
    with (
        pytest.raises(ConfigError, match="was begun without it, not with --checkpoint"),
        beginning(settings, opened(folder)),
    ):
        pass
