"""Whole jobs under faults, some minutes of what `make chaos` does for hours.

Most are started by the job server, which spares their workers the imports. The worst day begins as users' jobs do.
"""

from __future__ import annotations

import dataclasses

import pytest

from farandole.testing.faults import parse
from farandole.testing.lab import why_not
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
    [("", BAD_DAY, jobs.RunningJob), ("", WORSE_DAY, RunningJob), ("averages-before", BAD_DAY, jobs.RunningJob)],
)
def test_a_job_of_three_survives_a_bad_day(body: str, plan: str, kind: type[RunningJob]) -> None:
    case = case_of(2)
    shape = dataclasses.replace(case.shape, workers=3, replaces=True)
    check(dataclasses.replace(case, body=body, shape=shape, width=8, plan=parse(plan)), kind)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [3, 4])
def test_a_job_survives_what_its_seed_holds_for_it(seed: int) -> None:
    check(case_of(seed))


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
    check(job, RunningJob)  # its processes are on hosts of their own
