"""Process sets in an elastic job: they name ranks, and are there again for those who have these ranks next."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import SCRIPTS, RunningJob

MADE = {"given": [0, 1], "before": [1, 2], "inside": [0, 2]}


def working(size: int, above: int = 0, is_removed: bool = False) -> Callable[[dict[int, dict[str, Any]]], bool]:
    """Whether all of `size` workers have trained in a generation with a number above `above`."""

    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return (
            len(latest) == size
            and all(each["size"] == size and each["is_removed"] == is_removed for each in latest.values())
            and latest[0]["generation"] > above
        )

    return condition


def check(latest: dict[int, dict[str, Any]], names: set[str]) -> None:
    """These process sets are there, on all ranks, and work; others are not."""
    for rank, record in latest.items():
        there = {name: number for name, number in record["ids"].items() if number is not None}
        assert set(there) == names
        assert there == {name: latest[0]["ids"][name] for name in names}, "the same ids everywhere"
        for name, number in there.items():
            ranks = MADE[name]
            assert record["all"][str(number)] == ranks
            assert record["sizes"][name] == len(ranks)
            assert record["sums"][name] == (sum(ranks) if rank in ranks else None)
        for name in set(record["ids"]) - names:
            assert record["sizes"][name] is None
            assert "is not one of the process sets of this world" in record["sums"][name]
        numbers = {int(number) for number in record["all"]}
        assert numbers == {0, *there.values()}, "there are no others"


def by_generation(folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """The first record of each worker in each generation, by rank."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for path in folder.glob("worker-*.jsonl"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = json.loads(line)
            found.setdefault(record["generation"], {}).setdefault(record["rank"], record)
    return found


def test_process_sets_are_there_again_for_who_has_their_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    stop, remove, records = tmp_path / "stop", tmp_path / "remove", tmp_path / "records"
    records.mkdir()
    words = ["--stop", str(stop), "--remove", str(remove)]
    with RunningJob(["-np", "3"], SCRIPTS / "process_sets_job.py", words, records, tmp_path / "output") as job:
        latest = job.wait_until(working(3), 60)
        check(latest, {"given", "before", "inside"})

        job.kill(latest[1]["pid"])  # Its replacement is a newcomer, which runs the script from its beginning.
        latest = job.wait_until(working(3, latest[0]["generation"]), 60)
        check(latest, {"given", "before", "inside"})

        remove.touch()
        latest = job.wait_until(working(3, is_removed=True), 60)
        check(latest, {"given", "inside"})

        job.kill(latest[0]["pid"])  # The newcomer adds what was removed, and does not bring it back.
        latest = job.wait_until(working(3, latest[0]["generation"], is_removed=True), 60)
        check(latest, {"given", "inside"})
        stop.touch()
        assert job.wait(60) == 0, (tmp_path / "output").read_text()

    for ranks in by_generation(records).values():
        if len(ranks) == 2:  # nobody has rank 2, and ranks 0 and 1 are everybody
            assert [each["ids"]["given"] for each in ranks.values()] == [0, 0]
            assert [each["sums"]["given"] for each in ranks.values()] == [1, 1]
            assert [each["ids"]["before"] for each in ranks.values()] == [None, None]
            assert [each["all"] for each in ranks.values()] == [{"0": [0, 1]}] * 2
    assert {len(ranks) for ranks in by_generation(records).values()} <= {2, 3}
