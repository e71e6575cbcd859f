"""Whole jobs: real processes, real kills, and the records of every worker."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.testing import running_job
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, SCRIPTS, RunningJob, check_job, processes_with

SAMPLES = 600


def fresh_job(folder: Path, flags: list[str], *arguments: str) -> running_job.RunningJob:
    """Of processes that can be told by their command lines."""
    return running_job.RunningJob(flags, ELASTIC_JOB, arguments, folder, folder / "output")


def job(folder: Path, flags: list[str], *arguments: str) -> RunningJob:
    return RunningJob(flags, ELASTIC_JOB, arguments, folder, folder / "output")


class EndlessJob(RunningJob):
    """Trains until finish() is called, however long it takes until what a test waits for has happened."""

    def __init__(self, folder: Path, flags: list[str], *arguments: str) -> None:
        self._stop = folder / "stop"
        words = ["--epochs", "1000000", "--stop", str(self._stop), *arguments]
        super().__init__(flags, ELASTIC_JOB, words, folder, folder / "output")

    def finish(self) -> None:
        self._stop.touch()
        assert self.wait(60) == 0, (self.folder / "output").read_text()


def beyond(generation: int, size: int) -> Any:
    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return all_training(size)(latest) and latest[0]["generation"] > generation

    return condition


@pytest.mark.core
def test_a_quiet_job_trains_every_sample_once_with_one_generation(tmp_path: Path) -> None:
    with fresh_job(tmp_path, ["-np", "3"]) as running:
        assert running.wait(60) == 0
    proof = Proof(tmp_path)
    check_job(proof, epochs=3, samples=SAMPLES, workers_at_end=3)
    assert proof.generations() == {1: 3}
    assert proof.redone() == 0


@pytest.mark.core
@pytest.mark.parametrize("extra", [["--num-workers", "0"], ["--num-workers", "2"], ["--mean-each-step"]])
def test_survivors_of_a_kill_go_on_in_the_same_processes_and_the_replacement_joins(
    tmp_path: Path, extra: list[str]
) -> None:
    with EndlessJob(tmp_path, ["-np", "3"], *extra) as running:
        latest = running.wait_until(all_training(3), 60)
        victim, generation = latest[1]["pid"], latest[1]["generation"]
        at_ns = running.kill(victim)
        survivors = {record["pid"] for record in latest.values()} - {victim}
        running.wait_until(beyond(generation, 3), 60)
        running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=3)
    first = proof.first_steps(generation + 1, survivors)
    assert set(first) == survivors
    assert all(ns > at_ns for ns in first.values())
    assert survivors <= {end["pid"] for end in proof.ends()}
    assert proof.redone() <= 1


@pytest.mark.core
def test_rank_0_may_die_like_any_other(tmp_path: Path) -> None:
    with EndlessJob(tmp_path, ["-np", "2"]) as running:
        latest = running.wait_until(all_training(2), 60)
        running.kill(latest[0]["pid"])
        running.wait_until(beyond(latest[0]["generation"], 2), 60)
        running.finish()
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=2)


def test_a_mean_in_which_a_worker_is_lost_is_the_same_on_a_worker_that_has_joined(tmp_path: Path) -> None:
    """All survivors complete the call that they are in, however long each of them has been in the job."""
    dies, stop, output = tmp_path / "dies", tmp_path / "stop", tmp_path / "output"
    words = ["--dies", str(dies), "--stop", str(stop)]
    with RunningJob(["-np", "3"], SCRIPTS / "interrupted_mean_job.py", words, tmp_path, output) as running:
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[2]["pid"])
        latest = running.wait_until(beyond(latest[0]["generation"], 3), 60)
        before = latest[0]["generation"]
        dies.write_text(str(latest[1]["pid"]))
        running.wait_until(beyond(before, 3), 60)
        stop.touch()
        assert running.wait(60) == 0, output.read_text()
    means: dict[str, dict[str, str]] = {}  # by step and process
    for pid, step, mean in re.findall(r"process (\d+) step (\d+) mean (\S+)", output.read_text()):
        means.setdefault(step, {})[pid] = mean
    stayed = {str(end["pid"]) for end in Proof(tmp_path).ends()}  # one that was lost may have had a result of its own
    unequal = {
        step: by_pid for step, by_pid in means.items() if len({by_pid[pid] for pid in stayed & by_pid.keys()}) > 1
    }
    assert len(means) > 20
    assert unequal == {}


def test_all_but_one_may_die_at_once(tmp_path: Path) -> None:
    with EndlessJob(tmp_path, ["-np", "3"]) as running:
        latest = running.wait_until(all_training(3), 60)
        for rank in (0, 1):
            running.kill(latest[rank]["pid"])
        running.wait_until(beyond(latest[0]["generation"], 3), 60)
        running.finish()
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=3)


def test_a_job_without_replacements_goes_on_with_fewer(tmp_path: Path) -> None:
    with EndlessJob(tmp_path, ["-np", "3", "--restarts", "0"]) as running:
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[2]["pid"])
        running.wait_until(all_training(2), 60)
        running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=2)
    assert set(proof.generations().values()) == {3, 2}


@pytest.mark.core
def test_sigterm_at_a_worker_lets_it_leave_and_redoes_nothing(tmp_path: Path) -> None:
    with EndlessJob(tmp_path, ["-np", "3"]) as running:
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[1]["pid"], signal.SIGTERM)
        running.wait_until(all_training(2), 60)
        running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=2)
    assert proof.redone() == 0


def test_below_min_np_the_job_waits_and_then_fails_saying_why(tmp_path: Path) -> None:
    flags = ["-np", "2", "--min-np", "2", "--restarts", "0", "--elastic-timeout", "1"]
    with job(tmp_path, flags, "--epochs", "1000") as running:
        latest = running.wait_until(all_training(2), 60)
        running.kill(latest[1]["pid"])
        assert running.wait(30) == 1
    said = (tmp_path / "output").read_text()
    assert "--min-np" in said
    assert "--elastic-timeout" in said or "waited" in said


def test_a_worker_that_aborts_is_lost_like_any_other(tmp_path: Path) -> None:
    with EndlessJob(tmp_path, ["-np", "2"]) as running:
        latest = running.wait_until(all_training(2), 60)
        running.kill(latest[1]["pid"], signal.SIGABRT)
        running.wait_until(beyond(latest[0]["generation"], 2), 60)
        running.finish()
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=2)


def test_the_source_killed_in_the_middle_of_a_sync_leaves_the_others_right(tmp_path: Path) -> None:
    """A newcomer copies 200 MB from rank 0, which is killed meanwhile: one more generation, nothing torn."""
    with EndlessJob(tmp_path, ["-np", "3"], "--frozen-mb", "200") as running:
        latest = running.wait_until(all_training(3), 60)
        source = latest[0]["pid"]
        running.kill(latest[2]["pid"])
        # That of the newcomer: the third, or the second where the others take long to regroup.
        copying = int(wait_for_line(tmp_path / "output", r"generation (\d+) starts .*\bw3\b")[1])
        running.kill(source)
        running.wait_until(beyond(copying, 3), 60)
        running.finish()
    said = (tmp_path / "output").read_text()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=3)
    assert copying not in proof.generations(), f"the sync was over before the kill:\n{said}"


def test_an_exception_on_one_worker_is_shown_once_and_the_others_go_on(tmp_path: Path) -> None:
    with EndlessJob(tmp_path, ["-np", "3"], "--raise-once", str(tmp_path / "raised")) as running:
        running.wait_until(beyond(1, 3), 60)
        running.finish()
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=3)
    said = (tmp_path / "output").read_text()
    assert said.count("Traceback (most recent call last)") == 1
    assert "ArithmeticError: only once, only here" in said


def test_a_worker_that_exits_with_code_0_in_the_middle_is_lost_like_any_other(tmp_path: Path) -> None:
    """An exit is never a message: a wild os._exit(0) in some library may have caused it."""
    with EndlessJob(tmp_path, ["-np", "2"], "--exit-once", str(tmp_path / "exited")) as running:
        running.wait_until(beyond(2, 2), 60)
        running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=2)
    assert len(proof.generations()) == 3


@pytest.fixture
def temp_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The temp folder of the job, empty at the start; its path is short enough for sockets in it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # kept on purpose, by torch
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def wait_until_none_is_abandoned(before: set[str]) -> None:
    """No new file is left whose maker is gone: those of the tests that run beside come and go."""

    def abandoned() -> set[str]:
        new = shared_memory_files() - before
        return {name for name in new if not Path("/proc", name.split("_")[1]).exists()}

    wait_until(lambda: not abandoned(), "files in /dev/shm whose makers are gone", 20)


def test_killed_workers_leave_no_files_behind(tmp_path: Path, temp_folder: Path) -> None:
    before = shared_memory_files()
    large = ["--samples", "3000", "--global-batch-size", "1500"]  # small tensors come without a file
    with EndlessJob(tmp_path, ["-np", "2"], "--num-workers", "2", *large) as running:
        latest = running.wait_until(all_training(2), 60)
        for _ in range(2):
            running.kill(latest[1]["pid"])
            latest = running.wait_until(beyond(latest[0]["generation"], 2), 60)
        assert list(temp_folder.glob("*/listener-*")), "loader workers pass tensors through the job's own folder"
        running.finish()
    assert list(temp_folder.iterdir()) == []
    wait_until_none_is_abandoned(before)


def test_kill_9_of_the_launcher_leaves_nothing_behind(tmp_path: Path, temp_folder: Path) -> None:
    before = shared_memory_files()
    with fresh_job(tmp_path, ["-np", "2"], "--epochs", "1000", "--num-workers", "2") as running:
        running.wait_until(all_training(2), 60)
        assert len(processes_with(str(tmp_path))) >= 3
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(10)
        wait_until_gone(str(tmp_path))
    wait_until(lambda: not list(temp_folder.iterdir()), f"left behind in {temp_folder}")
    wait_until_none_is_abandoned(before)


def test_ctrl_c_ends_the_job_and_leaves_nothing_behind(tmp_path: Path, temp_folder: Path) -> None:
    before = shared_memory_files()
    with fresh_job(tmp_path, ["-np", "2"], "--epochs", "1000", "--num-workers", "2") as running:
        running.wait_until(all_training(2), 60)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
        wait_until_gone(str(tmp_path))
    assert "Traceback" not in (tmp_path / "output").read_text()
    assert list(temp_folder.iterdir()) == []
    wait_until_none_is_abandoned(before)


def wait_for_line(path: Path, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
    deadline = time.monotonic() + timeout_s
    while (found := re.search(pattern, path.read_text())) is None:
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)
    return found


def wait_until_gone(needle: str) -> None:
    wait_until(lambda: not processes_with(needle), f"processes with {needle} were left behind")


def wait_until(condition: Callable[[], bool], failure: str, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, failure
