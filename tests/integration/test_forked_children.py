"""A script may fork children of its own: they are no workers, however they end."""

from __future__ import annotations

import sys

from tests.support.jobs import SCRIPTS, farandole_run, run_alone

SCRIPT = SCRIPTS / "forked_children.py"


def test_children_of_a_worker_end_and_the_job_goes_on() -> None:
    result = farandole_run("-np", "2", sys.executable, str(SCRIPT))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("trained 8") == 2
    assert "0 workers lost" in result.stdout + result.stderr


def test_children_of_a_script_without_a_launcher_end() -> None:
    result = run_alone(SCRIPT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trained 8" in result.stdout
