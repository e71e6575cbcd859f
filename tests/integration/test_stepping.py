"""From gradient to step with a loader, over real processes: each check of tests/checks/stepping.py, by size."""

from __future__ import annotations

from functools import cache

import pytest

from tests.checks.running import Found, explain, problems
from tests.scripts.stepping import CHECKS
from tests.support.jobs import SCRIPTS


@cache
def found(size: int, transport: str) -> Found:
    """One job for all checks."""
    return problems(SCRIPTS / "stepping.py", size, FARANDOLE_TRANSPORT=transport)


@pytest.mark.core
@pytest.mark.parametrize(("size", "transport"), [(3, "tcp"), (2, "shm")])
@pytest.mark.parametrize("check", CHECKS)
def test_over_ranks(check: str, size: int, transport: str) -> None:
    said = found(size, transport)
    assert said.get(check) == [None] * size, explain(said, check)
