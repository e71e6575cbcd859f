"""A newcomer that lacks what a loop has outside its TorchState is found out by its first loop body."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

SAID = "a newcomer does not train as the other workers do: with equal samples, the gradient of "


@pytest.mark.parametrize(("how", "is_named"), [("outside", True), ("inside", False), ("fault", True)])
def test_what_a_newcomer_lacks_is_in_the_last_line_also_where_its_trial_is_cut(how: str, is_named: bool) -> None:
    restarts = ("--restarts", "1", "--min-np", "2")
    done = farandole_run("-np", "3", *restarts, sys.executable, str(SCRIPTS / "untracked_job.py"), how, timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert "1 joined" in done.stderr or "2 joined" in done.stderr, done.stderr
    assert (SAID in done.stderr.splitlines()[-1]) is is_named, done.stderr
