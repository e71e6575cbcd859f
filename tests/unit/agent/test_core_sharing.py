"""How many threads each worker of a host computes with."""

from __future__ import annotations

import pytest

from farandole.base.config import JobConfig
from farandole.job.agent.host_resources import threads_of_each


@pytest.mark.parametrize(
    ("workers", "usable", "seen", "threads"),
    [
        (2, 2, 2, 1),
        (4, 2, 2, 1),  # more workers than cores
        (4, 64, 64, 16),
        (3, 64, 64, 21),
        (1, 64, 64, None),  # alone: as under python train.py
        (1, 4, 64, 4),  # a container with a quota, which torch does not see
        (8, 4, 64, 1),
        (2, 1, 1, None),  # there is nothing to share: torch takes one thread
    ],
)
def test_each_worker_gets_its_share(workers: int, usable: int, seen: int, threads: int | None) -> None:
    assert threads_of_each(workers, usable, seen) == threads


@pytest.mark.parametrize(
    ("config", "slots", "workers"),
    [
        (JobConfig(2), 2, 2),
        (JobConfig(2, max_np=8), 8, 8),  # room for workers that come later
        (JobConfig(2, max_np=4), 8, 4),  # slots that the job never uses
        (JobConfig(2), 8, 8),  # `farandole scale` may use them all
        (JobConfig(2, min_np=2, restarts=0), 8, 2),  # a fixed size
        (JobConfig(4, spares=2), 6, 4),  # spares only wait
        (JobConfig(4, spares=2), 2, 1),  # they may all be on other machines
    ],
)
def test_cores_are_shared_among_those_that_may_train_at_once(config: JobConfig, slots: int, workers: int) -> None:
    assert config.most_workers_in(slots) == workers
