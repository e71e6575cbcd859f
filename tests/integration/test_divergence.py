"""Workers whose states are made to differ: they find it, name it and mend it, or end the job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.training.ledger.proving import Folder, prove
from farandole.training.state.state_digest import STRIKES
from tests.support.jobs import SCRIPTS, farandole_run

JOB = str(SCRIPTS / "divergence_job.py")


class Ended:
    """A job that was run to its end, with a ledger, and what it said."""

    def __init__(self, folder: Path, *words: str, run_words: tuple[str, ...] = ()) -> None:
        events, self.ledger = folder / "events.jsonl", folder / "ledger"
        said = ("--events", str(events), "--sample-ledger", str(self.ledger))
        self.process: subprocess.CompletedProcess[str] = farandole_run(
            "-np", "3", *said, *run_words, sys.executable, JOB, *words, timeout_s=240
        )
        self.output = self.process.stdout + self.process.stderr
        self.events: list[dict[str, Any]] = [json.loads(line) for line in events.read_text().splitlines()]

    @property
    def found(self) -> list[tuple[Any, ...]]:
        said = [each for each in self.events if each["event"] == "StatesDiverged"]
        return [(each["step"], each["name"], each["workers"], each["source"], each["is_fatal"]) for each in said]

    @property
    def ends(self) -> set[str]:
        return set(re.findall(r"END .*", self.output))


def test_what_differs_is_found_named_and_mended_and_the_ledger_says_so(tmp_path: Path) -> None:
    job = Ended(tmp_path, "--changes", "21:1:ema", "41:0:weight", "61:2:buffer", "--epochs", "4")
    assert job.process.returncode == 0, job.output
    assert [each[1:] for each in job.found] == [
        ("ema.body.0.weight", ["w1"], "w0", False),
        ("model.body.2.weight", ["w0"], "w1", False),
        ("model.table", ["w2"], "w0", False),
    ]
    assert len(job.ends) == 1, "all workers have the same state in the end"
    problems = prove(Folder(job.ledger)).problems
    assert len(problems) == 2, "a buffer is a remark"
    assert "that model.body.2.weight" in problems[1]
    assert "of w0 differed from w1's" in problems[1]


def test_a_momentum_under_ddp_is_found_by_what_it_did_to_the_weight_or_by_itself(tmp_path: Path) -> None:
    job = Ended(tmp_path, "--changes", "25:1:momentum", "--ddp")
    assert job.process.returncode == 0, job.output
    ((_, name, workers, source, _),) = job.found
    assert name in ("model.module.body.2.weight", "optimizer.4.exp_avg")
    assert (workers, source) == (["w1"], "w0")
    assert len(job.ends) == 1


def test_the_job_ends_if_told_so(tmp_path: Path) -> None:
    job = Ended(tmp_path, "--changes", "25:1:weight", "--on-divergence", "fail")
    assert job.process.returncode == 1
    ((step, name, workers, source, is_fatal),) = job.found
    assert (name, workers, source, is_fatal) == ("model.body.2.weight", ["w1"], "w0", True)
    assert f"StateDiverged: at step {step} model.body.2.weight" in job.output
    assert 'on_divergence="fail"' in job.output


def test_a_buffer_that_each_worker_computes_is_named_once_and_then_left_alone(tmp_path: Path) -> None:
    job = Ended(tmp_path, "--local-buffer", "--epochs", "3")
    assert job.process.returncode == 0, job.output
    assert [each[1:3] for each in job.found] == [("model.last", ["w1", "w2"])] * STRIKES
    assert len(re.findall(r"model.last differs between workers after every step", job.output)) == 3, "one each"
    assert prove(Folder(job.ledger)).is_exact


def test_a_change_right_before_a_loss_is_found_by_the_regroup(tmp_path: Path) -> None:
    job = Ended(tmp_path, "--changes", "22:1:weight", "--kill-at", "22")
    assert job.process.returncode == 0, job.output
    assert job.found == [(22, "model.body.2.weight", ["w1"], "w0", False)]
    assert len(job.ends) == 1


def test_a_change_in_the_last_step_of_an_epoch_is_found_at_its_end(tmp_path: Path) -> None:
    job = Ended(tmp_path, "--changes", "39:1:weight", "40:2:weight")
    assert job.process.returncode == 0, job.output
    assert [each[:3] for each in job.found] == [(40, "model.body.2.weight", ["w1", "w2"])]
    assert len(job.ends) == 1


@pytest.mark.parametrize("changed", [True, False])
def test_no_checkpoint_of_states_that_differ_is_published(tmp_path: Path, changed: bool) -> None:
    """The state is changed in the step before the checkpoint is due, and found a step after it was begun."""
    folder = tmp_path / "checkpoints"
    changes = ("--changes", "30:0:weight") if changed else ()
    job = Ended(tmp_path, *changes, run_words=("--checkpoint", str(folder), "--checkpoint-every", "30steps"))
    assert job.process.returncode == 0, job.output
    failed = [each for each in job.events if each["event"] == "CheckpointFailed"]
    saved = [each["step"] for each in job.events if each["event"] == "CheckpointSaved"]
    manifests = [json.loads(path.read_text()) for path in folder.glob("*/manifest.json")]
    assert all(re.fullmatch("[0-9a-f]{16}", each["digest"]) for each in manifests)
    if not changed:
        assert (failed, saved[0]) == ([], 30)
        return
    assert [each["step"] for each in failed] == [30]
    assert "the states of the workers differ" in failed[0]["reason"]
    assert 30 < saved[0] < 40, "the next checkpoint is written when they are equal"
