"""No wrong verdict: nothing happens to a job on three hosts, but all cores are busy with other things, and one worker
keeps its interpreter for seconds at a time, again and again. Nobody may be declared lost. Takes root."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.jobs import busy_processes
from benchmarks.recovery import WORKLOAD
from farandole.testing.faults.backends import LabBackend
from farandole.testing.lab import Lab
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training

HOSTS = 3
HOLD_S = 2.0
_BUSY_PER_CORE = 2
_DEADLINE_S = 120.0
_VERDICTS = {"WorkerLost", "AgentWasLost", "RegroupBegan", "WorkersHung", "LinksDistrusted", "StoppedWorkerKilled"}


def measure(minutes: float) -> dict[str, Any]:
    """With the default detection budget. `verdicts`: events that say that somebody or something is lost."""
    print(f"\nall cores busy, one worker holds the GIL for {HOLD_S:g} s at a time, for {minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name, Lab(HOSTS) as lab:
        folder = Path(name)
        events = folder / "events.jsonl"
        with contextlib.closing(LabBackend(lab, [1] * HOSTS, folder)) as backend:
            flags = ["-np", str(HOSTS), "--quiet", "--events", str(events), *backend.flags]
            words = ["--hold-s", str(HOLD_S)]
            with RunningJob(flags, WORKLOAD, words, folder, folder / "output") as job, busy_processes(_busy()):
                backend.start_agents()
                latest = job.wait_until(all_training(HOSTS), _DEADLINE_S)
                first = latest[0]["ns"]
                job.wait_until(lambda latest: (latest[0]["ns"] - first) / 60e9 >= minutes, 60 * minutes + _DEADLINE_S)
                told = [json.loads(line) for line in events.read_text().splitlines()]
        proof = Proof(folder)
        applied = sorted(record["ns"] for record in proof.records if "after" in record and record["rank"] == 0)
        holds = sum(b - a >= HOLD_S * 1e9 for a, b in itertools.pairwise(applied))
    verdicts = [each for each in told if each["event"] in _VERDICTS]
    row = {
        "hosts": HOSTS,
        "minutes": round((applied[-1] - first) / 60e9, 2),
        "busy_processes": _busy(),
        "holds": holds,
        "steps": len(applied),
        "verdicts": verdicts,
    }
    print(f"{row['minutes']} minutes, {holds} holds, {row['steps']} steps, {len(verdicts)} verdicts", flush=True)
    return row


def _busy() -> int:
    return _BUSY_PER_CORE * (os.cpu_count() or 1)
