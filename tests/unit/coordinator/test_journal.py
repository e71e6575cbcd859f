"""The coordinator's journal: its newest complete state, or an error that says what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.base.membership import Address
from farandole.base.wire.message_log import MessageLog
from farandole.job.coordinator import journal
from farandole.job.coordinator.job import Job
from farandole.job.coordinator.journal import (
    AgentSession,
    CoordinatorState,
    Journal,
    JournalError,
    JournalFiles,
    StateEncoder,
    decoded,
    files_in_memory,
)
from farandole.job.coordinator.launcher_link import KeptFrames
from tests.support.told_job import ToldJob

JOB = "a-job"


@pytest.fixture
def files() -> Iterator[JournalFiles]:
    opened = files_in_memory()
    yield opened
    for descriptor in opened:
        os.close(descriptor)


FIXTURES = Path(__file__).parent


def write(files: JournalFiles, *states: bytes, job: str = JOB) -> None:
    opened = Journal(files, job)
    for state in states:
        opened.write(state)


def read(files: JournalFiles) -> bytes | None:
    return Journal(files, JOB).read()


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def newest(files: JournalFiles, state: bytes) -> int:
    (descriptor,) = (each for each in files if content(each).endswith(state))
    return descriptor


def test_a_job_that_begins_has_no_state(files: JournalFiles) -> None:
    assert read(files) is None


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_newest_state_counts_and_the_next_coordinator_writes_after_it(files: JournalFiles, count: int) -> None:
    write(files, *(f"state {number}".encode() for number in range(count)))
    assert read(files) == f"state {count - 1}".encode()
    write(files, b"of the next one")
    assert read(files) == b"of the next one"


def test_a_state_that_is_shorter_than_the_one_that_it_replaces_is_read_as_it_is(files: JournalFiles) -> None:
    write(files, b"long" * 1000, b"long" * 1000, b"short")
    assert read(files) == b"short"


@pytest.mark.parametrize("older", [b"one", b"one, which is longer"])
def test_wherever_a_coordinator_dies_while_it_writes_the_state_before_counts(files: JournalFiles, older: bytes) -> None:
    write(files, older)
    before = content(newest(files, older))
    write(files, b"two", b"three")
    descriptor = newest(files, b"three")
    complete = content(descriptor)
    for length in range(len(complete)):
        for rest in (b"", before[length:]):  # of the older state, or lost with the power
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, complete[:length] + rest, 0)
            assert read(files) == b"two"
    os.pwrite(descriptor, complete, 0)
    os.ftruncate(descriptor, len(complete))
    assert read(files) == b"three"


def test_a_coordinator_that_dies_while_it_writes_leaves_no_empty_file_beside_one_that_is_damaged(
    files: JournalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would begin anew."""
    write(files, b"one", b"two")
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match=r"^0 of \d+ bytes"):
        write(files, b"three")
    monkeypatch.undo()
    descriptor = newest(files, b"two")
    os.pwrite(descriptor, b"x" * os.fstat(descriptor).st_size, 0)
    assert read(files) == b"one"  # its file was not touched yet
    (other,) = {*files} - {descriptor}
    os.pwrite(other, b"x", 0)
    with pytest.raises(JournalError, match="damaged"):
        read(files)


def test_a_coordinator_that_dies_while_it_writes_the_first_state_has_told_nobody_anything(files: JournalFiles) -> None:
    write(files, b"one")
    os.ftruncate(newest(files, b"one"), 20)
    assert read(files) is None


@pytest.mark.parametrize("place", [0, 8, 20, 40, -1])
def test_a_state_that_was_changed_does_not_count(files: JournalFiles, place: int) -> None:
    write(files, b"one", b"two")
    descriptor = newest(files, b"two")
    changed = bytearray(content(descriptor))
    changed[place] ^= 1
    os.pwrite(descriptor, bytes(changed), 0)
    assert read(files) == b"one"


def test_a_journal_without_any_complete_state_is_damaged_and_no_job_begins_anew_over_it(files: JournalFiles) -> None:
    write(files, b"one", b"two")
    for descriptor in files:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 1)
    with pytest.raises(JournalError, match=r"damaged: neither of its files, of \d+ and \d+ bytes, has a complete"):
        read(files)


def test_a_journal_of_another_job_is_refused(files: JournalFiles) -> None:
    write(files, b"one", job="another")
    with pytest.raises(JournalError, match="is of job another, not of a-job"):
        read(files)


def test_a_journal_of_a_newer_format_is_refused_with_what_to_do(
    files: JournalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FORMAT", journal.FORMAT + 1)
    monkeypatch.setattr(journal, "SOFTWARE", "9.0 (protocol 90)")
    write(files, b"one")
    monkeypatch.undo()
    expected = (
        rf"written by Farandole .* in format {journal.FORMAT + 1}, and this is .*, which reads 2 to {journal.FORMAT}: "
    )
    with pytest.raises(JournalError, match=expected + "continue with Farandole .* or a newer one"):
        read(files)


def test_a_journal_of_an_older_format_is_read_by_a_release_that_says_so(
    files: JournalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the format of this release from then on."""
    write(files, StateEncoder().encode(state_of(ToldJob(3).hello("w0").job), None))
    older = journal.FORMAT
    monkeypatch.setattr(journal, "FORMAT", older + 2)

    def first(content: dict[str, Any]) -> dict[str, Any]:
        content["state"]["job"]["wanted"] = content["state"]["job"].pop("target")
        return content

    def second(content: dict[str, Any]) -> dict[str, Any]:
        content["state"]["job"]["target"] = content["state"]["job"].pop("wanted") + 10
        return content

    monkeypatch.setattr(journal, "MIGRATIONS", {older: first, older + 1: second})
    data = read(files)
    assert data is not None
    assert decoded(data)[0].job.target == 13
    write(files, data)
    monkeypatch.setattr(journal, "MIGRATIONS", {})
    assert read(files) == data


def test_a_migration_that_fails_is_an_error(files: JournalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files, b"nonsense")
    older = journal.FORMAT
    monkeypatch.setattr(journal, "FORMAT", older + 1)
    monkeypatch.setattr(journal, "MIGRATIONS", {older: lambda content: content["state"]})
    with pytest.raises(JournalError, match=rf"of format {older}, cannot be turned into format {older + 1}"):
        read(files)


def test_this_release_reads_the_state_of_a_real_job_of_its_format() -> None:
    """The fixture is a journal of this format. If it cannot be read any more, a release with the same number of the
    format could not take over either: raise the number, add a migration, and keep the fixture."""
    with (FIXTURES / f"journal-{journal.FORMAT}").open("rb") as file:
        data = Journal((file.fileno(), file.fileno()), "e0e0912defb8639d").read()
    assert data is not None
    state, beside = decoded(data)
    assert (state.job.generation is not None) & (len(state.job.workers) == 2)
    assert state.sessions.keys() == state.job.agents.keys()
    assert [name for name, _ in msgspec.msgpack.decode(beside, type=KeptFrames).kept] == []


def test_the_two_lists_of_losses_of_format_2_are_one() -> None:
    """The fixture is of a job whose second member was killed, and which has not trained since; then another one was
    killed, and the next one is dying."""
    with (FIXTURES / "journal-2-losses").open("rb") as file:
        data = Journal((file.fileno(), file.fileno()), "job").read()
    assert data is not None
    job = decoded(data)[0].job
    assert [(loss.worker, loss.how, loss.exit_code) for loss in job.losses_now()] == [
        ("w3", "was killed by SIGABRT (signal 6)", -6),
        ("w2", "", None),
    ]
    assert [loss.sentence for loss in job.losses_now()][1] == "w2 (slot 2) is dying"
    assert {loss.worker: loss.noticed for loss in job.losses} == {
        "w1": "its exit",
        "w3": "its exit",
        "w2": "the end of its main thread",
    }


def test_a_full_disk_is_an_error_and_the_state_before_counts(files: JournalFiles, tmp_path: os.PathLike[str]) -> None:
    full = os.open("/dev/full", os.O_RDWR) if os.path.exists("/dev/full") else None
    if full is None:
        pytest.skip("this system has no /dev/full")
    try:
        with pytest.raises(OSError, match=r"No space left|Invalid argument"):
            Journal((full, full), JOB).write(b"one")
    finally:
        os.close(full)


# The state itself -----------------------------------------------------------------------------------------------------


def state_of(job: Job) -> CoordinatorState:
    sessions = {"a": AgentSession("p", True, MessageLog())}
    return CoordinatorState(job, 1.0, 0, sessions, {"a": 2}, {}, frozenset({"::1"}), (Address("::1", 1),))


def test_each_state_of_a_job_is_decoded_as_it_was_whatever_has_changed_since_the_one_before() -> None:
    encoder, told = StateEncoder(), ToldJob(3, slots=4, max_np=4)
    for change in (
        lambda: told.hello("w0", "w1", "w2"),
        lambda: told.elastic("w0", "w1", "w2"),
        lambda: told.connect("b", 2),
        lambda: told.exited("w1"),
        lambda: told.ready(told.job.number, "w0", "w2"),
    ):
        change()
        state, beside = decoded(encoder.encode(state_of(told.job), ["beside"]))
        assert msgspec.msgpack.decode(beside) == ["beside"]
        assert state.job == told.job
        assert list(state.job.workers) == list(told.job.workers)


def test_only_what_has_changed_is_encoded_again() -> None:
    class Counting(StateEncoder):
        def parts(self) -> dict[str, dict[object, bytes]]:
            return {name: {key: data for key, (_, data) in known.items()} for name, known in self._known.items()}

    encoder, told = Counting(), ToldJob(3).hello("w0", "w1", "w2")
    encoder.encode(state_of(told.job), None)
    before = encoder.parts()
    told.elastic("w1")
    encoder.encode(state_of(told.job), None)
    after = encoder.parts()
    assert {key for key, data in after["workers"].items() if data is not before["workers"][key]} == {"w1"}
    assert all(data is before["slots"][key] for key, data in after["slots"].items())


def test_a_state_that_no_version_of_this_software_has_written_is_an_error() -> None:
    with pytest.raises(JournalError, match=r"the coordinator's journal cannot be read \("):
        decoded(b"nonsense")
