"""Runs checks on all ranks of a job, in the same order, and has rank 0 print a line for each. A job of many checks
imports torch once.

A check is a function without arguments; it raises where something is wrong. Scripts in tests/scripts call main(), and
tests read with `problems` what was printed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

import farandole as fd
from tests.support.launching import launch

ROOT = Path(__file__).parents[2]

_JOB_LIMIT_S = 100

Checks = Mapping[str, Callable[[], None]]
Found = dict[str, list[str | None]]
"""What the ranks said of each check; under "" all that the job printed."""


def checks_in(*modules: ModuleType) -> Checks:
    """All functions `check_...` of some modules, as "module.check_..."."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("check_")
    }


def main(checks: Checks, limit_s: float, init: Callable[[], None]) -> None:
    """Run all checks, or those that sys.argv[1:] names; none may take longer than `limit_s`.

    init  called first, and again after a check that failed: nothing of it is left for the next one then
    """
    torch.set_num_threads(1)  # the ranks share a machine
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # dynamo's
    wanted = sys.argv[1:] or list(checks)
    init()
    for name in wanted:
        # A rank that hangs ends, with what all its threads are doing; and the job with it.
        faulthandler.dump_traceback_later(limit_s, exit=True)
        rank, started, problem = fd.rank(), time.monotonic(), None
        try:
            checks[name]()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test shows it
            problem = traceback.format_exc()
        seconds = time.monotonic() - started
        if problem is not None:  # said at once: the others may be waiting in the middle of it, for ever
            sys.stderr.write(f"{name} on rank {rank}: {problem}\n")
        everybody = fd.allgather_object(problem, f"end of {name}")
        if rank == 0:
            said = {"check": name, "problems": everybody, "seconds": round(seconds, 3)}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
        if everybody != [None] * len(everybody):
            fd.shutdown()
            init()
        faulthandler.cancel_dump_traceback_later()
    fd.shutdown()


def problems(script: Path, size: int, *arguments: str, **environment: str) -> Found:
    """What the ranks of a job of `size` workers said of each check. What was not reached is missing."""
    # Before what is there already, which may say where farandole itself is.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["run", "-np", str(size), sys.executable, str(script), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        with launch(words, output, output, {**os.environ, "PYTHONPATH": path, **environment}) as job:
            try:
                job.wait(_JOB_LIMIT_S)
                note = ""
            except subprocess.TimeoutExpired:  # said of what is missing, once for all checks
                job.send_signal(signal.SIGINT)
                note = f"\nended after {_JOB_LIMIT_S} s"
            assert job.left() == []
        output.seek(0)
        said = output.read() + note
    found: Found = {"": [said]}
    for line in re.findall(r'\{"check".*\}', said):
        result = json.loads(line)
        found[result["check"]] = result["problems"]
    return found


def explain(found: Found, check: str) -> str:
    """For a failing test: what the ranks said, or how the job ended where it did not get that far."""
    if check in found:
        return "\n".join(f"rank {rank}: {problem}" for rank, problem in enumerate(found[check]) if problem)
    return f"the job did not get to {check}:\n{str(found[''][0])[-6000:]}"
