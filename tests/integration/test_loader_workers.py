"""The loader with real loader workers: they live on when the world changes, and never outlive the loader."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farandole.data.loader import DataLoader
from farandole.state import step

pytestmark = pytest.mark.timeout(60)


class Numbers:
    """Each sample is (its index, the process that fetched it)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Broken(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 5:
            raise KeyError("sample five is damaged")
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def no_open_step() -> Iterator[None]:
    step.close()
    yield
    step.close()


@pytest.fixture
def loader() -> Iterator[DataLoader]:
    loader = make()
    yield loader
    loader.close()


def make(**options: Any) -> DataLoader:
    defaults: dict[str, Any] = {"dataset": Numbers(1000), "global_batch_size": 10, "shuffle": False}
    return DataLoader(**{**defaults, "num_workers": 2, "collate_fn": list, **options})


def take(feed: Iterator[Any], loader: DataLoader, steps: int) -> tuple[list[int], set[int]]:
    """Train on the next `steps` batches: their samples, and the processes that fetched them."""
    samples, processes = [], set()
    for _ in range(steps):
        for index, process in next(feed):
            samples.append(index)
            processes.add(process)
        assert loader.global_batch is not None
        loader.commit(loader.global_batch)
    return samples, processes


def kill_and_take(processes: set[int], feed: Iterator[Any], loader: DataLoader) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)
    take(feed, loader, 20)


def assert_gone(processes: set[int]) -> None:
    _, alive = psutil.wait_procs([psutil.Process(p) for p in processes if psutil.pid_exists(p)], timeout=10)
    assert not alive


@pytest.mark.core
def test_the_same_loader_workers_go_on_after_a_change_of_the_world(loader: DataLoader) -> None:
    feed = iter(loader)
    samples, before = take(feed, loader, 5)
    assert samples == list(range(50))
    loader.set_world(1, 2)
    samples, after = take(feed, loader, 4)
    assert samples == [s for start in (50, 60, 70, 80) for s in range(start + 5, start + 10)]
    loader.load_state_dict({**loader.state_dict(), "epoch": 4, "cursor": 20})
    loader.set_world(0, 1)
    samples, later = take(feed, loader, 3)
    assert samples == list(range(20, 50))
    assert before == after == later
    assert len(before) == 2
    assert os.getpid() not in before


def test_what_was_fetched_ahead_does_not_stop_at_the_end_of_an_epoch() -> None:
    loader = make(dataset=Numbers(25), prefetch_factor=4)
    seen: list[list[int]] = []
    processes = set()
    for _ in loader.epochs(4):
        feed = iter(loader)
        samples, fetchers = take(feed, loader, 3)
        assert next(feed, None) is None
        seen.append(samples)
        processes |= fetchers
    loader.close()
    assert seen == [list(range(25))] * 4
    assert len(processes) == 2


def test_an_error_in_a_loader_worker_shows_where_it_was_raised() -> None:
    loader = make(dataset=Broken(10))
    with pytest.raises(KeyError) as caught:
        next(iter(loader))
    assert "sample five is damaged" in str(caught.value)
    assert "in __getitem__" in str(caught.value)
    assert loader.cursor == 0


@pytest.mark.core
def test_after_a_killed_loader_worker_the_next_batch_comes_from_new_ones(loader: DataLoader) -> None:
    feed = iter(loader)
    _, before = take(feed, loader, 4)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        # torch raises in its SIGCHLD handler: here, or anywhere below.
        kill_and_take(before, feed, loader)
    loader.close()
    cursor = loader.cursor
    samples, after = take(feed, loader, 2)
    assert samples == list(range(cursor, cursor + 20))
    assert not before & after


def test_close_ends_the_loader_workers_and_iterating_again_starts_new_ones(loader: DataLoader) -> None:
    _, before = take(iter(loader), loader, 2)
    loader.close()
    loader.close()
    assert_gone(before)
    samples, after = take(iter(loader), loader, 1)
    assert samples == list(range(20, 30))
    assert not before & after


def test_loader_workers_end_with_the_loader_without_waiting_for_the_cycle_collector() -> None:
    loader = make()
    _, processes = take(iter(loader), loader, 2)
    gc.disable()
    try:
        del loader
        assert_gone(processes)
    finally:
        gc.enable()


def test_loader_workers_that_were_warmed_up_fetch_what_comes_and_nothing_of_before_is_trained(
    loader: DataLoader,
) -> None:
    loader.warm_up()
    before = {child.pid for child in psutil.Process().children()}
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "cursor": 30})
    loader.set_world(1, 2)
    samples, processes = take(iter(loader), loader, 3)
    assert samples == [35, 36, 37, 38, 39, 45, 46, 47, 48, 49, 55, 56, 57, 58, 59]
    assert processes <= before
    assert len(processes) == 2


def pairs(items: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(items) % 2:
        raise ValueError("cannot pair an odd number of items")
    return items


def test_data_that_cannot_be_warmed_up_with_is_fetched_when_it_is_needed() -> None:
    loader = make(collate_fn=pairs)
    loader.warm_up()
    samples, _ = take(iter(loader), loader, 2)
    assert samples == list(range(20))
    loader.close()


@pytest.mark.core
def test_loader_workers_may_be_spawned_instead_of_forked() -> None:
    loader = make(multiprocessing_context="spawn", num_workers=1)
    feed = iter(loader)
    take(feed, loader, 1)
    loader.set_world(1, 2)
    assert take(feed, loader, 1)[0] == [15, 16, 17, 18, 19]
    loader.close()


SCRIPT = """
from farandole.data.loader import DataLoader
loader = DataLoader(range(1000), 10, num_workers=2)
feed = iter(loader)
next(feed)
print("through")
"""


def test_a_script_that_never_closes_its_loader_ends_at_once_and_in_silence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "through\n", "")
