"""The code of the documentation runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import Block, blocks_of_docstrings, blocks_of_pages

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def run_blocks(*options: str, timeout_s: float) -> int:
    """Run the blocks with options of tests/scripts/run_blocks.py; return how many were run. All have to go well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "run_blocks.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.search(r"(\d+) blocks were run", done.stdout)
    assert ran is not None
    return int(ran[1])


def blocks() -> list[Block]:
    found = [*blocks_of_pages(), *blocks_of_docstrings()]
    return [block for block in found if block.language in ("python", "doctest") and not block.not_run]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_python_block_of_the_pages_and_docstrings_runs(workers: int) -> None:
    """In one process, which forks others for each block; those that say why they cannot run here are left out."""
    assert run_blocks("--workers", str(workers), timeout_s=380) == len(blocks()) > 50


@pytest.mark.timeout(600)
def test_every_program_of_the_pages_is_the_script_of_a_job_of_three_workers() -> None:
    """Those of the pages; those of docstrings have run in a world of three."""
    assert run_blocks("README.md", "docs/", "--jobs", "3", timeout_s=580) > 10
