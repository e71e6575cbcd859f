"""Whole jobs with spares: a lost worker's place is taken in the regroup that its loss begins."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import HOROVODRUN, all_training, all_writing
from tests.support.jobs import ELASTIC_JOB, SCRIPTS, RunningJob, check_job, farandole_run

SAMPLES = 600


class JobWithSpares(RunningJob):
    """Trains until finish() is called."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.output = folder / "output"
        self._stop = folder / "stop"
        words = ["--epochs", "1000000", "--stop", str(self._stop)]
        super().__init__(flags, ELASTIC_JOB, words, folder, self.output)

    def wait_for_spares(self, count: int, timeout_s: float = 60.0) -> None:
        """Until so many have been reported in all, those that were admitted since included."""
        self.wait_until(lambda _: self.output.read_text().count("waits as a spare") >= count, timeout_s)

    def spare(self) -> int:
        """The process of the only spare: it has begun its records, and trains nothing."""
        members = {record["pid"] for record in self.wait_until(all_training(2), 60).values()}
        (spare,) = {int(path.name.split("-")[1]) for path in self.folder.glob("worker-*.jsonl")} - members
        return spare

    def finish(self) -> str:
        self._stop.touch()
        assert self.wait(60) == 0, self.output.read_text()
        return self.output.read_text()


@pytest.mark.core
def test_each_of_two_kills_costs_one_regroup_and_no_worker(tmp_path: Path) -> None:
    with JobWithSpares(tmp_path, "-np", "2", "--spares", "1") as running:
        running.wait_for_spares(1)
        for generation in (1, 2):
            latest = running.wait_until(all_training(2), 60)
            assert latest[0]["generation"] == generation
            running.kill(latest[generation - 1]["pid"])  # the second time the spare that came in
            running.wait_for_spares(generation + 1)
        output = running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=2)
    assert proof.generations() == {1: 2, 2: 2, 3: 2}
    assert proof.redone() <= 2
    assert "3 generations, 2 workers lost, 2 joined" in output


def test_the_loss_of_a_spare_disturbs_nobody_and_those_that_wait_at_the_end_go_in_peace(tmp_path: Path) -> None:
    with JobWithSpares(tmp_path, "-np", "2", "--spares", "1", "--verbose") as running:
        running.wait_for_spares(1)
        os.kill(running.spare(), signal.SIGKILL)
        running.wait_for_spares(2)
        output = running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=2)
    assert proof.generations() == {1: 2}
    assert "w3 (slot 2) exited with code 0" in output


def test_spares_serve_scripts_written_for_horovod(tmp_path: Path) -> None:
    flags = ["-np", "2", "--min-np", "1", "--max-np", "2", "-H", "localhost:3", "--spares", "1", "--on-failure", "slot"]
    output, records = tmp_path / "output", tmp_path / "records"
    records.mkdir()
    words = ["--stop", str(tmp_path / "stop")]
    with RunningJob(flags, SCRIPTS / "commit_job.py", words, records, output, HOROVODRUN) as running:
        running.wait_until(lambda _: "w2 (slot 2) waits as a spare" in output.read_text(), 60)
        latest = running.wait_until(all_writing(2), 60)
        running.kill(latest[0]["pid"])
        running.wait_until(lambda latest: all_writing(2)(latest) and latest[0]["generation"] == 2, 60)
        running.wait_until(lambda _: "w3 (slot 0) waits as a spare" in output.read_text(), 60)
        (tmp_path / "stop").touch()
        assert running.wait(60) == 0, output.read_text()
    assert "2 generations, 1 worker lost, 1 joined" in output.read_text()


def test_too_few_slots_for_the_spares_are_told_of(tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--records", str(tmp_path)]
    job = farandole_run("-np", "1", "-H", "localhost:1", "--spares", "2", sys.executable, str(ELASTIC_JOB), *arguments)
    assert job.returncode == 0
    assert "2 of 2 spares (--spares) cannot be started: the hosts have no more slots" in job.stderr
