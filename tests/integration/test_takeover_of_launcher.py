"""The launcher is killed with kill -9, and the same command is started on another machine: the job goes on there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job
from tests.support.moving_job import MovingJob

pytestmark = [pytest.mark.alone, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SAMPLES, LONG_S = 600, 60.0


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=4) as opened:
        yield opened


def step(record: dict[str, Any]) -> int:
    return int(record.get("before", record.get("after", 0)))


@pytest.mark.timeout(150)
def test_the_same_command_on_another_machine_continues_the_job(lab: Lab, tmp_path: Path) -> None:
    """First with all workers under agents, which train on while there is no launcher; a second launcher beside it is
    refused."""
    with MovingJob(lab, tmp_path, "-np", "2", "--local-slots", "0") as job:
        first = job.wait_until(all_training(2), LONG_S)
        refused = lab.hosts[1].start(job.command())
        assert refused.wait(LONG_S) == 2
        job.kill_launcher()
        before = max(map(step, job.latest().values()))
        until_s = time.monotonic() + LONG_S
        while max(map(step, job.latest().values())) < before + 20:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        job.start_on(lab.hosts[1])
        while not back(job):
            assert time.monotonic() < until_s, job.said()
            time.sleep(0.01)
        last = job.latest()
        job.finish()
    assert job.pids(last) == job.pids(first)
    assert len(job.events("GenerationStarted")) == 1
    assert "rank 0 is through" in job.said()
    assert "rank 1 is through" in job.said()
    assert not (job.state / "job.json").exists()
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=2)


def back(job: MovingJob) -> bool:
    return all("has reached the coordinator again" in path.read_text() for path in job.folder.glob("agent-*"))


@pytest.mark.timeout(150)
def test_workers_that_have_died_with_the_launcher_are_replaced_where_it_continues(lab: Lab, tmp_path: Path) -> None:
    with MovingJob(lab, tmp_path, "-np", "3", "--local-slots", "1") as job:
        first = job.wait_until(all_training(3), LONG_S)
        for host in (lab.hosts[1], lab.hosts[1]):  # another machine, and the same one
            beyond = job.latest()[0]["generation"]
            job.kill_launcher()
            job.start_on(host)
            latest = job.wait_until(lambda now, n=beyond: all_training(3)(now) and now[0]["generation"] > n, LONG_S)  # type: ignore[misc]
            assert job.pids(latest) == job.pids(first)
        job.finish()
    proof = Proof(tmp_path)
    check_job(proof, SAMPLES, workers_at_end=3)
