"""Workers that are a DataParallel each train the model that one thread trains on the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = pytest.mark.long

SCRIPT = str(SCRIPTS / "data_parallel_job.py")


@pytest.mark.core
@pytest.mark.parametrize(
    "words",
    [
        ["--way", "loader", "--threads", "2", "0"],  # one worker with two threads, the other without DataParallel
        ["--way", "horovod", "--threads", "2", "3"],
        ["--way", "ddp"],
    ],
    ids=["one_of_two", "horovod", "ddp"],
)
def test_two_workers_with_threads_are_as_one_process_without(words: list[str], tmp_path: Path) -> None:
    done = farandole_run(
        "-np", "2", "--restarts", "0", sys.executable, SCRIPT, *words, "--store", str(tmp_path / "store")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: the same after 55 steps" in done.stdout, done.stdout


def test_one_worker_with_threads_is_as_one_without() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--way", "loader", "--threads", "3"], capture_output=True, text=True, timeout=60
    )
    assert "rank 0 of 1: the same after 55 steps" in done.stdout, done.stdout + done.stderr
