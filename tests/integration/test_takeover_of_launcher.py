"""The launcher is gone, and the same command is started on another machine: the job goes on there."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job
from tests.support.moving_job import MovingJob

pytestmark = [pytest.mark.alone, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SAMPLES, LONG_S = 600, 60.0


@pytest.mark.timeout(150)
def test_the_same_command_on_another_machine_continues_the_job_and_no_worker_notices(tmp_path: Path) -> None:
    """After kill -9; and after the launcher has been superseded, whose coordinator tells nobody anything."""
    with Lab(hosts=4) as lab, MovingJob(lab, tmp_path, "-np", "2", "--local-slots", "0") as job:
        first = job.wait_until(all_training(2), LONG_S)
        job.kill_launcher()
        job.train_on(20)
        job.start_on(lab.hosts[1])
        job.wait_for_agents(times=1)
        job.supersede()
        assert "another launcher, process 7 on elsewhere, has taken this job over" in job.said()
        job.train_on(20)
        job.start_on(lab.hosts[1])
        job.wait_for_agents(times=2)
        last = job.latest()
        job.finish()
    assert job.pids(last) == job.pids(first)
    assert len(job.events("GenerationStarted")) == 1
    assert "[0] rank 0 is through" in job.said()
    assert "[1] rank 1 is through" in job.said()
    assert [each.name for each in job.state.iterdir()] == ["lock"]
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=2)
