"""The sample ledger of real jobs, through the command line: proved, and caught when it was tampered with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, RunningJob, check_job, farandole, farandole_run

SAMPLES = 600


def ledger_check(*words: str) -> subprocess.CompletedProcess[str]:
    return farandole("ledger", "check", *words)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a job in which a worker was killed, and another one joined."""
    folder = tmp_path_factory.mktemp("job")
    flags, stop = ["-np", "3", "--sample-ledger", str(folder / "ledger")], folder / "stop"
    words = ["--epochs", "1000", "--stop", str(stop)]
    with RunningJob(flags, ELASTIC_JOB, words, folder, folder / "output") as running:
        latest = running.wait_until(_is_behind_the_rehearsal, 60)
        running.kill(latest[1]["pid"])
        generation = latest[0]["generation"]
        running.wait_until(lambda now: all_training(3)(now) and now[0]["generation"] > generation, 60)
        stop.touch()
        assert running.wait(60) == 0
    check_job(Proof(folder), samples=SAMPLES, workers_at_end=3)
    return folder


def _is_behind_the_rehearsal(latest: dict[int, dict[str, Any]]) -> bool:
    """A fault in the rehearsal makes a step that the script has begun once more, and the ledger has no rehearsals."""
    return all_training(3)(latest) and all(record.get("before", 0) > 2 for record in latest.values())


@pytest.mark.core
def test_the_ledger_of_a_job_with_a_kill_and_a_join_proves_exactly_once(disturbed: Path) -> None:
    checked = ledger_check(str(disturbed / "ledger"), "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = json.loads(checked.stdout)
    proof = Proof(disturbed)
    epochs = proof.epochs(SAMPLES).complete
    assert found["is_exact"]
    assert (found["steps"], found["redone"]) == (proof.steps(), proof.redone())
    assert found["workers"] == 4
    assert set(proof.generations()) <= set(range(1, found["generations"] + 1))
    assert [epoch["end"] - epoch["begin"] for epoch in found["epochs"]] == [SAMPLES] * epochs
    words = ledger_check(str(disturbed / "ledger"))
    assert f"{epochs} whole epoch{'s' * (epochs > 1)} of {SAMPLES} samples" in words.stdout
    assert words.stdout.endswith("exactly once: yes\n")


def test_a_ledger_that_was_tampered_with_is_caught(disturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(disturbed / "ledger", tmp_path / "ledger")
    path = max((tmp_path / "ledger").iterdir(), key=lambda file: file.stat().st_size)
    lines = path.read_text().splitlines(keepends=True)
    place = max(place for place, line in enumerate(lines) if line.startswith('["intent"'))
    record = json.loads(lines[place])
    lost, epoch = record[-1][0], record[5]
    record[-1][0] = (lost + 1) % SAMPLES
    lines[place] = json.dumps(record) + "\n"
    path.write_text("".join(lines))
    checked = ledger_check(str(tmp_path / "ledger"))
    assert checked.returncode == 1, checked.stdout
    assert f"epoch {epoch}: LOST: {lost} (1 in all)" in checked.stdout
    assert f"step {record[3]}:" in checked.stdout


def test_the_files_of_a_host_that_is_gone_are_made_up_for_by_the_agreed_hash(disturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(disturbed / "ledger", tmp_path / "ledger")
    next((tmp_path / "ledger").glob("w1-*")).unlink()
    checked = ledger_check(str(tmp_path / "ledger"))
    assert checked.returncode == 0, checked.stdout
    assert "of workers whose files are missing; their hash is correct" in checked.stdout


def test_a_folder_without_a_ledger_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        checked = ledger_check(str(folder))
        assert checked.returncode == 2
        assert str(folder) in checked.stderr
        assert checked.stdout == ""


def test_a_folder_with_another_jobs_ledger_is_refused_before_anything_starts(disturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in ((disturbed / "ledger", "earlier job"), (tmp_path / "file", "cannot be written to")):
        refused = farandole_run("-np", "1", "--sample-ledger", str(folder), sys.executable, "-c", "print('started')")
        assert refused.returncode == 2
        assert reason in refused.stderr
        assert "started" not in refused.stdout
