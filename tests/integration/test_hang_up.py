"""The terminal of a launcher closes: the job ends in good order, unless it was started under nohup."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import FARANDOLE_RUN, RunningJob, all_training
from tests.support.jobs import ELASTIC_JOB, check_job, processes_with
from tests.support.joined import JoinedJob

pytestmark = pytest.mark.long

SAMPLES, LONG_S = 600, 60.0


def check_that_the_last_step_was_saved(checkpoints: Path, records: Path) -> None:
    """One worker writes the emergency checkpoint. Another one may have applied one more step in the same moment."""
    saved = [json.loads(path.read_text())["step"] for path in checkpoints.glob("*/manifest.json")]
    applied = [len(steps) for steps in Proof(records).applied().values()]
    assert len(saved) == 1
    assert saved[0] in applied
    assert saved[0] >= max(applied) - 1


class CheckpointedJob(RunningJob):
    """Trains until it is asked to end, and writes no checkpoint before."""

    def __init__(self, folder: Path, program: tuple[str, ...] = FARANDOLE_RUN) -> None:
        self.records, self.checkpoints = folder / "records", folder / "checkpoints"
        self.records.mkdir()
        flags = ["-np", "2", "--grace", "30", "--checkpoint", str(self.checkpoints)]
        words = ["--epochs", "1000000", "--stop", str(folder / "stop"), "--item-ms", "2"]
        super().__init__(flags, ELASTIC_JOB, words, self.records, folder / "output", program)

    def check_that_it_ended_in_good_order(self, folder: Path) -> None:
        assert self.wait(LONG_S) == 130, (folder / "output").read_text()
        check_that_the_last_step_was_saved(self.checkpoints, self.records)
        assert processes_with(str(folder)) == []


@pytest.mark.timeout(150)
def test_the_terminal_closes_and_the_job_saves_its_state_and_leaves_nothing(tmp_path: Path) -> None:
    records, checkpoints = tmp_path / "records", tmp_path / "checkpoints"
    records.mkdir()
    ours, theirs = pty.openpty()
    words = ["-np", "2", "--grace", "30", "--checkpoint", str(checkpoints), sys.executable, str(ELASTIC_JOB)]
    words += ["--epochs", "1000000", "--stop", str(tmp_path / "stop"), "--records", str(records)]
    with subprocess.Popen(
        [*FARANDOLE_RUN, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as launcher:
        os.close(theirs)
        with TerminalJob(records, launcher) as job:
            job.wait_until(all_training(2), LONG_S)
            os.close(ours)
            assert job.wait(LONG_S) == 130
    check_that_the_last_step_was_saved(checkpoints, records)
    assert processes_with(str(tmp_path)) == []


class TerminalJob(RunningJob):
    """One that was started already."""

    def __init__(self, records: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = records, process
        self._ended: dict[str, int] = {}


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGHUP, signal.SIGHUP],  # the kernel's and the shell's, for one terminal that closes
        [signal.SIGTERM, signal.SIGHUP],  # systemd with SendSIGHUP=
        [signal.SIGHUP, signal.SIGTERM],  # the terminal, then the machine
    ],
)
def test_a_hang_up_is_never_the_second_signal_that_ends_a_job_at_once(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    with CheckpointedJob(tmp_path) as job:
        job.wait_until(all_training(2), LONG_S)
        for each in signals:
            job.process.send_signal(each)
        job.check_that_it_ended_in_good_order(tmp_path)
    said = (tmp_path / "output").read_text()
    assert said.count("the workers are asked to end") == 1


def step_of(latest: dict[int, dict[str, Any]]) -> int:
    """Where rank 0 is: in a step, or behind it."""
    step: int = latest[0].get("after", latest[0].get("before"))
    return step


@pytest.mark.timeout(150)
def test_a_job_under_nohup_does_not_hear_of_it(tmp_path: Path) -> None:
    with CheckpointedJob(tmp_path, ("nohup", *FARANDOLE_RUN)) as job:
        before = step_of(job.wait_until(all_training(2), LONG_S))
        job.process.send_signal(signal.SIGHUP)
        job.wait_until(lambda latest: all_training(2)(latest) and step_of(latest) > before + 5, LONG_S)
        (tmp_path / "stop").touch()
        assert job.wait(LONG_S) == 0
    check_job(Proof(job.records), SAMPLES, workers_at_end=2)


@pytest.mark.timeout(150)
def test_the_terminal_of_an_agent_closes_and_its_workers_leave(tmp_path: Path) -> None:
    with JoinedJob(tmp_path, ["-np", "2", "--local-slots", "1"]) as job, job.agent() as agent:
        job.running.wait_until(all_training(2), LONG_S)
        for _ in range(2):
            agent.process.send_signal(signal.SIGHUP)
        assert agent.wait() == 0, agent.said()
        assert "this host left the job: host b is drained" in agent.said()
        job.running.wait_until(all_training(1), LONG_S)
        assert "regrouping for" not in job.said(), "a planned leave is no fault"
        assert job.stop() == 0, job.said()
    check_job(Proof(job.records), SAMPLES, workers_at_end=1)
