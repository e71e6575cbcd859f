"""Real jobs whose scripts do less than was promised, or would do it twice: an error, or told, or right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import SCRIPTS, farandole_run

JOB = (sys.executable, str(SCRIPTS / "promises_job.py"))


@pytest.mark.parametrize("loader", ["map", "stream"])
def test_an_epoch_loop_over_range_ends_the_job_with_what_to_write_instead(loader: str) -> None:
    job = farandole_run("-np", "2", *JOB, "range", "--loader", loader)
    assert job.returncode != 0
    assert "StepError: the loader was iterated again" in job.stderr
    assert "for epoch in loader.epochs(5)" in job.stderr
    assert "success" not in job.stderr


def test_an_epoch_loop_over_range_is_an_error_without_other_workers_too() -> None:
    alone = subprocess.run([*JOB, "range"], capture_output=True, text=True, timeout=60)
    assert alone.returncode != 0
    assert "for epoch in loader.epochs(5)" in alone.stderr


def test_steps_that_were_promised_and_not_made_are_told_at_the_end(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    job = farandole_run("-np", "2", "--events", str(events), *JOB, "break")
    assert job.returncode == 0, job.stderr
    told = "27 of 40 steps were not made; 3 of 4 epochs ended early or were not begun"
    assert told in job.stderr
    assert job.stderr.splitlines()[-1] == (
        "[farandole] ended with less training than was promised. 2 workers finished the training."
    )
    (event,) = [each for each in map(json.loads, events.read_text().splitlines()) if "CutShort" in each["event"]]
    assert (event["steps"], event["steps_left"], event["epochs"], event["epochs_left"]) == (40, 27, 4, 3)
    alone = subprocess.run([*JOB, "break"], capture_output=True, text=True, timeout=60)
    assert told in alone.stderr


def test_a_job_that_goes_on_from_its_own_checkpoint_does_nothing_a_second_time(tmp_path: Path) -> None:
    """It was saved behind the last batch of an epoch: the tail runs again, and what was given to once() does not."""
    for _ in range(2):
        job = farandole_run("-np", "2", *JOB, "save", "--folder", str(tmp_path))
        assert job.returncode == 0, job.stderr
    told = [tuple(json.loads(line)) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert [epoch for word, epoch in told if word == "once"] == [0, 1, 2, 3]
    assert [epoch for word, epoch in told if word == "tail"] == [0, 1, 1, 2, 3]
    assert "trained 20 steps, to epoch 4" in job.stdout
    assert job.stderr.splitlines()[-1].startswith("[farandole] success.")
