"""The backend "farandole" of torch.distributed over real processes: each check of tests/scripts/process_group.py, and
of process_group_on_a_device.py."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.utils import backend_registration

from tests.checks.running import Found, explain, problems
from tests.scripts.process_group import CHECKS
from tests.scripts.process_group_on_a_device import CHECKS as CHECKS_ON_A_DEVICE
from tests.support.jobs import SCRIPTS

pytestmark = pytest.mark.core

SET_UP = "_setup_privateuseone_for_python_backend"

# The first versions of torch whose FSDP2 runs on CPU tensors, and does so with replicas.
FIRST_VERSIONS = {"c10d_libraries.check_fully_sharded": "2.7", "c10d_libraries.check_hybrid_sharded": "2.8"}
TOO_NEW = {check for check, version in FIRST_VERSIONS.items() if torch.__version__ < version}
NEEDS_AN_EVEN_NUMBER = {"c10d_libraries.check_a_device_mesh", "c10d_libraries.check_hybrid_sharded"}


@cache
def found(size: int) -> Found:
    """One job for all checks."""
    left_out = TOO_NEW | (NEEDS_AN_EVEN_NUMBER if size % 2 else set())
    wanted = [check for check in CHECKS if check not in left_out]
    return problems(SCRIPTS / "process_group.py", size, *wanted)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_over_ranks(check: str, size: int) -> None:
    if check in TOO_NEW:
        pytest.skip(f"runs on CPU tensors with torch {FIRST_VERSIONS[check]} and newer")
    if size % 2 and check in NEEDS_AN_EVEN_NUMBER:
        size = 2
    said = found(size)
    assert said.get(check) == [None] * size, explain(said, check)


@cache
def found_on_a_device(size: int, transport: str) -> Found:
    return problems(SCRIPTS / "process_group_on_a_device.py", size, FARANDOLE_TRANSPORT=transport)


@pytest.mark.skipif(not hasattr(backend_registration, SET_UP), reason="this torch has no devices in Python")
@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "shm"), (2, "tcp")])
@pytest.mark.parametrize("check", CHECKS_ON_A_DEVICE)
def test_tensors_on_a_device(check: str, size: int, transport: str) -> None:
    said = found_on_a_device(size, transport)
    assert said.get(check) == [None] * size, explain(said, check)
