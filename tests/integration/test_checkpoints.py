"""Whole jobs that are lost, all processes at once, and go on from a checkpoint with another number of workers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training
from tests.jobs import ELASTIC_JOB, SCRIPTS, check_job, farandole_run

SAMPLES = 600
COMMIT_JOB = SCRIPTS / "commit_job.py"


class Job:
    """The same command again and again, over one folder of checkpoints and one of records."""

    def __init__(self, folder: Path, *arguments: str, script: Path = ELASTIC_JOB) -> None:
        self.records, self.checkpoints, self._folder = folder / "records", folder / "checkpoints", folder
        self.records.mkdir()
        self._arguments, self._script = arguments, script

    def start(self, workers: int, *flags: str) -> RunningJob:
        words = ["-np", str(workers), "--checkpoint", str(self.checkpoints), "--checkpoint-every", "10steps", *flags]
        return RunningJob(words, self._script, self._arguments, self.records, self._folder / "output")

    def said(self) -> str:
        return (self._folder / "output").read_text()

    def newest(self) -> dict[str, Any]:
        manifests = [json.loads(path.read_text()) for path in self.checkpoints.glob("*/manifest.json")]
        return max(manifests, key=lambda each: (each["lineage"], each["step"], each["boundary"]))


def reaches(size: int, step: int) -> Any:
    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return all_training(size)(latest) and latest[0].get("after", latest[0].get("before", 0)) >= step

    return condition


def kill_everything(running: RunningJob) -> None:
    latest = running.latest()
    running.process.kill()
    for record in latest.values():
        with contextlib.suppress(ProcessLookupError):  # its guard was faster
            os.kill(record["pid"], signal.SIGKILL)
    running.wait(20)


def test_all_processes_killed_at_a_random_moment_and_started_with_another_number_of_workers(tmp_path: Path) -> None:
    at = sorted(random.Random().sample(range(15, 200), 2))
    print("killed at about the steps", at)
    job = Job(tmp_path, "--epochs", "6", "--item-ms", "0.2")
    for size, step in zip((3, 1), at, strict=True):
        with job.start(size) as running:
            running.wait_until(reaches(size, step), 60)
            kill_everything(running)
    saved = job.newest()
    with job.start(2) as running:
        assert running.wait(60) == 0
    assert f"step {saved['step']}\n" in job.said()
    proof = Proof(job.records)
    check_job(proof, epochs=6, samples=SAMPLES, workers_at_end=2)
    assert saved["step"] >= at[1] - 20
    assert job.newest()["step"] == proof.steps() == 300
    assert job.newest()["lineage"] == 3
    assert len(list(job.checkpoints.glob("step-*"))) == 2
    with job.start(1) as running:
        assert running.wait(60) == 0
    assert Proof(job.records).steps() == 300, "there was nothing left to do"


def test_ctrl_c_saves_the_step_it_came_at_and_the_same_command_goes_on_from_there(tmp_path: Path) -> None:
    job = Job(tmp_path, "--epochs", "4")
    with job.start(2, "--checkpoint-every", "1h") as running:
        running.wait_until(reaches(2, 30), 60)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
    saved = job.newest()["step"]
    proof = Proof(job.records)
    assert proof.steps() - 1 <= saved <= proof.steps()
    with job.start(1, "--checkpoint-every", "1h") as running:
        assert running.wait(60) == 0
    check_job(Proof(job.records), epochs=4, samples=SAMPLES, workers_at_end=1)


def test_a_job_that_gives_up_below_min_np_saves_what_its_survivors_have(tmp_path: Path) -> None:
    job = Job(tmp_path, "--epochs", "1000")
    flags = ["--checkpoint-every", "1h", "--min-np", "2", "--restarts", "0", "--elastic-timeout", "0.5"]
    with job.start(2, *flags) as running:
        latest = running.wait_until(reaches(2, 30), 60)
        running.kill(latest[0]["pid"])
        assert running.wait(30) == 1
    saved = job.newest()
    assert saved["step"] in (Proof(job.records).steps(), Proof(job.records).steps() - 1)
    assert saved["workers"] == 2


def test_under_the_commit_rule_the_newest_commit_is_what_is_saved(tmp_path: Path) -> None:
    """Killed, then ended with Ctrl-C, then finished: each time from a commit, and every batch is trained once."""
    job = Job(tmp_path, "--stop", str(tmp_path / "stop"), script=COMMIT_JOB)
    with job.start(2) as running:
        running.wait_until(lambda latest: len(latest) == 2 and latest[0]["batch"] > 60, 60)
        kill_everything(running)
    first = job.newest()
    assert first["rule"] == "commit"
    with job.start(1, "--checkpoint-every", "1h") as running:
        running.wait_until(lambda latest: latest[0]["size"] == 1 and latest[0]["batch"] > 90, 60)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
    second = job.newest()
    assert second["step"] > first["step"]
    (tmp_path / "stop").touch()
    with job.start(2) as running:
        assert running.wait(60) == 0
    entered = [each for each in Proof(job.records).records if each["what"] == "enter" and each["generation"] > 2]
    assert {each["batch"] for each in entered} == {3 * second["step"]}
    assert len({each["parameters"] for each in entered}) == 1


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_an_error_before_anything_starts(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = farandole_run("-np", "1", "--checkpoint", str(tmp_path / folder), sys.executable, "-c", "print('started')")
    assert done.returncode == 2
    assert "no checkpoints can be written there" in done.stderr
    assert "started" not in done.stdout
