"""A job of which everything is killed, again and again, and that goes on with another number of workers each time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob
from tests.support.jobs import ELASTIC_JOB, check_job

SAMPLES = 600


@pytest.mark.chaos_long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [int(os.environ.get("CHAOS_SEED", "4000"))])
def test_a_job_that_is_lost_twenty_times_trains_every_sample_once(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    records, checkpoints, stop = tmp_path / "records", tmp_path / "checkpoints", tmp_path / "stop"
    records.mkdir()

    def start() -> RunningJob:
        every = chance.choice(["7steps", "25steps", "0.3s"])
        flags = ["-np", str(chance.randint(1, 4)), "--checkpoint", str(checkpoints), "--checkpoint-every", every]
        arguments = ["--epochs", "1000", "--stop", str(stop), "--num-workers", str(chance.choice([0, 2]))]
        return RunningJob(flags, ELASTIC_JOB, arguments, records, tmp_path / "output")

    for _ in range(20):
        known = {path.name for path in records.iterdir()}
        with start() as job:
            job.wait_until(lambda _, known=known: any(path.name not in known for path in records.iterdir()), 120)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(chance.uniform(0.0, 2.0))
            pids = [int(path.stem.split("-")[1]) for path in records.iterdir() if path.name not in known]
            for pid in chance.sample([job.process.pid, *pids], len(pids) + 1):
                with contextlib.suppress(ProcessLookupError):  # the guard was faster
                    os.kill(pid, signal.SIGKILL)
            job.wait(30)
    stop.touch()
    with start() as job:
        assert job.wait(120) == 0, (tmp_path / "output").read_text()[-3000:]
    check_job(Proof(records), samples=SAMPLES)
    assert not list(checkpoints.glob("*/manifest.json.new"))
