"""Changing from DDP to Farandole changes no bit of the model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = pytest.mark.core


@pytest.mark.parametrize("loader", ["farandole", pytest.param("torch", marks=pytest.mark.long)])
def test_after_100_steps_of_2_workers_float32_parameters_are_bitwise_those_of_ddp(loader: str, tmp_path: Path) -> None:
    """Two numbers have one sum, and half of it is exact: there is no rounding to differ in."""
    script = str(SCRIPTS / "ddp_job.py")
    words = [sys.executable, script, "--loader", loader, "--store", str(tmp_path / "store")]
    done = farandole_run("-np", "2", "--restarts", "0", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits after 100 steps") == 2, done.stdout
