"""A worker that joins has compiled before the others wait for it, and those that are left need not compile again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = [pytest.mark.long, pytest.mark.core]


@pytest.mark.timeout(180)
def test_nobody_waits_for_a_compiler_when_a_worker_is_lost_or_joins(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "compiled_job.py"), str(tmp_path)]
    done = farandole_run("-np", "3", "--min-np", "2", *command, timeout_s=150)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == 3, done.stderr
    assert len({step for _, _, step in found}) == 1
    joined = [each for each in found if each[1][0][0] == 0]
    assert len(joined) == 1, "the new worker has not run its loop body ahead"
    compiled_in, placed, _ = joined[0]
    assert set(compiled_in) == {0}, "the new worker has compiled while the others waited"
    assert [(rank, size) for generation, rank, size in placed if generation == 0] == [(2, 3)]
    for compiled_in, _, _ in (each for each in found if each not in joined):
        assert set(compiled_in) == {1}, "a loss or a join has made the compiler run again"
