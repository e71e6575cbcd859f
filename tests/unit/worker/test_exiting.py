"""The exit of a worker's process: short, and nothing that was written is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import atexit, gc, sys
from farandole.worker.process_setup import shorten_exit
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
