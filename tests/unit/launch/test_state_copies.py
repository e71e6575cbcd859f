"""Copies of the coordinator's states: repeated while they cannot be written, and given up after the patience."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from farandole.base.events.event import Event
from farandole.base.events.host_events import StateUnwritten, StateWritten
from farandole.job.coordinator.journal import Journal, JournalFiles, files_in_memory
from farandole.job.launch import job_state
from farandole.job.launch.job_state import CopiesFailed, StateCopies, StateUnavailable

JOB = "a-job"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[JournalFiles]:
    monkeypatch.setattr(job_state, "_COPY_AGAIN_S", 0.001)
    opened = files_in_memory()
    yield opened
    for descriptor in opened:
        os.close(descriptor)


class Store:
    """It cannot be reached for the first `fails` attempts."""

    def __init__(self, fails: int) -> None:
        self.fails, self.content, self.events = fails, b"", list[Event]()

    def write(self, content: bytes) -> None:
        if self.fails:
            self.fails -= 1
            raise StateUnavailable("no answer")
        self.content = content

    def copies(self, patience_s: float = 60.0) -> StateCopies:
        return StateCopies(self.write, patience_s, self.events.append)


def test_a_copy_is_written_when_the_store_is_back_and_said_once(files: JournalFiles) -> None:
    store = Store(fails=3)
    Journal(files, JOB).write(b"one")
    asyncio.run(store.copies().write(files, JOB))
    copied = files_in_memory(store.content)
    assert Journal(copied, JOB).read() == b"one"
    for each in copied:
        os.close(each)
    assert [type(each) for each in store.events] == [StateUnwritten, StateWritten]


def test_the_newest_state_is_copied_also_in_a_second_attempt(files: JournalFiles) -> None:
    """The coordinator has died meanwhile, and the next one has written another state."""
    store = Store(fails=0)
    journal = Journal(files, JOB)
    journal.write(b"one")

    def fail(content: bytes) -> None:
        copies._write = store.write
        journal.write(b"two")
        raise StateUnavailable("no answer")

    copies = StateCopies(fail, 60.0, store.events.append)
    asyncio.run(copies.write(files, JOB))
    assert store.content.endswith(b"two")


def test_a_store_that_stays_away_is_given_up_after_the_patience(files: JournalFiles) -> None:
    store = Store(fails=10**6)
    Journal(files, JOB).write(b"one")
    copies = store.copies(patience_s=0.05)
    with pytest.raises(CopiesFailed, match=r"the state of the job could not be written for 0 s \(no answer\)"):
        asyncio.run(copies.write(files, JOB))
    assert copies.problem == "no answer"
    assert [type(each) for each in store.events] == [StateUnwritten]
