"""The launcher is gone, and the same command is started on another machine: the job goes on there."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job
from tests.support.moving_job import MovingJob

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SAMPLES, LONG_S = 600, 60.0


@pytest.mark.timeout(150)
def test_the_machine_of_the_launcher_loses_power_and_the_job_goes_on_where_the_command_is_started_again(
    tmp_path: Path,
) -> None:
    """Nobody tells the agents that their connections have ended. They let the workers train, and find the next
    coordinator at one of the addresses that they were given."""
    flags = ("-np", "2", "--local-slots", "0", "--detection-budget", "1")
    with Lab(hosts=4) as lab, MovingJob(lab, tmp_path, *flags, by_addresses=True) as job:
        first = job.wait_until(all_training(2), LONG_S)
        job.power_off()
        job.wait_for_agents(times=1, told="has no connection to the coordinator (it has not answered for")
        job.train_on(100)
        job.start_on(lab.hosts[1])
        job.wait_for_agents(times=1)
        last = job.latest()
        job.finish()
    assert job.pids(last) == job.pids(first)
    assert len(job.events("GenerationStarted")) == 1
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=2)


@pytest.mark.timeout(150)
def test_an_agent_whose_network_is_cut_for_less_than_its_patience_gives_its_workers_up_when_it_is_back(
    tmp_path: Path,
) -> None:
    """The coordinator lives, and the others have continued without them: it tells the agent so, which joins again."""
    flags = ("-np", "2", "--local-slots", "0", "--detection-budget", "1")
    with Lab(hosts=4) as lab, MovingJob(lab, tmp_path, *flags) as job:
        first = job.wait_until(all_training(2), LONG_S)
        lab.network.cut(lab.hosts[3])
        job.forget(next(each for each in first.values() if each["host"] == lab.hosts[3].name))
        alone = job.wait_until(all_training(1), LONG_S)
        assert alone[0]["host"] == lab.hosts[2].name
        lab.network.heal(lab.hosts[3])
        job.wait_until(lambda now: all_training(2)(now) and now[0]["generation"] > alone[0]["generation"], LONG_S)
        job.finish()
    assert job.told()[1].count("joined job") == 2
    check_job(Proof(tmp_path), SAMPLES, workers_at_end=2)


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
