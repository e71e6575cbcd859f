"""The coordinator's journal: its newest complete state, or an error that says what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from farandole.coordinator.journal import Journal, JournalError, JournalFiles, JournalIdentity, files_in_memory

JOB = JournalIdentity("a-job")


@pytest.fixture
def files() -> Iterator[JournalFiles]:
    opened = files_in_memory()
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def write(files: JournalFiles, *states: bytes, identity: JournalIdentity = JOB) -> None:
    journal = Journal(files, identity)
    for state in states:
        journal.write(state)


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


def test_wherever_a_coordinator_dies_while_it_writes_the_state_before_counts(files: JournalFiles) -> None:
    write(files, b"one", b"two", b"three")
    descriptor = newest(files, b"three")
    complete = content(descriptor)
    for length in range(len(complete)):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, complete[:length], 0)
        assert read(files) == b"two"
    os.pwrite(descriptor, complete, 0)
    assert read(files) == b"three"


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
    write(files, b"one", identity=JournalIdentity("another"))
    with pytest.raises(JournalError, match="is of job another, not of a-job"):
        read(files)


def test_a_journal_of_another_version_is_refused(files: JournalFiles) -> None:
    write(files, b"one", identity=JournalIdentity("a-job", "0.0.9 (protocol 1)"))
    with pytest.raises(JournalError, match=r"written by Farandole 0.0.9 \(protocol 1\), and this is .*: continue with"):
        read(files)


def test_a_full_disk_is_an_error_and_the_state_before_counts(files: JournalFiles, tmp_path: os.PathLike[str]) -> None:
    full = os.open("/dev/full", os.O_RDWR) if os.path.exists("/dev/full") else None
    if full is None:
        pytest.skip("this system has no /dev/full")
    try:
        with pytest.raises(OSError, match=r"No space left|Invalid argument"):
            Journal((full, full), JOB).write(b"one")
    finally:
        os.close(full)
