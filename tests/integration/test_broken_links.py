"""Links between hosts that break silently while everybody lives: the job goes on without one of their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.faults.backends import LabBackend
from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, RunningJob, check_job

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SAMPLES = 600
BUDGET_S = 1.0


@contextmanager
def on_hosts(
    folder: Path, slots: list[int], *flags: str, prepare: Callable[[Lab], None] = lambda _lab: None
) -> Iterator[tuple[Lab, RunningJob]]:
    """A job on the hosts of a lab that trains until it is told to finish."""
    with Lab(hosts=len(slots)) as lab:
        prepare(lab)
        backend = LabBackend(lab, slots, folder)
        words = ["--epochs", "1000000", "--stop", str(folder / "stop"), "--item-ms", "0.3"]
        all_flags = ["-np", str(sum(slots)), *flags, "--detection-budget", f"{BUDGET_S:g}", *backend.flags]
        try:
            with RunningJob(all_flags, ELASTIC_JOB, words, folder, folder / "output") as running:
                backend.start_agents()
                running.wait_until(all_training(sum(slots)), 60)
                yield lab, running
        finally:
            backend.close()


def finish(running: RunningJob) -> str:
    (running.folder / "stop").touch()
    code = running.wait(60)
    said = (running.folder / "output").read_text()
    assert code == 0, said
    return said


@pytest.mark.parametrize(("slots", "left"), [([1, 1, 1], 2), ([2, 1, 1], 3)])
def test_a_link_between_hosts_broken_one_way_costs_the_workers_of_one_of_them(
    tmp_path: Path, slots: list[int], left: int
) -> None:
    with on_hosts(tmp_path, slots, "--restarts", "0") as (lab, running):
        lab.network.one_way(lab.hosts[0], lab.hosts[1])
        running.wait_until(all_training(left), 30)
        said = finish(running)
    assert "connections between living workers are broken" in said
    assert f"{sum(slots) - left} worker" in said
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=left)
    assert proof.redone() <= 2  # the one that had to go may have applied the step before, and nobody else


def test_hosts_that_reach_each_other_in_a_second_network_only_find_that_out(tmp_path: Path) -> None:
    """Both reach the coordinator in the first one."""

    def connect_otherwise(lab: Lab) -> None:
        for host in lab.hosts:
            lab.network.add_address(host.index, f"10.199.0.{host.index + 1}")
        lab.network.partition([lab.hosts[0]], [lab.hosts[1]])

    with on_hosts(tmp_path, [1, 1], prepare=connect_otherwise) as (_lab, running):
        finish(running)
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=2)


def test_workers_of_one_machine_meet_though_its_networks_have_changed_since_one_of_them_started(tmp_path: Path) -> None:
    """As the networks of containers come and go. Each worker is replaced by one that knows other addresses."""
    address = "10.199.0.1"
    with on_hosts(tmp_path, [2]) as (lab, running):
        host = lab.hosts[0]
        first, second = running.latest()[0]["pid"], running.latest()[1]["pid"]
        lab.network.add_address(host.index, address)
        host.signal(first)
        running.wait_until(lambda now: all_training(2)(now) and first not in pids(now), 60)
        (third,) = pids(running.latest()) - {second}
        lab.network.remove_address(host.index, address)
        host.signal(second)
        running.wait_until(lambda now: all_training(2)(now) and second not in pids(now), 60)
        assert third in pids(running.latest())
        finish(running)
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=2)


def pids(latest: dict[int, dict[str, Any]]) -> set[int]:
    return {each["pid"] for each in latest.values()}


def test_a_slow_link_and_one_that_loses_packets_are_not_broken(tmp_path: Path) -> None:
    with on_hosts(tmp_path, [1, 1], "--restarts", "0") as (lab, running):
        lab.network.loss(0, 0.1)
        lab.network.rate(1, 1.0)
        begin = running.latest()[0]["ns"]
        running.wait_until(lambda latest: latest[0]["ns"] - begin > 4 * BUDGET_S * 1e9, 60)
        lab.network.loss(0, 0)
        lab.network.rate(1, None)
        finish(running)
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=2)
    assert set(proof.generations().values()) == {2}
