"""Real jobs whose scripts do less than was promised, or would do it twice: an error, or told, or right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

JOB = (sys.executable, str(SCRIPTS / "promises_job.py"))
TORCH_LOADER_JOB = (sys.executable, str(SCRIPTS / "torch_loader_job.py"))


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
    told = "27 of 40 steps were not applied; 3 of 4 epochs ended early or were not started"
    assert told in job.stderr
    assert job.stderr.splitlines()[-1] == (
        "[farandole] ended by the script after 13 of 40 steps. 2 workers finished the training."
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


@pytest.mark.parametrize("has_sampler", [True, False])
def test_a_loader_of_torchs_in_a_state_divides_the_data_by_its_elastic_sampler(has_sampler: bool) -> None:
    """Each worker keeps its own loader: rank 0's, on all of them, would have rank 0's sampler."""
    words = [*TORCH_LOADER_JOB, "--divided", *(["--has-sampler"] if has_sampler else [])]
    job = farandole_run("-np", "2", *words)
    assert job.returncode == 0, job.stderr
    lines = [line.split("trained") for line in job.stdout.splitlines() if "trained" in line]
    assert sorted(int(sample) for _, samples in lines for sample in samples.split()) == list(range(16))
    assert len({rank for rank, _ in lines}) == 2


def test_a_loader_of_torchs_that_divides_nothing_is_refused_where_it_would_be_taken_for_an_elastic_one() -> None:
    job = farandole_run("-np", "2", "--restarts", "0", *TORCH_LOADER_JOB)
    assert job.returncode != 0
    assert "trained" not in job.stdout
    for words in ("fd.elastic.DataLoader(dataset, global_batch_size=...)", "fd.elastic.ElasticSampler(dataset)"):
        assert words in job.stderr
