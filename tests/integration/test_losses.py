"""A loss that is no mean over samples is named at the start of a job, and in its last line if it has mattered; so are
values that each worker of a loop has of its own samples."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

SCRIPT = str(SCRIPTS / "loss_job.py")
NO_MEAN = "the gradient of a batch is not the mean of those of its samples"
OWN_VALUES = "which each worker has of its own samples"


@pytest.mark.parametrize(("kind", "advice"), [("sum", 'loss="sum"'), ("classes", "fd.weight(n)")])
def test_a_loss_that_depends_on_the_number_of_workers_is_named(kind: str, advice: str) -> None:
    job = farandole_run("-np", "3", "--min-np", "2", "--restarts", "0", sys.executable, SCRIPT, kind)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = (job.stdout + job.stderr).splitlines()
    [warning] = [each for each in lines if NO_MEAN in each and advice in each]
    assert warning.startswith("[0]")
    assert NO_MEAN in lines[-1]


@pytest.mark.parametrize("kind", ["mean", "declared", "weighed"])
def test_a_loss_that_is_what_the_loop_says_is_not_and_costs_few_bodies(kind: str) -> None:
    """One at the start, two in step 13, two in the second epoch."""
    job = farandole_run("-np", "3", sys.executable, SCRIPT, kind, "--undisturbed")
    assert job.returncode == 0, job.stdout + job.stderr
    assert NO_MEAN not in job.stdout + job.stderr
    assert job.stdout.count("BODIES 25") == 3, job.stdout


def test_without_a_loss_of_a_worker_the_last_line_has_no_remark() -> None:
    job = farandole_run("-np", "3", sys.executable, SCRIPT, "sum", "--undisturbed")
    lines = (job.stdout + job.stderr).splitlines()
    assert [each for each in lines if NO_MEAN in each]
    assert NO_MEAN not in lines[-1]


@pytest.mark.parametrize("kind", ["centers", "bank", "hidden"])
def test_values_of_which_each_worker_has_its_own_are_named(kind: str) -> None:
    job = farandole_run("-np", "3", "--min-np", "2", "--restarts", "0", sys.executable, SCRIPT, kind)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = (job.stdout + job.stderr).splitlines()
    [warning] = [each for each in lines if OWN_VALUES in each and "compute them from the samples of all" in each]
    assert warning.startswith("[0]")
    assert OWN_VALUES in lines[-1]
    assert f"as {kind}" in lines[-1] or kind == "hidden"  # it is another tensor in each body
    assert NO_MEAN not in lines[-1]


@pytest.mark.parametrize("kind", ["noise", "average"])
def test_random_numbers_of_each_worker_and_an_average_of_the_weights_are_no_such_values(kind: str) -> None:
    job = farandole_run("-np", "3", "--min-np", "2", "--restarts", "0", sys.executable, SCRIPT, kind)
    assert job.returncode == 0, job.stdout + job.stderr
    assert OWN_VALUES not in job.stdout + job.stderr


def test_workers_of_which_only_one_has_compiled_something_agree_not_to_try() -> None:
    """The others wait for the newcomer, which has compiled nothing either."""
    job = farandole_run("-np", "3", "--min-np", "3", sys.executable, SCRIPT, "compiled")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "1 joined" in job.stderr


def test_an_average_of_the_weights_is_that_of_each_step_once() -> None:
    """Its first step copies them: in the rehearsal it changes nothing."""
    alone, others = (
        farandole_run("-np", workers, "--min-np", "1", sys.executable, SCRIPT, "average").stdout
        for workers in ("1", "3")
    )
    [average] = [line for line in alone.splitlines() if "AVERAGE" in line]
    assert average.partition("AVERAGE")[2] in others
