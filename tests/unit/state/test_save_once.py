"""save_once: one worker writes, and only when it still is in the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.membership import Progress
from farandole.integrations.horovod.object_state import ObjectState
from farandole.training.state.session import SESSION
from tests.support.thread_workers import run_workers

pytestmark = pytest.mark.core


class Coordinator:
    """Its answer to all questions, and what it was asked."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.asked: list[tuple[Progress, str]] = []

    def __call__(self, name: str, progress: Progress, file: str) -> str:
        self.asked.append((progress, file))
        return self.refusal


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    fd.init()
    yield
    SESSION.may_save = None
    fd.shutdown()


def state() -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, batch=0)


def test_without_a_coordinator_rank_0_writes(tmp_path: Path) -> None:
    assert state().save_once(lambda path: torch.save([1], path), tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt") == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_worker_that_was_cut_off_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("what its replacement has written")
    SESSION.may_save = Coordinator("this worker is not a member of the current generation")
    assert not state().save_once(lambda temporary: temporary.write_text("old"), path)
    assert path.read_text() == "what its replacement has written"
    assert list(tmp_path.iterdir()) == [path]


def test_the_coordinator_is_asked_when_the_file_is_whole_and_before_it_counts(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looking(Coordinator):
        def __call__(self, name: str, progress: Progress, file: str) -> str:
            seen.extend((each.name.endswith("model.npy"), each.read_text()) for each in tmp_path.iterdir())
            return super().__call__(name, progress, file)

    coordinator = Looking()
    SESSION.may_save = coordinator
    model = torch.nn.Linear(1, 1)
    counting = fd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    counting.commit()
    assert counting.save_once(lambda path: path.write_text("whole"), tmp_path / "model.npy")
    assert seen == [(True, "whole")]
    assert coordinator.asked == [(Progress(run_id=1, step=1), str(tmp_path / "model.npy"))]


def test_without_a_path_the_coordinator_is_asked_first() -> None:
    calls: list[str] = []
    SESSION.may_save = Coordinator("no")
    assert not state().save_once(lambda: calls.append("no"))
    SESSION.may_save = Coordinator()
    assert state().save_once(lambda: calls.append("yes"))
    assert calls == ["yes"]


def test_what_the_function_raises_leaves_as_it_is_and_nothing_is_left_behind(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        state().save_once(write, tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []


def test_of_several_workers_one_writes(tmp_path: Path) -> None:
    def save(rank: int) -> bool:
        return state().save_once(lambda path: path.write_text(str(rank)), tmp_path / "file")

    assert run_workers(3, save) == [True, False, False]
    assert (tmp_path / "file").read_text() == "0"
