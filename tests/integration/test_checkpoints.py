"""Whole jobs that are lost, all processes at once, and go on from a checkpoint with another number of workers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import farandole as fd
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, SCRIPTS, RunningJob, check_job, farandole_run

SAMPLES = 600
COMMIT_JOB = SCRIPTS / "commit_job.py"
OBJECTS = SCRIPTS.parent / "objects"


class Job:
    """The same command again and again, over one folder of checkpoints and one of records."""

    def __init__(self, folder: Path, *arguments: str, script: Path = ELASTIC_JOB, scheme: str = "") -> None:
        self.records, self.checkpoints, self._folder = folder / "records", folder / "checkpoints", folder
        self.records.mkdir()
        self._arguments, self._script, self._place = arguments, script, f"{scheme}{self.checkpoints}"

    def start(self, workers: int, *flags: str) -> RunningJob:
        words = ["-np", str(workers), "--checkpoint", self._place, "--checkpoint-every", "10steps", *flags]
        return RunningJob(words, self._script, self._arguments, self.records, self._folder / "output")

    def said(self) -> str:
        return (self._folder / "output").read_text()

    def newest(self) -> dict[str, Any]:
        manifests = [json.loads(path.read_text()) for path in self.checkpoints.glob("*/manifest.json")]
        return max(manifests, key=lambda each: (each["run_id"], each["step"], each["boundary"]))

    def newest_step(self) -> int:
        """0 while there is none."""
        names = [path.parent.name for path in self.checkpoints.glob("*/manifest.json")]
        return max((int(name.split("-")[1]) for name in names), default=0)

    def failed_step(self) -> int:
        """Of the last checkpoint that could not be written; 0 while there is none."""
        return max(map(int, re.findall(r"could not save step (\d+)", self.said())), default=0)


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


def limit_files(pid: int, size_bytes: int) -> None:
    """To the process it is as if the disk were full."""
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


@pytest.mark.core
def test_a_job_that_is_killed_and_then_gives_up_trains_every_sample_once_with_any_number_of_workers(
    tmp_path: Path,
) -> None:
    """The job that gives up has too few workers; its survivor saves the step it is at."""
    at = sorted(random.Random().sample(range(15, 100), 2))
    print("ended at about the steps", at)
    job = Job(tmp_path, "--epochs", "3", "--item-ms", "0.2")
    with job.start(2) as running:
        running.wait_until(reaches(2, at[0]), 60)
        kill_everything(running)
    assert job.newest()["step"] >= at[0] - 20
    flags = ["--checkpoint-every", "1h", "--min-np", "2", "--restarts", "0", "--elastic-timeout", "0.5"]
    with job.start(2, *flags) as running:
        latest = running.wait_until(reaches(2, at[1]), 60)
        running.kill(latest[0]["pid"])
        assert running.wait(30) == 1
    saved, trained = job.newest()["step"], Proof(job.records).steps()
    assert saved in (trained - 1, trained)
    with job.start(1) as running:
        assert running.wait(60) == 0
    assert f"step {saved}\n" in job.said()
    proof = Proof(job.records)
    check_job(proof, epochs=3, samples=SAMPLES, workers_at_end=1)
    assert job.newest()["step"] == proof.steps() == 150
    assert job.newest()["run_id"] == 3
    assert len(list(job.checkpoints.glob("step-*"))) == 2


def test_a_full_disk_stops_nothing_and_a_job_that_loses_all_workers_goes_on_from_the_newest(tmp_path: Path) -> None:
    """Files may not grow above 1 MB for a while, and a checkpoint has 3. Then the worker is killed, not the job."""
    job = Job(tmp_path, "--stop", str(tmp_path / "stop"), "--epochs", "1000", "--frozen-mb", "3", "--item-ms", "0.1")
    with job.start(1) as running:
        worker = running.wait_until(all_training(1), 60)[0]["pid"]
        limit_files(worker, 1 << 20)
        running.wait_until(lambda _: job.failed_step() > 0, 60)
        limit_files(worker, resource.RLIM_INFINITY)
        running.wait_until(lambda _: job.newest_step() > job.failed_step(), 60)
        running.kill(worker)
        running.wait_until(lambda now: all_training(1)(now) and now[0]["pid"] != worker, 60)
        (tmp_path / "stop").touch()
        assert running.wait(60) == 0
    assert "File too large" in job.said()
    assert "continuing from the newest checkpoint" in job.said()
    assert re.search(r"went back( from step \d+ or later)? to the checkpoint at step [1-9]\d*;", job.said())
    check_job(Proof(job.records), samples=SAMPLES)
    assert job.newest()["run_id"] == 2


@pytest.mark.long
def test_under_the_commit_rule_the_newest_commit_goes_to_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended by Ctrl-C, which saves the newest commit, and then finished; without a rename anywhere."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(OBJECTS), os.environ.get("PYTHONPATH", "")]))
    job = Job(tmp_path, "--stop", str(tmp_path / "stop"), script=COMMIT_JOB, scheme="flat://")
    with job.start(2) as running:
        running.wait_until(lambda latest: len(latest) == 2 and job.newest_step() > 0, 60)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
    saved = job.newest()
    assert saved["rule"] == "commit"
    committed = [each["batch"] for each in Proof(job.records).records if each["what"] == "commit"]
    assert 3 * saved["step"] in (max(committed), max(committed) - 3)
    (tmp_path / "stop").touch()
    with job.start(1) as running:
        assert running.wait(60) == 0
    entered = [each for each in Proof(job.records).records if each["what"] == "enter"]
    assert max(each["batch"] for each in entered) == 3 * saved["step"]
    assert "resuming from flat://" in job.said()
    assert not list(job.checkpoints.glob("**/*.new"))


@pytest.mark.long
def test_torchruns_job_is_lost_and_goes_on_alone(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "FARANDOLE_CHECKPOINT": f"file://{tmp_path}/checkpoints",
        "FARANDOLE_CHECKPOINT_EVERY": "10steps",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(SCRIPTS / "fixed_checkpoint_job.py")
    first = subprocess.run(
        [*torchrun, script, "--die-at", "100"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert first.returncode != 0
    assert "RESULT" not in first.stdout
    second = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert second.stdout == "RESULT rank=0 steps=150\n", second.stderr
    assert f"resuming from {tmp_path}/checkpoints/step-" in second.stderr


def test_a_function_goes_on_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 20 batches are trained here, the others by farandole.run()."""

    def job(last: int) -> tuple[int, bool, str]:
        fd.init()
        state = fd.elastic.ObjectState(fd.broadcast_object, fd.rank, batch=0)
        entered = []

        @fd.elastic.run
        def train(state: Any) -> None:
            entered.append(state.batch)
            while state.batch < last:
                state.batch += 1
                state.commit()

        train(state)
        saved = state.save_once(lambda path: path.write_text(str(state.batch)), tmp_path / "result")
        fd.shutdown()
        return entered[0], saved, (tmp_path / "result").read_text()

    with monkeypatch.context() as here:
        here.setenv("FARANDOLE_CHECKPOINT", str(tmp_path / "data"))
        assert job(20) == (0, True, "20")
    results = fd.run(job, (30,), num_proc=1, checkpoint=tmp_path / "data", checkpoint_every="5steps")
    assert results == [(20, True, "30")]


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_an_error_before_anything_starts(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = farandole_run("-np", "1", "--checkpoint", str(tmp_path / folder), sys.executable, "-c", "print('started')")
    assert done.returncode == 2
    assert "no checkpoints can be written there" in done.stderr
    assert "started" not in done.stdout
