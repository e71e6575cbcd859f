"""One worker leaves the elastic function, or the loop over the batches, by itself: all workers get an error, and none
waits for ever."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

AT_THE_END = "this worker has left the elastic function, and another one has not"
AFTER_EPOCH = "this worker has ended epoch 0 after step 5, and another one has not"
NAMED = "rank 1 has left the elastic function, and "


@pytest.mark.parametrize(
    ("rule", "way", "said"),
    [("step", "return", AT_THE_END), ("step", "break", AFTER_EPOCH), ("commit", "return", NAMED)],
)
def test_the_job_fails_and_says_what_happened(rule: str, way: str, said: str) -> None:
    result = farandole_run("-np", "2", sys.executable, str(SCRIPTS / "leaving_alone.py"), rule, way)
    assert result.returncode == 1, result.stdout + result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert said in last
    assert "fd.any(condition)" in last
