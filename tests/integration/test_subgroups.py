"""Subgroups of torch.distributed whose members share memory, over real processes: a member is killed in one of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checks.running import explain, problems
from tests.scripts.process_group import CHECKS
from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = pytest.mark.core

AT_ONCE_S = 1.0
"""The limit for an error that comes within milliseconds, on a machine that is busy."""


def test_a_member_is_killed_in_an_all_reduce_and_the_others_have_the_error_at_once(tmp_path: Path) -> None:
    done = farandole_run(
        *("-np", "4", "--min-np", "1", "--restarts", "0"),
        *(sys.executable, str(SCRIPTS / "subgroup_loss_job.py"), str(tmp_path)),
        timeout_s=60,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]

    def of(event: str, size: int) -> list[dict[str, Any]]:
        found = [each for each in said if (each["event"], each["size"]) == (event, size)]
        return sorted(found, key=lambda each: each["rank"])

    raised = of("raised", 4)
    assert [each["rank"] for each in raised] == [1, 2]
    assert {each["what"] for each in raised} <= {"PeerLost", "GenerationEnded"}
    assert max(each["after_s"] for each in raised) < AT_ONCE_S, raised
    for size in (4, 3):
        assert [each["total"] for each in of("reduced", size)] == [[size - 1.0]] * (size - 1)
        assert all(each["is_in_memory"] for each in of("reduced", size))
    assert ["Create groups and device meshes again" in each["text"] for each in of("outdated", 3)] == [True] * 2
    before, after = ([each["held"] for each in of("entered", size)] for size in (4, 3))
    for descriptors, mappings in after:  # there is a rank less, and nothing is left of the group
        assert descriptors <= before[0][0], (before, after)
        assert mappings < before[0][1], (before, after)
    assert len(of("end", 3)) == 3


@pytest.mark.parametrize("check", [check for check in CHECKS if check.startswith("c10d_subgroups.")])
def test_of_three_among_four(check: str) -> None:
    found = problems(SCRIPTS / "process_group.py", 4, check)
    assert found.get(check) == [None] * 4, explain(found, check)
