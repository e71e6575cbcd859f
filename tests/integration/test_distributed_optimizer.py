"""DistributedOptimizer without a loader, over real processes: each check of tests/scripts/optimizer_job.py, by size."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from functools import cache

import pytest

from tests.support.jobs import SCRIPTS
from tests.support.launching import launch

SCRIPT = SCRIPTS / "optimizer_job.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@cache
def problems(size: int) -> dict[str, list[str | None]]:
    """What each rank says of each check; one job for all of them."""
    words = ["run", "-np", str(size), sys.executable, str(SCRIPT)]
    environment = {**os.environ, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with tempfile.TemporaryFile("w+") as file:
        with launch(words, file, file, environment) as job:
            job.wait(100)
        file.seek(0)
        output = file.read()
    found: dict[str, list[str | None]] = defaultdict(list)
    for line in re.findall(r'\{"check".*\}', output):
        said = json.loads(line)
        found[said["check"]].append(said["problem"])
    assert found, output
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_over_ranks(check: str, size: int) -> None:
    said = problems(size)[check]
    assert said == [None] * size, "\n".join(problem for problem in said if problem)
