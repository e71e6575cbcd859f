"""A job has the descriptors that it needs, to its last regroup, or is refused when it is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from farandole.job.agent.host_resources import descriptors_needed
from farandole.job.launch.joining import token_of_job
from farandole.testing.proof import Proof
from farandole.testing.running_job import FARANDOLE_RUN, RunningJob, all_training
from tests.support import jobs
from tests.support.jobs import ELASTIC_JOB, check_job
from tests.support.joined import AGENT

pytestmark = pytest.mark.long

SAMPLES, LONG_S = 600, 60.0
SETTLED_S = 5.0  # until the launcher has closed what it needed to end a lost worker and to start its replacement


def under(limit: str, program: tuple[str, ...]) -> tuple[str, ...]:
    """The program, with a limit as the shell's ulimit has it."""
    return ("bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *program)


class LimitedJob(RunningJob):
    """Trains until finish() is called."""

    def __init__(self, folder: Path, limit: str, *flags: str) -> None:
        self._stop, self._output = folder / "stop", folder / "output"
        super().__init__(flags, ELASTIC_JOB, endless(self._stop), folder, self._output, under(limit, FARANDOLE_RUN))

    def finish(self) -> None:
        self._stop.touch()
        assert self.wait(LONG_S) == 0, self._output.read_text()


def endless(stop: Path) -> list[str]:
    """To train until this file is there, slowly: a replacement that starts finds the cores free."""
    return ["--epochs", "1000000", "--stop", str(stop), "--item-ms", "2"]


def beyond(generation: int, size: int) -> Any:
    return lambda latest: all_training(size)(latest) and latest[0]["generation"] > generation


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def limits(pid: int) -> tuple[str, str]:
    (line,) = re.findall(r"Max open files +(\S+) +(\S+)", Path(f"/proc/{pid}/limits").read_text())
    return line


@pytest.mark.timeout(150)
def test_a_low_soft_limit_is_raised_for_launcher_and_workers(tmp_path: Path) -> None:
    with LimitedJob(tmp_path, "-Sn 32", "-np", "2", "--max-np", "9") as job:
        latest = job.wait_until(all_training(2), LONG_S)
        for pid in (job.process.pid, latest[0]["pid"], latest[1]["pid"]):
            assert limits(pid)[0] == str(descriptors_needed(9))
        job.finish()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_enough_for_the_start_is_enough_for_regroups_and_nothing_stays_open(
    tmp_path: Path, transport: str
) -> None:
    with LimitedJob(
        tmp_path, f"-n {descriptors_needed(3)}", "-np", "3", "--transport", transport, "--fork-server", "off"
    ) as job:
        latest = job.wait_until(all_training(3), LONG_S)
        pids = [job.process.pid, latest[0]["pid"], latest[1]["pid"]]
        for number in range(2):
            job.kill(latest[2]["pid"])
            job.forget(latest[2])
            latest = job.wait_until(beyond(latest[0]["generation"] + 1, 3), LONG_S)
            counts = [open_files(pid) for pid in pids]
            if not number:
                first = counts  # what the first regroup leaves open for good, such as the wish for a next one
            until = time.monotonic() + SETTLED_S
            while any(count > most for count, most in zip(counts, first, strict=True)):
                assert time.monotonic() < until, (counts, first)
                time.sleep(0.02)
                counts = [open_files(pid) for pid in pids]
        job.finish()
    check_job(Proof(tmp_path), SAMPLES, workers_at_end=3)


def test_a_worker_has_as_many_descriptors_among_four_workers_as_among_two(tmp_path: Path) -> None:
    stop, flags = tmp_path / "stop", ["-np", "4", "--restarts", "0"]
    with jobs.RunningJob(flags, ELASTIC_JOB, endless(stop), tmp_path, tmp_path / "output") as job:
        latest = job.wait_until(all_training(4), LONG_S)
        among_four = open_files(latest[0]["pid"])
        for left in (3, 2):
            job.kill(latest[left]["pid"])
            latest = job.wait_until(all_training(left), LONG_S)
        assert open_files(latest[0]["pid"]) == among_four
        stop.touch()
        assert job.wait(LONG_S) == 0, (tmp_path / "output").read_text()


def test_a_job_that_needs_more_than_the_hard_limit_is_refused_with_the_values() -> None:
    command = [*under("-n 200", FARANDOLE_RUN), "-np", "2", "--max-np", "50", sys.executable, "-c", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 2
    assert (
        f"a job of 50 workers needs {descriptors_needed(50)} open files in one process, and the hard limit is 200"
        in (done.stderr)
    )
    assert "LimitNOFILE=" in done.stderr
    assert "generation" not in done.stderr


def test_an_agent_that_offers_more_slots_than_its_hard_limit_allows_is_refused(tmp_path: Path) -> None:
    token_of_job(tmp_path / "token")
    words = ["--join", "127.0.0.1:1", "--slots", "50", "--token-file", str(tmp_path / "token"), "--retry", "0"]
    done = subprocess.run([*under("-n 200", AGENT), *words], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 2
    assert f"a job of 50 workers needs {descriptors_needed(50)} open files" in done.stderr
