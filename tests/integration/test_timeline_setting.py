"""The timeline that the launcher's flags or the environment ask for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.jobs import farandole_run

REDUCE = "import torch, farandole as hvd; hvd.init(); hvd.allreduce(torch.ones(1), name='loss')"


def test_rank_0_writes_the_file_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    words = ["--timeline-filename", str(file), "--timeline-mark-cycles"]
    done = farandole_run("-np", "2", *words, sys.executable, "-c", REDUCE)
    assert done.returncode == 0, done.stderr
    events = json.loads(file.read_text())
    assert {"NEGOTIATE_ALLREDUCE", "CYCLE_START"} <= {event.get("name") for event in events}
    assert "allreduce.loss" in {event.get("args", {}).get("name") for event in events}


def test_a_file_that_cannot_be_written_ends_the_job_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "timeline.json"
    done = farandole_run("-np", "2", "--timeline-filename", str(file), sys.executable, "-c", REDUCE)
    assert done.returncode == 1
    assert f"the timeline cannot be written: No such file or directory: '{file}'" in done.stderr
