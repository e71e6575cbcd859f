"""A guard that is told nothing for too long kills what it watches: its agent is stopped."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.job.agent.guard import Guard

LIMIT_S, DEADLINE_S = 0.5, 10.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def test_silence_kills_in_time_and_words_do_not(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    guard = Guard(tmp_path, LIMIT_S)
    guard.start()
    guard.watch(sleeper.pid)
    end_s = time.monotonic() + 3 * LIMIT_S
    while time.monotonic() < end_s:
        guard.heartbeat()
        with pytest.raises(subprocess.TimeoutExpired):
            sleeper.wait(LIMIT_S / 10)
    silent_s = time.monotonic()
    assert sleeper.wait(DEADLINE_S) == -9
    assert time.monotonic() - silent_s > 0.5 * LIMIT_S
    guard.stop()


def test_a_guard_that_has_killed_once_goes_on_watching(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    guard = Guard(tmp_path, LIMIT_S)
    guard.start()
    guard.watch(sleeper.pid)
    sleeper.wait(DEADLINE_S)
    guard.release(sleeper.pid)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as another:
        guard.watch(another.pid)
        assert another.wait(DEADLINE_S) == -9
    guard.stop()


def test_without_a_limit_silence_means_nothing(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    guard.start()
    guard.watch(sleeper.pid)
    guard.heartbeat()
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(2 * LIMIT_S)
    guard.stop()
