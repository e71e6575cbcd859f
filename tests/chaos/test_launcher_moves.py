"""A job whose launcher is killed five times, with or without a worker of its own, and started on another machine each
time."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job
from tests.support.moving_job import MovingJob

SAMPLES, LONG_S, MOVES = 600, 120.0, 5


@pytest.mark.chaos_long
@pytest.mark.timeout(600)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(("local", "by_addresses"), [(0, False), (0, True), (1, False)])
def test_a_job_that_moves_five_times_loses_no_step_and_no_worker_of_other_machines(
    tmp_path: Path, local: int, by_addresses: bool
) -> None:
    workers = 2 + local
    flags = ["-np", str(workers), "--local-slots", str(local), "--restarts", "0"]
    with (
        Lab(hosts=4) as lab,
        MovingJob(lab, tmp_path, *flags, by_addresses=by_addresses) as job,
    ):
        first = job.wait_until(all_training(workers), LONG_S)
        for move in range(1, MOVES + 1):
            generation = job.latest()[0]["generation"]
            job.kill_launcher()
            if not local:
                job.train_on(20)
            job.start_on(lab.hosts[move % 2])
            job.wait_for_agents(times=move)
            if local:
                job.wait_until(
                    lambda now, n=generation: all_training(workers)(now) and now[0]["generation"] > n,  # type: ignore[misc]
                    LONG_S,
                )
        last = job.latest()
        job.finish()
    assert job.pids(last) == job.pids(first)
    proof = Proof(tmp_path)
    assert proof.redone() <= MOVES * local  # the attempts during which a worker of the launcher has died
    check_job(proof, SAMPLES, workers_at_end=workers)
