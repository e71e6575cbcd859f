"""Workers that come no further: found by what they say in shared memory, stopped, and their stacks are shown."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from tests.support.jobs import SCRIPTS, RunningJob, farandole, farandole_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages for workers are made with Linux's memfd")

HURT_JOB = str(SCRIPTS / "hurt_job.py")


def hurt(*acts: str) -> list[str]:
    return [sys.executable, HURT_JOB, *(word for act in acts for word in ("--at", act))]


def test_those_that_hang_are_stopped_and_those_that_are_slow_are_not(tmp_path: Path) -> None:
    """One keeps the interpreter's lock, one waits for a lock for ever, one takes its time, twice, and calls a
    collective that the others do not call."""
    events, records = tmp_path / "events", tmp_path / "records"
    records.mkdir()
    acts = ("1:3:spin", "2:5:lock", "0:9:pause", "0:11:pause", "0:14:alone")
    flags = ("-np", "4", "--restarts", "0", "--step-timeout", "2", "--events", str(events))
    done = farandole_run(*flags, *hurt(*acts), "--records", str(records))
    assert done.returncode == 0, done.stderr
    proof = Proof(records)
    assert proof.epochs(240).is_exact
    assert [end["end"] for end in proof.ends()] == [20, 20]
    told = [json.loads(line) for line in events.read_text().splitlines()]
    stacks = {each["worker"]: each["stacks"] for each in told if each["event"] == "WorkerStacks"}
    assert stacks.keys() == {"w1", "w2"}
    assert "in spin_with_the_interpreter_locked" in stacks["w1"]
    assert "in wait_for_a_lock" in stacks["w2"]
    assert "in _listen" in stacks["w2"], "of all threads"
    assert "in wait_for_a_lock" in done.stderr
    assert [each["workers"] for each in told if each["event"] == "WorkersHung"] == [["w1"], ["w2"]]
    assert [each["worker"] for each in told if each["event"] == "WorkerLost"] == ["w1", "w2"]
    assert [each["step"] for each in told if each["event"] == "CollectiveStalled"] == [14]


def test_the_stacks_of_a_worker_that_hangs_are_shown_as_often_as_one_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits for a lock for ever, and rank 0 for rank 1; no --step-timeout ends that."""
    runtime, records = tmp_path / "runtime", tmp_path / "records"
    runtime.mkdir(mode=0o700)
    records.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))  # commands find this job alone
    flags = ("-np", "2", "--grace", "0.5")
    with RunningJob(flags, Path(HURT_JOB), ["--at", "1:3:lock"], records, tmp_path / "output") as job:
        deadline_s = time.monotonic() + 60
        while "in wait_for_a_lock" not in (done := farandole("stacks", "1")).stdout:
            assert time.monotonic() < deadline_s, (done.stdout, done.stderr)
        for _ in range(2):
            done = farandole("stacks", "1")
            assert (done.returncode, done.stderr, done.stdout.count("in wait_for_a_lock")) == (0, "", 1)
            assert done.stdout.splitlines()[0].startswith("w1 (rank 1, pid ")
            assert done.stdout.splitlines()[1] == "The main thread (most recent call first):"
            assert "in _listen" in done.stdout, "of all threads"
        done = farandole("stacks", "--all", "--json")
        of_0, of_1 = json.loads(done.stdout)
        assert (of_0["rank"], of_1["rank"], of_1["problem"]) == (0, 1, "")
        assert "wait_for_a_lock" not in of_0["stacks"]
        assert "in train" in of_0["stacks"]
        done = farandole("stacks", "2")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == ("farandole stacks: the job has no rank 2; it has ranks 0 to 1, and the workers w0, w1\n")
        job.process.send_signal(signal.SIGINT)
        job.wait(60)
    assert "WorkerStacks" not in (tmp_path / "output").read_text()
    assert "in wait_for_a_lock" not in (tmp_path / "output").read_text(), "they were for the one who asked"


def test_when_all_are_in_their_own_code_the_job_ends_and_says_where() -> None:
    flags = ("-np", "2", "--step-timeout", "1", "--grace", "0.5")
    done = farandole_run(*flags, *hurt("0:3:sleep", "1:3:lock"))
    assert done.returncode == 1
    assert "w0 and w1 are in their own code. If a step may take that long, increase --step-timeout." in done.stderr
    assert "the threads of w0 when it was stopped:" in done.stderr
    assert "in wait_for_a_lock" in done.stderr
