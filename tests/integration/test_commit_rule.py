"""Whole jobs under the commit rule: real processes, real kills, and what every worker committed."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.running_job import FARANDOLE_RUN, HOROVODRUN, all_writing
from tests.support.jobs import SCRIPTS, RunningJob

COMMIT_JOB = SCRIPTS / "commit_job.py"


class CommitJob(RunningJob):
    """Trains until finish() is called."""

    def __init__(self, folder: Path, flags: list[str], *arguments: str, program: Sequence[str] = FARANDOLE_RUN) -> None:
        self._stop = folder / "stop"
        records = folder / "records"
        records.mkdir()
        words = ["--stop", str(self._stop), *arguments]
        super().__init__(flags, COMMIT_JOB, words, records, folder / "output", program)

    def finish(self) -> None:
        self._stop.touch()
        assert self.wait(60) == 0, (self.folder.parent / "output").read_text()

    def records(self) -> Iterator[list[dict[str, Any]]]:
        """What each worker wrote, in its order."""
        for path in self.folder.glob("worker-*.jsonl"):
            lines = path.read_bytes().split(b"\n")[:-1]
            yield [json.loads(line) for line in lines]


def committing(size: int, above: int = 0) -> Any:
    """Whether `size` workers have each committed in one generation with a number above `above`."""

    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return (
            all_writing(size)(latest)
            and all(record["what"] == "commit" for record in latest.values())
            and latest[0]["generation"] > above
        )

    return condition


def check(job: CommitJob, workers_at_end: int, may_lose: int = 0) -> list[list[dict[str, Any]]]:
    """What must hold of every job, whatever happened on the way. may_lose: batches of a commit that not all ranks
    had made, under a sync from rank 0."""
    workers = list(job.records())
    entered: dict[int, set[tuple[int, str]]] = {}
    committed: dict[int, set[str]] = {}
    for lines in workers:
        newest = 0
        for line in lines:
            if line["what"] == "enter":
                entered.setdefault(line["generation"], set()).add((line["batch"], line["parameters"]))
                assert line["batch"] >= newest - may_lose, f"a commit was lost: {lines}"
                assert line["trail"] == line["batch"]
            elif line["what"] == "commit":
                newest = line["batch"]
                committed.setdefault(line["batch"], set()).add(line["parameters"])
    assert all(len(states) == 1 for states in entered.values()), f"unequal after a regroup: {entered}"
    # The last step before a fault is done again in a world of another size: equal within rounding only.
    ends = [lines[-1] for lines in workers if lines[-1]["what"] == "end"]
    assert len(ends) == workers_at_end
    assert len({(end["batch"], end["parameters"]) for end in ends}) == 1
    return workers


def check_resets(workers: list[list[dict[str, Any]]]) -> None:
    """Each entry into the function but the first of the job has the callbacks before it."""
    for lines in workers:
        for before, line in zip([None, *lines], lines, strict=False):
            if line["what"] == "enter" and line["generation"] > 1:
                assert before is not None
                assert before["what"] == "reset"
                assert before["generation"] == line["generation"]


@pytest.mark.core
@pytest.mark.parametrize("extra", [[], ["--own-sync"]])
def test_after_a_kill_all_go_on_from_the_newest_commit_and_the_replacement_joins(
    tmp_path: Path, extra: list[str]
) -> None:
    with CommitJob(tmp_path, ["-np", "3"], *extra) as job:
        latest = job.wait_until(committing(3), 60)
        job.kill(latest[1]["pid"])
        job.wait_until(committing(3, latest[0]["generation"]), 60)
        job.finish()
    workers = check(job, workers_at_end=3, may_lose=3 if extra else 0)
    check_resets(workers)
    survivors = {latest[0]["pid"], latest[2]["pid"]}
    assert survivors <= {lines[-1]["pid"] for lines in workers if lines[-1]["what"] == "end"}


def test_rank_0_may_die_while_parameters_are_still_being_copied(tmp_path: Path) -> None:
    """A model large enough for the copy to go on in the background, committed after each batch."""
    with CommitJob(tmp_path, ["-np", "2"], "--width", "100000", "--batches-per-commit", "1") as job:
        latest = job.wait_until(committing(2), 60)
        job.kill(latest[0]["pid"])
        job.wait_until(committing(2, latest[0]["generation"]), 60)
        job.finish()
    check_resets(check(job, workers_at_end=2))


@pytest.mark.core
def test_without_a_copy_the_state_after_a_fault_is_that_of_the_newest_commit_to_the_bit(tmp_path: Path) -> None:
    flags = ["--width", "100000", "--batches-per-commit", "1", "--commit-follows-step"]
    with CommitJob(tmp_path, ["-np", "2"], *flags) as job:
        latest = job.wait_until(committing(2), 60)
        job.kill(latest[0]["pid"])
        job.wait_until(committing(2, latest[0]["generation"] + 1), 60)
        job.finish()
    workers = check(job, workers_at_end=2)
    check_resets(workers)
    committed = {(line["batch"], line["parameters"]) for lines in workers for line in lines if line["what"] == "commit"}
    entered = [line for lines in workers for line in lines if line["what"] == "enter" and line["batch"]]
    assert len(entered) >= 2
    assert all((line["batch"], line["parameters"]) in committed for line in entered)


def test_under_horovodrun_one_host_is_enough_to_survive_a_death(tmp_path: Path) -> None:
    with CommitJob(tmp_path, ["-np", "2", "--min-np", "1", "-H", "localhost:2"], program=HOROVODRUN) as job:
        latest = job.wait_until(committing(2), 60)
        job.kill(latest[0]["pid"])
        job.wait_until(committing(2, latest[0]["generation"]), 60)
        job.finish()
    check(job, workers_at_end=2)


def test_all_but_one_may_die_at_once(tmp_path: Path) -> None:
    with CommitJob(tmp_path, ["-np", "3"]) as job:
        latest = job.wait_until(committing(3), 60)
        for rank in (0, 1):
            job.kill(latest[rank]["pid"])
        job.wait_until(committing(3, latest[0]["generation"]), 60)
        job.finish()
    check_resets(check(job, workers_at_end=3))


@pytest.mark.core
def test_sigterm_lets_a_worker_leave_at_a_commit_and_nothing_is_redone(tmp_path: Path) -> None:
    with CommitJob(tmp_path, ["-np", "3"]) as job:
        latest = job.wait_until(committing(3), 60)
        job.kill(latest[0]["pid"], signal.SIGTERM)
        job.wait_until(committing(2), 60)
        job.finish()
    workers = check(job, workers_at_end=2)
    check_resets(workers)
    for lines in workers:
        batches = [line["batch"] for line in lines if line["what"] == "commit"]
        assert batches == list(range(3, 3 * len(batches) + 1, 3)), "every commit once, in every worker that was there"
        interrupted = next((k for k, line in enumerate(lines) if line["what"] == "reset"), None)
        if interrupted is not None:
            assert lines[interrupted - 1]["messages"] >= 1, "scripts that wait for a host message get one"


def test_one_joins_while_another_leaves_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    with CommitJob(tmp_path, ["-np", "3"]) as job:
        latest = job.wait_until(committing(3), 60)
        job.kill(latest[2]["pid"])  # its replacement comes
        job.kill(latest[1]["pid"], signal.SIGTERM)  # while this one goes
        job.wait_until(committing(2, latest[0]["generation"] + 1), 60)
        job.finish()
    check_resets(check(job, workers_at_end=2))


def test_a_script_that_raises_on_one_rank_takes_all_back_to_the_commit(tmp_path: Path) -> None:
    words = ["--batches-per-commit", "4", "--raise-once", str(tmp_path / "raised")]  # at 28, and at 30
    with CommitJob(tmp_path, ["-np", "2"], *words) as job:
        latest = job.wait_until(committing(2, above=1), 60)
        job.finish()
    workers = check(job, workers_at_end=2)
    check_resets(workers)
    assert len(workers) == 2, "the same processes go on"
    assert latest[0]["generation"] == 2
    assert "went back 2 steps to commit 7" in (tmp_path / "output").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_kills_and_leaves_loses_a_commit(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    size = 3
    with CommitJob(tmp_path, ["-np", str(size), "--restarts", "20"], "--batches-per-commit", "1") as job:
        latest = job.wait_until(committing(size), 60)
        for _ in range(3):
            generation = latest[0]["generation"]
            how = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            if how == signal.SIGTERM and size == 2:
                continue
            job.kill(latest[chance.randrange(size)]["pid"], how)
            size -= how == signal.SIGTERM
            latest = job.wait_until(committing(size, generation), 60)
        job.finish()
    check_resets(check(job, workers_at_end=size))
