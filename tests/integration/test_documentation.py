"""The code of the documentation runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import blocks_of_docstrings, blocks_of_pages

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_every_python_block_of_the_pages_and_docstrings_runs() -> None:
    """In one process, which forks one for each block; those that say why they cannot run here are left out."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "run_blocks.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    found = [*blocks_of_pages(), *blocks_of_docstrings()]
    wanted = sum(block.language in ("python", "doctest") and not block.not_run for block in found)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.search(r"(\d+) blocks were run", done.stdout)
    assert ran is not None
    assert int(ran[1]) == wanted > 50
