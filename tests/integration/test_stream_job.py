"""Whole jobs over streams with states of their own: real processes, real kills, loader workers, ledgers."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import SCRIPTS, RunningJob, farandole, farandole_run

SAMPLES, STREAM_JOB = 500, SCRIPTS / "stream_job.py"


@pytest.mark.parametrize("arguments", [(), ("--num-workers", "2", "--micro-batch-size", "2")], ids=["", "processes"])
def test_a_kill_and_a_join_lose_and_repeat_no_sample_of_a_stream_and_the_ledger_proves_it(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    killed, stop, ledger = tmp_path / "killed", tmp_path / "stop", tmp_path / "ledger"
    flags = ["-np", "3", "--sample-ledger", str(ledger)]
    words = ["--epochs", "1000", "--killed", str(killed), "--stop", str(stop), *arguments]
    with RunningJob(flags, STREAM_JOB, words, tmp_path, tmp_path / "out") as running:
        running.wait_until(
            lambda now: (
                all_training(3)(now) and now[0]["generation"] > 2 and "after" in now[0]
            ),  # not at an epoch's end
            60,
        )
        stop.touch()
        assert running.wait(60) == 0, (tmp_path / "out").read_text()
    assert killed.exists()
    proof = Proof(tmp_path)
    found = proof.epochs(SAMPLES)
    assert found.is_exact, found
    assert found.complete > 1
    sizes = [size for _, size in sorted(proof.generations().items())]
    assert (sizes[:2], sizes[-1]) == ([3, 2], 3)
    assert len({end["parameters"] for end in proof.ends()}) == 1
    checked = farandole("ledger", "check", str(ledger), "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    said = json.loads(checked.stdout)
    assert said["is_exact"]
    assert [epoch["end"] for epoch in said["epochs"]] == [SAMPLES] * found.complete
    # The ledger counts attempts whose samples were computed by some worker; the killed one had only begun its own.
    assert said["redone"] in (proof.redone(), proof.redone() - 1)


def test_a_job_that_is_ended_goes_on_from_its_checkpoint_in_the_middle_of_its_streams(tmp_path: Path) -> None:
    records, saved = tmp_path / "records", tmp_path / "saved"
    records.mkdir()
    flags = ["--checkpoint", str(saved), "--checkpoint-every", "10steps"]
    arguments = ["--epochs", "4", "--num-workers", "2"]
    with RunningJob(["-np", "2", *flags], STREAM_JOB, arguments, records, tmp_path / "out") as running:
        running.wait_until(lambda latest: len(latest) == 2 and latest[0].get("after", 0) >= 60, 60)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(20) == 130, (tmp_path / "out").read_text()
    with RunningJob(["-np", "1", *flags], STREAM_JOB, arguments, records, tmp_path / "out") as running:
        assert running.wait(60) == 0, (tmp_path / "out").read_text()
    proof = Proof(records)
    found = proof.epochs(SAMPLES)
    assert found.is_exact, found
    assert found.complete == 4
    assert {end["end"] for end in proof.ends()} == {proof.steps()}


def test_an_error_in_a_loader_worker_is_shown_where_it_was_raised(tmp_path: Path) -> None:
    words = ["-np", "2", "--restarts", "0", sys.executable, str(STREAM_JOB), "--damaged", "100", "--num-workers", "1"]
    done = farandole_run(*words)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "sample 100 is damaged" in said
    assert "in __next__" in said
