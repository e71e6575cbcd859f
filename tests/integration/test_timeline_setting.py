"""The timeline that the launcher's flags or the environment ask for."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.integration.test_commit_rule import CommitJob, committing
from tests.support.jobs import farandole_run
from tests.unit.page.test_job_trace import check, lanes_of

REDUCE = "import torch, farandole as hvd; hvd.init(); hvd.allreduce(torch.ones(1), name='loss')"


def test_rank_0_writes_the_file_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    words = ["--timeline-filename", str(file), "--timeline-mark-cycles"]
    done = farandole_run("-np", "2", *words, sys.executable, "-c", REDUCE)
    assert done.returncode == 0, done.stderr
    events = json.loads(file.read_text())
    assert {"NEGOTIATE_ALLREDUCE", "CYCLE_START"} <= {event.get("name") for event in events}
    assert "allreduce.loss" in {event.get("args", {}).get("name") for event in events}


def test_the_file_has_the_operations_of_every_rank_0_and_the_generations_of_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    with CommitJob(tmp_path, ["-np", "2", "--timeline-filename", str(file)]) as job:
        latest = job.wait_until(committing(2), 60)
        wait_for(file, "ALLREDUCE")
        job.kill(latest[0]["pid"])
        job.wait_until(committing(2, above=2), 60)
        wait_for(file, "another rank 0 continues")
        job.finish()
    trace = json.loads(file.read_text())
    check(trace)
    continued = next(each["ts"] for each in trace if each.get("name") == "another rank 0 continues")
    operations = [each["ts"] for each in trace if each.get("name") == "ALLREDUCE"]
    assert min(operations) < continued < max(operations)
    lanes = lanes_of(trace)
    titles = [title for title, *_ in lanes["generations"]]
    assert titles[:2] == ["generation 1: 2 workers", "generation 2: 1 worker, without w0"]
    assert titles[2] == "generation 3: 2 workers, with w2"
    regroups = [name for name, *_ in lanes["regroups"]]
    assert regroups[0] == "recovery"
    assert {"ready", "connected", "synced", "first_step", "change"} <= set(regroups)
    assert [title for title, *_ in lanes["w1"]] == ["rank 1", "rank 0", "rank 0"]
    assert [title for title, *_ in lanes["w2"]] == ["rank 1"]
    began_ms = lanes["generations"][1][1]
    assert abs(continued / 1e3 - began_ms) < 20_000  # both clocks are one


def wait_for(file: Path, text: str) -> None:
    deadline_s = time.monotonic() + 60
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_file_that_cannot_be_written_ends_the_job_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "timeline.json"
    done = farandole_run("-np", "2", "--timeline-filename", str(file), sys.executable, "-c", REDUCE)
    assert done.returncode == 1
    assert f"the timeline cannot be written: No such file or directory: '{file}'" in done.stderr
