"""The numbers of a job whose rank 0 is killed three times, and leaves once, are those of the undisturbed job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.tracked_job import STEPS
from tests.support.tracked_jobs import check_curves, curves_of, run_recipe, undisturbed

pytestmark = pytest.mark.long


@pytest.mark.timeout(300)
def test_each_step_is_in_the_file_once_and_the_bar_shows_all_of_them(tmp_path: Path) -> None:
    """Rank 0 ends before and behind its log(), at a boundary, and in the last step. Another process shows a bar."""
    (tmp_path / "job").mkdir()
    output = run_recipe("tqdm", tmp_path / "job")
    expected = undisturbed(tmp_path / "alone")
    check_curves(curves_of(tmp_path / "job" / "metrics.csv"), expected)
    shown = (tmp_path / "job" / "metrics.csv").read_text().splitlines()
    assert len(shown) == 1 + sum(map(len, expected.values()))  # also where the reader would have dropped a line
    assert f"{STEPS}/{STEPS}" in output
