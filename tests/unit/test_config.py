"""What a job's configuration says of itself."""

from __future__ import annotations

import pytest

from farandole.base.config import JobConfig


@pytest.mark.parametrize(
    ("config", "may_change"),
    [
        (JobConfig(2), True),
        (JobConfig(2, min_np=2), True),  # who is lost is replaced
        (JobConfig(2, min_np=2, restarts=0), False),
        (JobConfig(2, min_np=2, max_np=2, restarts=0), False),
        (JobConfig(2, min_np=1, max_np=2, restarts=0), True),
        (JobConfig(2, min_np=2, max_np=3, restarts=0), True),
        (JobConfig(2, min_np=2, max_np=2, restarts=0, fills_slots=True), True),
    ],
)
def test_a_job_may_change_unless_all_that_is_asked_for_is_one_size(config: JobConfig, may_change: bool) -> None:
    assert config.may_change is may_change
