"""kill -9 of one of several workers -> next applied step on all survivors; and the pause when one joins."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training

WORKLOAD = Path(__file__).parent / "workload.py"


def measure(
    workers: int,
    kills: int,
    seed: int,
    num_workers: int = 0,
    width: int = 128,
    layers: int = 2,
    is_ddp: bool = False,
    other_ms: float = 0.0,
) -> dict[str, Any]:
    """Kill a random worker `kills` times, each time after its predecessor's replacement has joined.

    Milliseconds. `recovery`: for each kill, until the slowest survivor has applied a step of a later
    generation; `joins`: for each join, the longest gap between two steps of a survivor.
    """
    chance = random.Random(seed)
    arguments = ["--num-workers", str(num_workers), "--width", str(width), "--layers", str(layers)]
    arguments += ["--other-ms", str(other_ms)]
    arguments += ["--ddp"] if is_ddp else []
    recovery, joins = [], []
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        folder, output = Path(name), Path(name) / "output"
        events = folder / "events.jsonl"
        flags = ["-np", str(workers), "--restarts", str(kills), "--quiet", "--events", str(events)]
        with RunningJob(flags, WORKLOAD, arguments, folder, output) as job:
            done = []
            latest = job.wait_until(all_training(workers), timeout_s=120)
            for _ in range(kills):
                rank = chance.randrange(workers)
                victim, generation = latest[rank]["pid"], latest[rank]["generation"]
                at_ns = job.kill(victim)
                done.append((at_ns, generation, {record["pid"] for record in latest.values()} - {victim}))

                def has_joined(latest: dict[int, dict[str, Any]], beyond: int = generation) -> bool:
                    return all_training(workers)(latest) and latest[0]["generation"] > beyond

                latest = job.wait_until(has_joined, timeout_s=120)
        proof = Proof(folder)
        sizes = proof.generations()
        for at_ns, generation, survivors in done:
            first = proof.first_steps(generation + 1, survivors)
            assert set(first) == survivors, "a survivor of a kill never stepped again"
            recovery.append((max(first.values()) - at_ns) / 1e6)
            joined = min(g for g, size in sizes.items() if g > generation and size == workers)
            if pauses := proof.pauses_at(joined):  # none where the next kill came before anybody's step
                joins.append(max(pauses))
        return {
            "workers": workers,
            "loader_processes": num_workers,
            "other_ms": other_ms,
            "kills": kills,
            "seed": seed,
            "median_step_ms": round(proof.median_step_ms(), 2),
            "steps_redone": proof.redone(),
            "recovery_ms": [round(ms, 1) for ms in recovery],
            "recovery_median_ms": round(statistics.median(recovery), 1),
            "recovery_worst_ms": round(max(recovery), 1),
            "phases_median_ms": _phases(events),
            "join_pause_median_ms": round(statistics.median(joins), 1),
            "join_pause_worst_ms": round(max(joins), 1),
        }


def _phases(events: Path) -> dict[str, float]:
    """Of the job's own reports, from the moment in which the coordinator knew of the kill: medians, by phase."""
    told = [json.loads(line) for line in events.read_text().splitlines()]
    reports = [each for each in told if each["event"] == "Recovered" and each["lost"]]
    names = ("total_ms", "ready_ms", "connected_ms", "synced_ms", "first_step_ms")
    return {name: round(statistics.median(each[name] for each in reports), 1) for name in names} if reports else {}
