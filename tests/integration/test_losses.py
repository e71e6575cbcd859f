"""A loss that is no mean over samples is named at the start of a job, and in its last line if it has mattered."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

SCRIPT = str(SCRIPTS / "loss_job.py")
NO_MEAN = "the gradient of a batch is not the mean of those of its samples"


@pytest.mark.parametrize(("kind", "advice"), [("sum", 'loss="sum"'), ("classes", "fd.weight(n)")])
def test_a_loss_that_depends_on_the_number_of_workers_is_named(kind: str, advice: str) -> None:
    job = farandole_run("-np", "3", "--min-np", "2", "--restarts", "0", sys.executable, SCRIPT, kind)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = (job.stdout + job.stderr).splitlines()
    [warning] = [each for each in lines if NO_MEAN in each and advice in each]
    assert warning.startswith("[0]")
    assert NO_MEAN in lines[-1]


@pytest.mark.parametrize("kind", ["mean", "declared", "weighed"])
def test_a_loss_that_is_what_the_loop_says_is_not_and_costs_no_more_than_a_rehearsal(kind: str) -> None:
    job = farandole_run("-np", "3", sys.executable, SCRIPT, kind, "--undisturbed")
    assert job.returncode == 0, job.stdout + job.stderr
    assert NO_MEAN not in job.stdout + job.stderr
    assert job.stdout.count("BODIES 21") == 3, job.stdout


def test_without_a_loss_of_a_worker_the_last_line_has_no_remark() -> None:
    job = farandole_run("-np", "3", sys.executable, SCRIPT, "sum", "--undisturbed")
    lines = (job.stdout + job.stderr).splitlines()
    assert [each for each in lines if NO_MEAN in each]
    assert NO_MEAN not in lines[-1]
