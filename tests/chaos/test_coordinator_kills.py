"""Jobs whose coordinator is killed at random moments, also while they begin and end, and workers beside it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import coordinator_below
from tests.support import jobs
from tests.support.jobs import ELASTIC_JOB, check_job

WORKERS, SAMPLES, LONG_S = 3, 600, 150.0
BETWEEN_S = (2.1, 3.0)  # more than 5 deaths within 10 s end the job


class Job(jobs.RunningJob):
    """As users start it: its coordinator begins as slowly as theirs."""

    is_fresh = True

    def kill_coordinator(self) -> None:
        """Kill it, if there is one now."""
        if (pid := coordinator_below(self.process.pid)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_worker(self, drawn: random.Random) -> None:
        """Kill one, unless some have come to their end: a worker that fails then has failed the job."""
        latest = list(self.latest().values())
        if len(latest) > 1 and not any("end" in each for each in latest):
            with contextlib.suppress(ProcessLookupError):
                self.kill(drawn.choice(latest)["pid"])


@pytest.mark.chaos_long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(8))
def test_a_job_survives_coordinators_that_are_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    words = ["--epochs", str(drawn.choice([6, 12])), "--item-ms", "1"]
    with Job(["-np", str(WORKERS), "--restarts", "20"], ELASTIC_JOB, words, tmp_path, tmp_path / "output") as job:
        began_s = time.monotonic()
        next_s = began_s + drawn.uniform(0.4, 2.0)
        while job.process.poll() is None:
            assert time.monotonic() < began_s + LONG_S, (tmp_path / "output").read_text()
            time.sleep(0.003)
            if time.monotonic() < next_s:
                continue
            job.kill_coordinator()
            if drawn.random() < 0.5:
                time.sleep(drawn.choice([0.0, 0.01, 0.1, 0.4]))  # before the next one is there, or just afterwards
                job.kill_worker(drawn)
            next_s = time.monotonic() + drawn.uniform(*BETWEEN_S)
        assert job.wait(LONG_S) == 0, (tmp_path / "output").read_text()
    check_job(Proof(tmp_path), SAMPLES)
