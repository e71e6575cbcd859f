"""`farandole status`, `scale` and `drain`, asked of real jobs: what they ask for is done, and nothing is redone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, RunningJob, check_job, farandole

SAMPLES = 600


@pytest.fixture(autouse=True)
def _no_other_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of this test, and commands, meet in a folder of their own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def said(*words: str) -> str:
    """What a command says that does what it is asked for."""
    done = farandole(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(code: int, *words: str) -> str:
    done = farandole(*words)
    assert (done.returncode, done.stdout) == (code, "")
    return done.stderr


def endless(folder: Path, *flags: str) -> RunningJob:
    folder.mkdir(exist_ok=True)
    words = ["--epochs", "1000000", "--stop", str(folder / "stop"), "--item-ms", "0.3"]
    return RunningJob(flags, ELASTIC_JOB, words, folder, folder / "output")


def finish(running: RunningJob) -> None:
    (running.folder / "stop").touch()
    assert running.wait(60) == 0, (running.folder / "output").read_text()


def test_a_job_is_scaled_and_a_host_drained_and_no_step_is_redone(tmp_path: Path) -> None:
    with endless(tmp_path / "job", "-np", "2", "--max-np", "3", "-H", "localhost:2,127.0.0.1:1") as running:
        running.wait_until(all_training(2), 60)
        assert "0 workers are fewer than --min-np 1" in refusal(1, "scale", "0")
        assert "4 workers are more than --max-np 3" in refusal(1, "scale", "4")
        assert "its hosts: localhost and 127.0.0.1" in refusal(1, "drain", "elsewhere")
        assert "no job of this user runs here whose name begins with x" in refusal(2, "status", "--job", "x")
        assert "generation 2 has 3 workers" in said("scale", "3", "--wait", "--timeout", "50")
        running.wait_until(all_training(3), 60)
        status = json.loads(said("status", "--json"))
        assert [(each["rank"], each["host"], each["state"]) for each in status["members"]] == [
            (0, "localhost", "trains"),
            (1, "localhost", "trains"),
            (2, "127.0.0.1", "trains"),
        ]
        assert {each["pid"] for each in status["members"]} == {r["pid"] for r in running.latest().values()}
        assert "w0 and w1 will leave" in said("drain", "localhost", "--wait", "--timeout", "30")
        left = running.wait_until(all_training(1), 60)
        text = said("status")
        assert "localhost  2      0        drained" in text
        assert "host localhost is drained: requested by a user" in text
        assert re.search(r"\d\d:\d\d:\d\d  host localhost is drained: requested by a user", said("events"))
        undrained = json.loads(said("undrain", "localhost", "--json"))
        assert "may be used again" in undrained["what"]
        assert (undrained["job"], undrained["is_done"]) == (status["job"], None)
        back = running.wait_until(all_training(3), 60)
        assert back[0]["pid"] == left[0]["pid"]
        scaled = json.loads(said("scale", "2", "--wait", "--timeout", "30", "--json"))
        assert (scaled["is_done"], scaled["workers"]) == (True, 2)
        running.wait_until(all_training(2), 60)
        finish(running)
    proof = Proof(tmp_path / "job")
    check_job(proof, samples=SAMPLES, workers_at_end=2)
    assert {1, 2, 3} == set(proof.generations().values())
    assert proof.redone() == 0, (tmp_path / "job" / "output").read_text()
    assert "no job of this user runs here" in said("status")


def test_the_status_is_shown_again_and_again_also_by_the_next_coordinator_until_the_job_ends(tmp_path: Path) -> None:
    with endless(tmp_path / "job", "-np", "1") as running:
        running.wait_until(all_training(1), 60)
        command = [sys.executable, "-m", "farandole", "status", "--watch", "0.1", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            assert watching.stderr is not None
            first = json.loads(watching.stdout.readline())
            os.kill(first["coordinator_pid"], signal.SIGKILL)
            coordinators = (json.loads(line)["coordinator_pid"] for line in watching.stdout)
            assert next(pid for pid in coordinators if pid != first["coordinator_pid"])
            assert next(coordinators)
            following = subprocess.Popen([*command[:3], "events", "-f", "--json"], stdout=subprocess.PIPE, text=True)
            assert following.stdout is not None
            seen = [json.loads(following.stdout.readline())["event"]]
            finish(running)
            watching.stdout.read()  # to its end; a job may end within the 0.1 s
            assert (watching.stderr.read(), watching.wait(20)) == ("the job has ended\n", 0)
            seen += [json.loads(line)["event"] for line in following.stdout]
            following.stdout.close()
            assert (following.wait(20), seen[-1]) == (0, "JobEnds")


def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path) -> None:
    with endless(tmp_path / "job", "-np", "1") as running:
        running.wait_until(all_training(1), 60)
        done = subprocess.run(
            f"{sys.executable} -m farandole status --watch 0.1 | head -n 1", shell=True, capture_output=True, text=True
        )
        assert (done.stderr, done.stdout.count("\n")) == ("", 1)
        assert "must be at least 0.1 s, got 0" in refusal(2, "status", "--watch", "0")
        finish(running)


def test_with_several_jobs_it_has_to_be_said_which_one_by_name_or_by_address(tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    with (
        endless(tmp_path / "one", "-np", "1", "--token-file", str(token)) as one,
        endless(tmp_path / "two", "-np", "1") as two,
    ):
        one.wait_until(all_training(1), 60)
        two.wait_until(all_training(1), 60)
        jobs = json.loads(said("jobs", "--json"))
        assert {job["pid"] for job in jobs} == {one.process.pid, two.process.pid}
        assert not any("token" in job for job in jobs)
        text = refusal(2, "scale", "1")
        assert "2 jobs run here; select one with --job" in text
        assert all(job["job"] in text for job in jobs)
        for job in jobs:
            assert json.loads(said("status", "--json", "--job", job["job"][:8]))["job"] == job["job"]
        assert "--json shows one job, select it with --job" in refusal(1, "status", "--json")
        first = next(job for job in jobs if job["pid"] == one.process.pid)
        at = ("--address", first["coordinator"], "--token-file")
        assert json.loads(said("status", "--json", *at, str(token)))["job"] == first["job"]
        other.touch(0o600)
        other.write_text("0" * 64)
        assert "no job with this token" in refusal(1, "status", *at, str(other))
        two.process.send_signal(signal.SIGKILL)
        two.wait(20)
        assert [job["pid"] for job in json.loads(said("jobs", "--json"))] == [one.process.pid]
        finish(one)


def test_without_a_job_there_is_nothing_to_ask() -> None:
    assert said("status") == said("jobs") == "no job of this user runs here\n"
    assert "start one with: farandole run" in refusal(2, "scale", "2")
    assert "--token-file" in refusal(2, "status", "--address", "127.0.0.1:1")
