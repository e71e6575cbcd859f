"""Whole jobs with another order, a carried tail and evaluations: the same result, whoever dies."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = pytest.mark.long

EPOCHS, EVALUATED = 4, 41
MEAN = (EVALUATED - 1) / 2


def ends(folder: Path, workers: int, *arguments: str) -> set[str]:
    """What the workers say at their end; checks the evaluations."""
    done = farandole_run(
        "-np", str(workers), sys.executable, str(SCRIPTS / "orders_job.py"), "--records", str(folder), *arguments
    )
    assert done.returncode == 0, done.stdout + done.stderr
    evaluations = re.findall(r"epoch (\d+) mean ([\d.]+)", done.stdout)
    # At least once: again after a regroup in the tail of an epoch.
    assert {int(epoch) for epoch, _ in evaluations} == set(range(EPOCHS))
    assert {float(mean) for _, mean in evaluations} == {MEAN}
    return set(re.findall(r"end (.*)", done.stdout))


def test_two_deaths_change_neither_the_model_nor_the_evaluation(tmp_path: Path) -> None:
    (alone,) = ends(tmp_path, 1)
    steps, epoch, cursor, *model = alone.split()
    # 4 epochs of 130 samples are 43 global batches of 12, and 4 samples; these are filled up from a fifth epoch.
    assert (steps, epoch, cursor) == ("44", "4", "8")
    said = ends(tmp_path, 3, "--exits")
    assert {flag.name for flag in tmp_path.iterdir()} == {"has-exited-in-training", "has-exited-in-evaluation"}
    assert len(said) == 1
    disturbed = said.pop().split()
    assert disturbed[:3] == [steps, epoch, cursor]
    assert [float(each) for each in disturbed[3:]] == pytest.approx([float(each) for each in model], abs=1e-10)
