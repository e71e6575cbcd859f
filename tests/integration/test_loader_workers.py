"""The loader with real loader processes: they live on when the world changes, see each epoch's data set, and never
outlive the loader."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.training.data.eval_loader import EvalLoader
from farandole.training.data.loader import DataLoader
from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state import step

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
def alone() -> Iterator[None]:
    fd.init()
    step.close()
    yield
    step.close()
    fd.shutdown()


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


@pytest.mark.parametrize("keeps", [False, True])
def test_each_epoch_has_loader_processes_of_its_own_unless_they_are_kept(keeps: bool) -> None:
    loader = make(dataset=Numbers(25), prefetch_factor=4, persistent_workers=keeps)
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
    assert len(processes) == 2 * (1 if keeps else 4)


STAGE = 0


class Stages(Numbers):
    """Each sample is what the script has set, in all ways in which it could: of the data set, of its module, of shared
    memory."""

    stage = 0

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shared = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set(self, stage: int) -> None:
        global STAGE
        self.stage = STAGE = stage
        self.shared.fill_(stage)

    def __getitem__(self, index: int) -> Any:
        return self.stage, STAGE, int(self.shared)


class Collate:
    stage = 0

    def __call__(self, items: list[Any]) -> list[Any]:
        return [(*item, self.stage) for item in items]


def stages(loader: DataLoader, dataset: Stages, collate: Collate) -> list[set[Any]]:
    """Return what the samples of three epochs have, in each of which the script has set another stage."""
    seen = []
    for epoch in loader.epochs(3):
        dataset.set(int(epoch))
        collate.stage = int(epoch)
        seen.append(set())
        for batch in loader:
            seen[-1] |= set(batch)
            step.close()
            loader.commit(loader.global_batch)  # type: ignore[arg-type]
    loader.close()
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_the_script_changes_between_epochs_is_seen_in_all_batches_of_the_next_one(num_workers: int) -> None:
    dataset, collate = Stages(24), Collate()
    loader = make(dataset=dataset, collate_fn=collate, num_workers=num_workers)
    assert stages(loader, dataset, collate) == [{(epoch,) * 4} for epoch in range(3)]


def test_loader_processes_that_are_kept_see_changes_of_shared_memory_only_and_not_too_late() -> None:
    dataset, collate = Stages(24), Collate()
    loader = make(dataset=dataset, collate_fn=collate, prefetch_factor=4, persistent_workers=True)
    assert stages(loader, dataset, collate) == [{(0, 0, epoch, 0)} for epoch in range(3)]


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, "collate_fn": list}])
def test_the_tensors_of_a_data_set_may_be_replaced_between_epochs(options: dict[str, Any]) -> None:
    dataset = TensorDataset(torch.zeros(20))
    loader = make(**{"dataset": dataset, "collate_fn": None, **options})
    evaluation = EvalLoader(dataset, 20, **options)
    for epoch in loader.epochs(3):
        dataset.tensors = (torch.full((20,), float(epoch)),)
        for batch in loader:
            assert torch.stack([item for each in batch for item in each]).unique().tolist() == [epoch]
            step.close()
            loader.commit(loader.global_batch)  # type: ignore[arg-type]
        (batch,) = evaluation
        assert torch.stack([item for each in batch for item in each]).unique().tolist() == [epoch]
    loader.close()


def test_an_error_in_a_loader_worker_shows_where_it_was_raised() -> None:
    loader = make(dataset=Broken(10))
    with pytest.raises(KeyError) as caught:
        next(iter(loader))
    assert "sample five is damaged" in str(caught.value)
    assert "in __getitem__" in str(caught.value)
    assert loader.cursor == 0


@pytest.mark.core
@pytest.mark.parametrize("killed", [1, 2])
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_after_a_killed_loader_process_the_next_batch_comes_from_new_ones(killed: int, options: dict[str, Any]) -> None:
    loader = make(**options)
    feed = iter(loader)
    before, samples, after = set(), [], set()
    for _ in range(4):
        taken, processes = take(feed, loader, 1)
        samples += taken
        before |= processes
    for process in sorted(before)[:killed]:
        os.kill(process, signal.SIGKILL)
    for _ in range(8):
        taken, after = take(feed, loader, 1)
        samples += taken
    assert samples == list(range(120))
    assert not before & after
    loader.close()


def test_a_loader_process_that_is_killed_between_two_batches_does_not_disturb_other_code(loader: DataLoader) -> None:
    feed = iter(loader)
    _, processes = take(feed, loader, 2)
    os.kill(min(processes), signal.SIGKILL)
    assert_gone({min(processes)})
    assert take(feed, loader, 1)[0] == list(range(20, 30))


def test_of_micro_batches_each_comes_once_when_a_loader_process_is_killed(loader: DataLoader) -> None:
    loader = make(max_local_batch=3)
    samples = []
    for _ in range(3):
        for index in range(4):
            batch = next(iter(loader) if not samples else loader)
            samples += [number for number, _ in batch]
            if index == 1:
                os.kill(batch[0][1], signal.SIGKILL)
        step.close()
        loader.commit(loader.global_batch)  # type: ignore[arg-type]
    assert samples == list(range(30))
    loader.close()


def test_a_loader_is_closed_while_one_of_its_processes_is_being_killed_that_has_a_lock(
    loader: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, processes = take(iter(loader), loader, 2)
    prefetch: Any = loader._prefetch
    prefetch._iterator._workers_done_event.theirs._cond.acquire()
    os.kill(min(processes), signal.SIGKILL)
    monkeypatch.setattr(prefetch, "_has_lost_process", lambda: False)  # it has not ended yet
    loader.close()
    assert_gone(processes)


class Slow(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(0.0 if index < 10 else 0.05)
        return super().__getitem__(index)


def test_loader_processes_that_are_killed_and_that_other_code_has_waited_for_are_replaced() -> None:
    """A script that calls os.wait() takes their exits away: for torch they are alive for ever then."""
    others = {each.pid for each in psutil.Process().children()}
    loader = make(dataset=Slow(100))
    feed = iter(loader)
    take(feed, loader, 1)
    for process in psutil.Process().children():
        if process.pid not in others:
            process.kill()
            os.waitpid(process.pid, 0)
    assert take(feed, loader, 2)[0] == list(range(10, 30))
    loader.close()


class DyingWithLock(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:
        frame = sys._getframe()
        while index == 25 and not self.marker.exists():
            if "done_event" in frame.f_locals:  # of torch's loop over the requests, which it looks at before each
                self.marker.touch()
                frame.f_locals["done_event"]._cond.acquire()
                os.kill(os.getpid(), signal.SIGKILL)
            frame = cast(FrameType, frame.f_back)
        return super().__getitem__(index)

    def __init__(self, size: int, marker: Path) -> None:
        super().__init__(size)
        self.marker = marker


def test_a_loader_process_that_dies_with_a_lock_of_torchs_is_replaced(tmp_path: Path) -> None:
    """Nobody gets that lock any more, and torch takes it to let the other processes end."""
    loader = make(dataset=DyingWithLock(100, tmp_path / "died"))
    assert take(iter(loader), loader, 6)[0] == list(range(60))
    loader.close()


class Deadly(Numbers):
    def __init__(self, size: int, deadly: int) -> None:
        super().__init__(size)
        self._deadly = deadly

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self._deadly:
            os._exit(9)
        return super().__getitem__(index)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_sample_of_which_each_loader_process_dies_is_an_error(batch: int) -> None:
    """It comes behind all batches before its own, which the process had prepared and not yet sent when it died."""
    loader = make(dataset=Deadly(100, 10 * batch + 5), num_workers=1)
    feed = iter(loader)
    assert take(feed, loader, batch)[0] == list(range(10 * batch))
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        next(feed)
    assert any("its samples may be the cause" in note for note in caught.value.__notes__)
    assert loader.cursor == 10 * batch


@pytest.mark.parametrize("num_workers", [1, 2])
def test_after_a_killed_loader_process_new_ones_read_a_stream_on(num_workers: int) -> None:
    loader = StreamLoader(
        range(200),
        10,
        num_workers=num_workers,
        transform=lambda sample: (sample, os.getpid()),
        collate_fn=list,
        max_local_batch=3,
    )
    samples = []
    for index, batch in enumerate(iter(loader)):
        samples += [sample for sample, _ in batch]
        if index in (5, 30):
            os.kill(batch[0][1], signal.SIGKILL)
        if loader.batch is not None and loader.batch.is_last:
            step.close()
            loader.commit(loader.global_batch)  # type: ignore[arg-type]
    assert samples == list(range(200))
    loader.close()


def test_an_evaluation_survives_a_killed_loader_process() -> None:
    loader = EvalLoader(Numbers(60), 5, num_workers=2, collate_fn=list)
    samples, processes = [], set()
    for index, batch in enumerate(loader):
        samples += [number for number, _ in batch]
        processes |= {process for _, process in batch}
        if index == 3:
            os.kill(batch[0][1], signal.SIGKILL)
    assert samples == list(range(60))
    assert len(processes) > 2


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


def test_loader_processes_that_were_warmed_up_fetch_what_comes_and_nothing_of_before_is_trained() -> None:
    loader = make(persistent_workers=True)
    loader.warm_up()
    before = {child.pid for child in psutil.Process().children()}
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "cursor": 30})
    loader.set_world(1, 2)
    samples, processes = take(iter(loader), loader, 3)
    assert samples == [35, 36, 37, 38, 39, 45, 46, 47, 48, 49, 55, 56, 57, 58, 59]
    assert processes <= before
    assert len(processes) == 2
    loader.close()


def test_loader_processes_that_are_not_kept_are_not_started_before_the_script_asks_for_a_batch(
    loader: DataLoader,
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    loader.warm_up()
    assert {child.pid for child in psutil.Process().children()} <= before


def pairs(items: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(items) % 2:
        raise ValueError("cannot pair an odd number of items")
    return items


def test_data_that_cannot_be_warmed_up_with_is_fetched_when_it_is_needed() -> None:
    loader = make(collate_fn=pairs, persistent_workers=True)
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
from farandole.training.data.loader import DataLoader
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
