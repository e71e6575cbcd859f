"""A worker that could not hear that all have the gradients of a step takes it all the same, if another one has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run


def run(workers: int, *arguments: str) -> tuple[str, set[str]]:
    """Return the sums of the weights, and the slots whose workers have completed a step."""
    script = str(SCRIPTS / "missed_agreement.py")
    job = farandole_run("-np", str(workers), "--min-np", "1", "--restarts", "0", sys.executable, script, *arguments)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = [each.partition("] ")[2] for each in job.stdout.splitlines()]
    [weights] = [each for each in lines if each.startswith("WEIGHTS")]
    return weights, {each.split()[1] for each in lines if each.startswith("COMPLETES")}


@pytest.mark.parametrize(
    ("behind", "dies", "completes"),
    [
        ("0,1", "2", {"0", "1"}),
        pytest.param("1", "3", {"1"}, marks=pytest.mark.long),
        pytest.param("1,2,3", "0", set(), marks=pytest.mark.long),
    ],
)
def test_whoever_is_behind_completes_the_step_that_others_have_taken(
    tmp_path: Path, behind: str, dies: str, completes: set[str]
) -> None:
    expected, _ = run(1, "whole")
    weights, completed = run(4, behind, dies, str(3 - len(behind.split(","))), str(tmp_path))
    assert completed == completes
    assert weights == expected
