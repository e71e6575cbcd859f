"""The launcher is killed, and its journal is lost, too: the next one asks the agents what the job is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.job.coordinator.coordinator_factory import COORDINATOR_NAME
from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job
from tests.support.moving_job import MovingJob

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SAMPLES, LONG_S = 600, 60.0
FLAGS = ("-np", "2", "--local-slots", "0")


def remove(state: Path) -> None:
    for path in state.glob("journal-*"):
        path.unlink()


def cut(state: Path) -> None:
    for path in state.glob("journal-*"):
        os.truncate(path, path.stat().st_size // 2)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("lose", [remove, cut])
def test_a_job_whose_journal_is_lost_is_rebuilt_from_what_its_agents_tell(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """No worker is restarted, and no step is repeated. Then a worker dies, and is replaced, and the launcher moves."""
    with Lab(hosts=4) as lab, MovingJob(lab, tmp_path, *FLAGS) as job:
        first = job.wait_until(all_training(2), LONG_S)
        job.kill_launcher()
        job.wait_for_end_of_coordinator()
        lose(job.state)
        job.start_on(lab.hosts[1])
        job.wait_for_agents(times=1)
        job.kill_process(COORDINATOR_NAME)  # before it has decided anything
        job.wait_for_agents(times=2)
        job.wait_for_event("JobRebuilt")
        job.train_on(20)
        assert job.pids(job.latest()) == job.pids(first)
        assert len(job.events("GenerationStarted")) == 1
        assert Proof(tmp_path).redone() == 0
        (event,) = job.events("JobRebuilt")
        assert (event["workers"], event["generation"], event["missing"]) == (["w0", "w1"], 1, 0)
        victim = job.latest()[1]
        job.kill_worker(victim)
        job.forget(victim)
        latest = job.wait_until(lambda now: all_training(2)(now) and now[0]["generation"] > 2, LONG_S)
        job.kill_launcher()
        job.start_on(lab.hosts[0])
        job.wait_for_agents(times=3)
        last = job.latest()
        job.finish()
    assert job.pids(last) == job.pids(latest)
    check_job(Proof(tmp_path), SAMPLES, workers_at_end=2)


@pytest.mark.timeout(150)
def test_a_worker_that_dies_before_the_job_is_rebuilt_is_replaced_afterwards(tmp_path: Path) -> None:
    with Lab(hosts=4) as lab, MovingJob(lab, tmp_path, "-np", "3", "--local-slots", "0", slots=2) as job:
        first = job.wait_until(all_training(3), LONG_S)
        job.kill_launcher()
        victim = first[1]
        job.kill_worker(victim)
        job.forget(victim)
        job.wait_for_end_of_coordinator()
        remove(job.state)
        job.start_on(lab.hosts[1])
        job.wait_until(lambda now: all_training(3)(now) and now[0]["generation"] > 2, LONG_S)
        (event,) = job.events("JobRebuilt")
        assert event["missing"] == 1
        last = job.latest()
        job.finish()
    assert len(job.pids(last) & job.pids(first)) == 2
    assert Proof(tmp_path).redone() <= 1
    check_job(Proof(tmp_path), SAMPLES, workers_at_end=3)
