"""Whole jobs under random kills and joins: after each, every invariant of a job must hold."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob
from tests.jobs import ELASTIC_JOB, check_job

EPOCHS, SAMPLES = 40, 600
LAST_STEP = 1950  # of 2,000


def disturb(job: RunningJob, chance: random.Random) -> None:
    """Kill random workers at random moments, sometimes two at once, until the job is nearly through: a worker that
    is killed after everybody has finished is a failure of the job, and is reported as one. Somebody who holds the
    state always stays: without, the job would be lost, and say so."""
    killed: set[int] = set()
    while job.process.poll() is None:
        latest = job.latest()
        if any(
            max(record.get("before", 0), record.get("after", 0)) >= LAST_STEP or "end" in record
            for record in latest.values()
        ):
            return
        alive = [record["pid"] for record in latest.values() if record["pid"] not in killed]
        if len(alive) >= 2:
            count = 2 if len(alive) > 2 and chance.random() < 0.2 else 1
            for pid in chance.sample(alive, count):
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    job.kill(pid)
        pause_s = chance.uniform(0.02, 1.5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(pause_s)


def run_schedule(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    num_workers = chance.choice([0, 0, 2])
    arguments = ["--epochs", str(EPOCHS), "--num-workers", str(num_workers)]
    if chance.random() < 0.5:
        arguments.append("--mean-each-step")
    flags = ["-np", str(chance.choice([2, 3, 4])), "--restarts", "1000"]
    print(f"seed {seed}: {flags} {arguments}")
    with RunningJob(flags, ELASTIC_JOB, arguments, folder, folder / "output") as job:
        job.wait_until(lambda latest: len(latest) >= 2, 60)
        disturb(job, chance)
        assert job.wait(60) == 0, (folder / "output").read_text()[-3000:]
    check_job(Proof(folder), SAMPLES, EPOCHS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(4))
def test_a_job_survives_a_random_schedule(seed: int, tmp_path: Path) -> None:
    run_schedule(seed, tmp_path)


@pytest.mark.chaos_long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(1000, 1000 + int(os.environ.get("CHAOS_SCHEDULES", "50"))))
def test_a_job_survives_many_random_schedules(seed: int, tmp_path: Path) -> None:
    run_schedule(seed, tmp_path)
