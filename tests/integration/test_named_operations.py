"""Horovod's operations over real processes: each check of tests/scripts/named_operations.py, by size."""

from __future__ import annotations

from functools import cache

import pytest

from tests.checks.running import Found, explain, problems
from tests.scripts.named_operations import CHECKS
from tests.support.jobs import SCRIPTS


@cache
def found(size: int) -> Found:
    """One job for all checks."""
    return problems(SCRIPTS / "named_operations.py", size)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.core), 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_over_ranks(check: str, size: int) -> None:
    said = found(size)
    assert said.get(check) == [None] * size, explain(said, check)
