"""What the benchmarks start leaves no process behind when it hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.jobs import run_processes

SLEEPS = "import time; time.sleep(60)"
STARTS_ONE_IN_A_SESSION_OF_ITS_OWN = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEPS!r}, sys.argv[1]], start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def processes_of(folder: Path) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter(["cmdline", "status"])
        if each.info["status"] != psutil.STATUS_ZOMBIE and str(folder) in (each.info["cmdline"] or ())
    ]


def test_a_command_that_hangs_is_ended_at_its_deadline_with_all_of_its_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_ONE_IN_A_SESSION_OF_ITS_OWN]
    with pytest.raises(RuntimeError, match=r"had not ended after 3 s:\nstarted"):
        run_processes(command, [str(tmp_path)], tmp_path, timeout_s=3)
    assert processes_of(tmp_path) == []


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    code = STARTS_ONE_IN_A_SESSION_OF_ITS_OWN.replace("time.sleep(60)\n", "raise SystemExit(3)\n")
    with pytest.raises(RuntimeError, match="ended with 3:\nstarted"):
        run_processes([sys.executable, "-c", code], [str(tmp_path)], tmp_path, timeout_s=30)
    assert processes_of(tmp_path) == []
