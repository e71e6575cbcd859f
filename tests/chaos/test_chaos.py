"""Whole jobs under faults, some minutes of what `make chaos` does for hours.

Most are started by the job server, which spares their workers the imports. The worst day begins as users' jobs do.
"""

from __future__ import annotations

import dataclasses

import pytest

from farandole.testing.faults import parse
from farandole.testing.running_job import RunningJob
from tests.chaos.case import Case, case_of
from tests.chaos.disturbed_job import undisturbed_weights
from tests.chaos.run import run_one
from tests.support import jobs


def check(case: Case, kind: type[RunningJob] = jobs.RunningJob) -> None:
    print(case)
    assert run_one(case, None, kind).violations == []


def test_a_job_left_in_peace_trains_its_order_one_global_batch_after_the_other() -> None:
    assert undisturbed_weights(8)  # which checks it


BAD_DAY = "at step 30: segfault source; during regroup + 1 ms: abort any; at step 200: exit any; at step 250: raise any"
WORSE_DAY = (
    "at step 40: hold any; at last step of epoch 0 + 5 ms: kill all but one; at step 220: starve any; "
    "at step 300: stop any; after 0.4 s: continue the same"
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("body", "plan", "kind"),
    [
        ("", BAD_DAY, jobs.RunningJob),
        pytest.param("", WORSE_DAY, RunningJob, marks=pytest.mark.long),
        pytest.param("averages-before", BAD_DAY, jobs.RunningJob, marks=pytest.mark.long),
    ],
)
def test_a_job_of_three_survives_a_bad_day(body: str, plan: str, kind: type[RunningJob]) -> None:
    case = case_of(2)
    shape = dataclasses.replace(case.shape, workers=3, replaces=True)
    check(dataclasses.replace(case, body=body, shape=shape, width=8, plan=parse(plan)), kind)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [3])
def test_a_job_survives_what_its_seed_holds_for_it(seed: int) -> None:
    check(case_of(seed))
