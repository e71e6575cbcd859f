"""Which workers are meant, and what is printed of them."""

from __future__ import annotations

import pytest

from farandole.base.wire.control import StacksOfWorker, Status, WorkerSummary
from farandole.errors import ConfigError
from farandole.job.launch.control_commands import chosen_workers, format_stacks, stacks_as_dict

STACKS = 'Thread 0x1f (most recent call first):\n  File "queues.py", line 3 in get\n\n'
STACKS += 'Current thread 0x2e (most recent call first):\n  File "train.py", line 9 in step\n'


def worker(name: str, rank: int | None, step: int | None = None) -> WorkerSummary:
    return WorkerSummary(name, rank, "a", 0, 7, "trains" if rank is not None else "starts", 1, step)


MEMBERS = (worker("w0", 0), worker("w4", 1, 12))
STATUS = Status("job", "training", 1, 0, None, 2, 0, 1, None, MEMBERS, (worker("w5", None),), (), (), 0)


def names(ranks: tuple[int, ...] = (), workers: tuple[str, ...] = (), are_all: bool = False) -> list[str]:
    return [each.worker for each in chosen_workers(STATUS, ranks, workers, are_all)]


def test_workers_are_chosen_by_rank_by_name_or_all() -> None:
    assert names((1,)) == ["w4"]
    assert names((1, 0)) == ["w0", "w4"]
    assert names((1,), ("w5", "w4")) == ["w4", "w5"]
    assert names(are_all=True) == ["w0", "w4", "w5"]


@pytest.mark.parametrize(
    ("ranks", "workers", "text"),
    [
        ((), (), "give a RANK, --worker NAME or --all; it has ranks 0 to 1, and the workers w0, w4, w5"),
        ((2, 0, 7), (), "the job has no rank 2 or 7; it has ranks 0 to 1"),
        ((), ("w1",), "the job has no worker w1; it has ranks 0 to 1, and the workers w0, w4, w5"),
    ],
)
def test_a_choice_that_is_not_there_is_told_what_there_is(
    ranks: tuple[int, ...], workers: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        names(ranks, workers)


def test_a_job_without_workers_says_so() -> None:
    empty = Status("job", "starting", 0, 0, None, 2, 0, 1, None, (), (), (), (), 0)
    for ranks, are_all in (((0,), False), ((), True)):
        with pytest.raises(ConfigError, match="no worker at the moment"):
            chosen_workers(empty, ranks, (), are_all)


def test_the_main_thread_comes_first() -> None:
    assert format_stacks(MEMBERS[1], StacksOfWorker("w4", STACKS)).splitlines() == [
        "w4 (rank 1, pid 7 on a) trains, step 12",
        "The main thread (most recent call first):",
        '  File "train.py", line 9 in step',
        "",
        "Thread 0x1f (most recent call first):",
        '  File "queues.py", line 3 in get',
    ]


def test_a_worker_that_could_not_write_them_is_shown_without() -> None:
    answer = StacksOfWorker("w5", "", "it is stopped")
    assert "no stacks" in format_stacks(worker("w5", None), answer)
    told = stacks_as_dict(worker("w5", None), answer)
    assert (told["rank"], told["stacks"], told["problem"]) == (None, "", "it is stopped")
