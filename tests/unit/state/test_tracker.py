"""The numbers of each step are written once, whichever worker is rank 0."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farandole.errors import ConfigError
from farandole.integrations.horovod.object_state import ObjectState
from farandole.training.collectives import world
from farandole.training.state import metrics_file, tracker as tracker_module
from farandole.training.state.metrics_file import MetricsFile, MetricsReader
from farandole.training.state.tracker import Tracker, flush_trackers

STEPS = {1: {"loss": 0.5, "lr": 0.1}, 2: {"loss": 1 / 3}, 3: {"loss": 1e-300, "lr": float("inf")}}


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes this process a rank of a world."""

    class Placed:
        def __init__(self, rank: int) -> None:
            self.placement = self
            self.rank = rank

    def place(rank: int) -> None:
        monkeypatch.setattr(world, "current", lambda: Placed(rank))

    place(0)
    return place


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each log() write, unless a test says else."""
    monkeypatch.setattr(metrics_file, "_WRITE_EVERY_S", 0.0)


def content(path: Path) -> list[tuple[int, dict[str, float]]]:
    return MetricsReader(path, from_start=True).read()


def test_values_come_back_as_they_were(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "m.csv")
    for step, values in STEPS.items():
        tracker.log(step, **values)
    tracker.log(4, **{'a "name", quoted': torch.tensor(0.1, dtype=torch.float64, requires_grad=True)})
    assert content(tmp_path / "m.csv") == [*STEPS.items(), (4, {'a "name", quoted': 0.1})]


def test_only_rank_0_opens_the_file(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    as_rank(1)
    tracker = Tracker(tmp_path / "m.csv")
    tracker.log(1, loss=1)
    tracker.regrouped()
    assert not (tmp_path / "m.csv").exists()


def test_the_next_rank_0_writes_what_the_former_one_has_not(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    first, second = Tracker(tmp_path / "m.csv"), Tracker(tmp_path / "m.csv")
    second.load_state_dict(first.state_dict())  # at the bootstrap
    first.log(1, loss=1)
    first.log(2, loss=2)
    as_rank(1)
    for step in (1, 2, 3):
        second.log(step, loss=step)
    as_rank(0)
    second.regrouped()
    assert content(tmp_path / "m.csv") == [(1, {"loss": 1}), (2, {"loss": 2}), (3, {"loss": 3})]


def test_a_step_that_was_copied_from_another_worker_is_written(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    """The new rank 0 has not applied step 2 itself, and so has not logged it."""
    ahead, behind = Tracker(tmp_path / "m.csv"), Tracker(tmp_path / "m.csv")
    as_rank(1)
    behind.load_state_dict(ahead.state_dict())
    for each, steps in ((ahead, (1, 2)), (behind, (1,))):
        for step in steps:
            each.log(step, loss=step)
    as_rank(0)
    behind.load_state_dict(ahead.state_dict())
    behind.log(3, loss=3)  # without regrouped(): under the commit rule it comes before the state
    assert [step for step, _ in content(tmp_path / "m.csv")] == [1, 2, 3]


def test_the_state_has_the_newest_records_only(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "m.csv")
    for step in range(100):
        tracker.log(step, loss=step)
    records = tracker.state_dict()["records"]
    assert list(records) == list(range(96, 100))
    other = Tracker(tmp_path / "m.csv")
    other.load_state_dict(tracker.state_dict())
    assert other.state_dict() == tracker.state_dict()


def test_a_worker_keeps_a_bounded_number_of_records(
    as_rank: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "_KEPT", 10)
    as_rank(1)
    tracker = Tracker(tmp_path / "m.csv")
    for step in range(100):
        tracker.log(step, loss=step)
    as_rank(0)
    tracker.regrouped()
    assert [step for step, _ in content(tmp_path / "m.csv")] == list(range(90, 100))


def test_the_first_value_of_a_step_and_a_name_counts(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "m.csv")
    tracker.log(1, loss=1)
    tracker.log(1, loss=2, accuracy=3)
    tracker.log(0, loss=4)
    assert content(tmp_path / "m.csv") == [(1, {"loss": 1, "accuracy": 3})]


def test_a_line_that_was_not_completed_is_removed(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    tracker = Tracker(path)
    tracker.log(1, loss=1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-12:-1])
    assert content(path) == [(1, {"loss": 1})]
    tracker.close()
    tracker.log(2, loss=2)
    assert content(path) == [(1, {"loss": 1}), (2, {"loss": 2})]


def test_another_job_appends_a_run_and_readers_take_the_newest(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    old = Tracker(path)
    old.log(5, loss=5)
    reader = MetricsReader(path)
    new = Tracker(path)
    new.log(1, loss=1)
    assert content(path) == reader.read() == [(1, {"loss": 1})]
    resumed = Tracker(path)
    resumed.load_state_dict(old.state_dict())  # from a checkpoint of the first job
    resumed.log(5, loss=7)
    resumed.log(6, loss=6)
    assert reader.read() == [(6, {"loss": 6})]


def test_a_reader_drops_what_two_workers_have_written(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    """A machine that is cut off writes a step, and the next rank 0 does so as well."""
    file = MetricsFile(tmp_path / "m.csv")
    file.open("run")
    for step in (1, 2, 2, 3):
        file.write(step, {"loss": step})
    assert [step for step, _ in content(tmp_path / "m.csv")] == [1, 2, 3]


def test_following_ends_with_the_job_and_misses_nothing(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "m.csv")
    reader = MetricsReader(tmp_path / "m.csv")  # the file is not there yet
    codes = [None, None, 0]

    def poll() -> int | None:
        step = 3 - len(codes)
        if step:
            tracker.log(step, loss=step)
        return codes.pop(0)

    assert [step for step, _ in reader.follow(poll)] == [1, 2]


def test_values_of_steps_in_quick_succession_are_written_together(
    as_rank: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_WRITE_EVERY_S", 0.3)
    writes = []
    write = os.write

    def counted(descriptor: int, data: bytes) -> int:
        writes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    tracker = Tracker(tmp_path / "m.csv")
    for step in range(1, 101):
        tracker.log(step, loss=step)
    assert [step for step, _ in content(tmp_path / "m.csv")] == [1]  # the first one at once
    deadline_s = time.monotonic() + 30
    while len(content(tmp_path / "m.csv")) < 100 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [step for step, _ in content(tmp_path / "m.csv")] == list(range(1, 101))
    assert len(writes) == 3  # with the header


@pytest.mark.parametrize("how", ["flush", "close", "regrouped", "checkpoint"])
def test_what_waits_is_written(
    how: str, as_rank: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_WRITE_EVERY_S", 1000.0)
    monkeypatch.setattr(metrics_file, "_LONGEST_WAIT_S", 1000.0)  # the thread does not write it
    tracker = Tracker(tmp_path / "m.csv")
    tracker.log(1, loss=1)
    tracker.log(2, loss=2)
    assert len(content(tmp_path / "m.csv")) == 1
    if how == "regrouped":
        as_rank(1)
    if how == "checkpoint":
        flush_trackers(ObjectState(lambda each, **_: each, lambda: 0, tracker=tracker))
    else:
        getattr(tracker, how)()
    assert len(content(tmp_path / "m.csv")) == 2


def test_what_waits_is_written_when_the_process_ends(tmp_path: Path) -> None:
    script = (
        "import sys, farandole as fd; fd.init(); tracker = fd.elastic.Tracker(sys.argv[1])\n"
        "for step in range(1, 4): tracker.log(step, loss=step)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "m.csv")], check=True, timeout=60)
    assert [step for step, _ in content(tmp_path / "m.csv")] == [1, 2, 3]


def test_the_next_log_tells_that_a_later_write_has_failed(
    as_rank: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_WRITE_EVERY_S", 60.0)  # the second one is left to the thread
    monkeypatch.setattr(metrics_file, "_LONGEST_WAIT_S", 0.05)
    tracker = Tracker(tmp_path / "m.csv")
    tracker.log(1, loss=1)
    full, has_tried = OSError(errno.ENOSPC, "No space left on device"), threading.Event()

    def write(*_: object) -> int:
        has_tried.set()
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        tracker.log(2, loss=2)
        assert has_tried.wait(60)
    with pytest.raises(OSError, match="No space left"):
        tracker.log(3, loss=3)


def test_a_file_of_something_else_is_refused(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("step,loss\n1,0.5\n")
    with pytest.raises(ConfigError, match=r"run,step,name,value.*a file of its own"):
        Tracker(tmp_path / "m.csv").log(1, loss=1)
    assert (tmp_path / "m.csv").read_text() == "step,loss\n1,0.5\n"


def test_a_value_that_is_no_number_is_refused(as_rank: Callable[[int], None], tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "m.csv")
    with pytest.raises(TypeError, match=r"log\(loss=\.\.\.\).*got Tensor"):
        tracker.log(1, loss=torch.zeros(2))
