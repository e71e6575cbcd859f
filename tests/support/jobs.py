"""Real jobs for tests: start `farandole run`, read what it said, and see what it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from farandole.testing.proof import Proof

SCRIPTS = Path(__file__).parents[1] / "scripts"
ELASTIC_JOB = SCRIPTS / "elastic_job.py"


def farandole_run(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run `farandole run ...` to its end."""
    command = [sys.executable, "-m", "farandole", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def check_job(proof: Proof, samples: int, epochs: int | None = None, workers_at_end: int | None = None) -> None:
    """What must hold at the end of every job, whatever happened on the way. Without `epochs`, for any number."""
    result = proof.epochs(samples)
    assert result.lost == {}
    assert result.repeated == {}
    assert epochs is None or result.complete == epochs
    ends = proof.ends()
    assert ends, "no worker came to its end"
    if workers_at_end is not None:
        assert len(ends) == workers_at_end
    assert {end["end"] for end in ends} == {proof.steps()}
    assert all(end["scheduler_last_epoch"] == end["end"] for end in ends)
    assert len({end["parameters"] for end in ends}) == 1
    assert all(end["result"] == end["end"] for end in ends)


def processes_with(needle: str) -> list[int]:
    """Processes whose command line or environment has `needle` in it, without this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle.encode() in text:
            found.append(int(entry.name))
    return found
