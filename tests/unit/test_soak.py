"""What a soak run comes to, from records made up by hand."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.soak import Soak, longest_stall_s, presence, violations
from benchmarks.soak_job import BATCH, SAMPLES, SEED
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob
from tests.support.pure_order import global_batches

SECOND = 10**9


def a_soak(folder: Path) -> Soak:
    """Two workers; one is killed after 10 s; the other goes on alone from 11 s on; a newcomer is killed before it has
    done anything, and from 16 s on there are two again."""
    batches = global_batches(SAMPLES, BATCH, SEED, 1)
    times = {1: (1, 2, 1), 2: (11, 1, 1), 3: (16, 2, 1)}  # generation: first second, size
    begins = {0: 1, 40: 2, 70: 3}
    lines, generation, at = [], 0, 0
    for step, samples in batches.items():
        if step in begins:
            generation, at = begins[step], times[begins[step]][0] * SECOND
        at += SECOND // 100
        common = {"pid": 1, "host": "here", "rank": 0, "size": times[generation][1], "generation": generation, "ns": at}
        lines += [{"before": step, "epoch": 0, "ids": [sample for _, sample in samples], **common}]
        lines += [{"after": step, **common}]
    lines.append({"end": len(batches), "parameters": "a", **common})
    folder.mkdir()
    (folder / "worker-1-here.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Soak(Proof(folder), [(10 * SECOND, 1), (15 * SECOND, 3)], 2 * SECOND, 20 * SECOND, "")


def test_who_was_there_when_is_counted(tmp_path: Path) -> None:
    found = presence(a_soak(tmp_path / "a"))
    assert {workers: round(seconds) for workers, seconds in found.items()} == {2: 8 + 4, 1: 6}


def test_the_longest_stall_is_that_of_a_worker_which_goes_on(tmp_path: Path) -> None:
    assert round(longest_stall_s(a_soak(tmp_path / "a").proof)) == 10


def test_a_good_soak_violates_nothing_and_a_sample_in_the_wrong_step_is_found(tmp_path: Path) -> None:
    soak = a_soak(tmp_path / "a")
    assert [each for each in violations(soak) if "applied no step" not in each] == []
    for record in soak.proof.records:
        if record.get("before") == 7:
            record["ids"] = record["ids"][1:]
    said = " ".join(violations(soak))
    assert "samples lost" in said
    assert "in peace: [7]" in said


def test_a_worker_with_the_number_of_one_that_has_ended_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "worker-7-here.jsonl"
    old = {"before": 1, "pid": 7, "host": "here", "rank": 0, "generation": 1, "since": 1}
    path.write_text(f"{json.dumps(old)}\n{json.dumps(old)}\n")
    with RunningJob([], Path("script"), [], tmp_path, program=["true"]) as job:
        assert set(job.latest()) == {0}
        job.forget(old)
        assert job.latest() == {}
        with path.open("a") as file:
            file.write(json.dumps({**old, "generation": 9, "rank": 2, "since": 5}) + "\n")
        assert set(job.latest()) == {2}


def test_between_two_workers_of_one_number_there_is_no_stall(tmp_path: Path) -> None:
    common = {"pid": 7, "host": "here", "rank": 0, "size": 1}
    lines = [{"after": n, "generation": 1, "ns": n * SECOND, "since": 1, **common} for n in range(3)]
    lines += [{"after": n, "generation": 5, "ns": (n + 500) * SECOND, "since": 2, **common} for n in range(3, 6)]
    (tmp_path / "worker-7-here.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert longest_stall_s(Proof(tmp_path)) == 1.0
