"""A whole job on hosts that are cut off, frozen and switched off, as `make chaos HOSTS=3` runs them for hours."""

from __future__ import annotations

import dataclasses

import pytest

from farandole.testing.faults import parse
from farandole.testing.lab import why_not
from farandole.testing.running_job import RunningJob
from tests.chaos.case import case_of
from tests.chaos.run import run_one

pytestmark = pytest.mark.long


@pytest.mark.alone
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.timeout(240)
def test_a_job_on_three_hosts_survives_a_bad_day() -> None:
    """Silences that are over within the detection budget end nobody, and one host is switched off and comes back."""
    plan = (
        "at step 30: cut host 0; after 0.4 s: heal host 0; at step 80: freeze host 1; after 0.4 s: thaw host 1; "
        "at step 150: power off host 2; after 3 s: boot host 2; at step 300: kill source"
    )
    case = case_of(1, hosts=3)
    shape = dataclasses.replace(case.shape, workers=3)
    job = dataclasses.replace(case, body="", shape=shape, num_workers=0, width=8, plan=parse(plan))
    assert run_one(job, None, RunningJob).violations == []  # its processes are on hosts of their own
