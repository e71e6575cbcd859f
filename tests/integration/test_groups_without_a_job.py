"""The backend "farandole" in processes that no launcher has started: the checks of groups_without_a_job.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.support.jobs import SCRIPTS

pytestmark = pytest.mark.long


def run(check: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "groups_without_a_job.py", check]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("check", ["store", "variables", "monitored"])
def test_processes_that_find_each_other_as_torch_does_form_a_group(check: str) -> None:
    done = run(check)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure() since 2.14")
def test_torchs_reconfigure_changes_the_members() -> None:
    done = run("reconfigure")
    assert done.returncode == 0, done.stdout + done.stderr
