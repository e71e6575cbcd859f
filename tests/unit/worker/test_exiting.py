"""The exit of a worker's process: short, and nothing that was written is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from farandole.training.worker import process_setup

_SCRIPT = """
import atexit, gc, sys
from farandole.training.worker.process_setup import shorten_exit
atexit.register(lambda: print("a handler that was there before", gc.get_freeze_count() > 1000))
class Holder:
    def __del__(self):
        print("deleted")
atexit.register(shorten_exit)
file = open(sys.argv[1], "w")
file.write("all of it")
cycle = [file]
cycle.append(cycle)
alone = Holder()
"""


def test_handlers_run_files_in_cycles_are_flushed_and_objects_are_finalized(tmp_path: Path) -> None:
    path = tmp_path / "written"
    done = subprocess.run([sys.executable, "-c", _SCRIPT, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["a handler that was there before True", "deleted"]
    assert done.stderr == ""
    assert path.read_text() == "all of it"


def test_what_holds_the_exit_of_a_worker_is_named(caplog: pytest.LogCaptureFixture) -> None:
    script_ends = threading.Thread(target=lambda: None)
    script_ends.start()
    is_over = threading.Event()
    left_behind = threading.Thread(target=is_over.wait, name="uploads", daemon=False)
    left_behind.start()
    try:
        process_setup._name_after(script_ends, lambda: True, 0.0)
    finally:
        is_over.set()
        left_behind.join()
    assert "its process waits for these threads, which are no daemons" in caplog.text
    assert "uploads" in caplog.text


def test_nothing_is_said_of_the_exit_when_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    script_ends = threading.Thread(target=lambda: None)
    script_ends.start()
    process_setup._name_after(script_ends, lambda: False, 0.0)
    assert caplog.text == ""
