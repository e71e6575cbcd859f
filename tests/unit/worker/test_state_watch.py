"""What a worker knows of the others' states, from the hashes in the headers of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.base.wire.link_messages import StatesDiffered
from farandole.errors import StateDiverged
from farandole.training.collectives import world
from farandole.training.state.sync import Divergence, SyncReport
from farandole.training.worker.state_watch import StateWatch
from tests.support.one_worker import Orders

pytestmark = pytest.mark.core

BLOCK, SAMPLE = 5, 3
FOUND = Divergence(step=7, name="model.weight", objects=2, ranks=(1,), source=0, is_trained=True)


class Digests:
    """Of a state: the hash of the block that is due, and that of a sample."""

    def __init__(self) -> None:
        self.is_suspicious = False

    def of_due_block(self, step: int) -> int:
        return BLOCK

    def of_sample(self, step: int, trained_only: bool) -> int:
        assert not trained_only, "metadata is compared, too"
        return SAMPLE


class Checkpoints:
    """Records the verdicts about the checkpoint that has begun."""

    def __init__(self) -> None:
        self.verdicts: list[bool] = []

    def compared(self, is_equal: bool) -> None:
        self.verdicts.append(is_equal)


class Watched:
    """A watch, and what it acts on. `of`: the size of the world; this worker is rank `place`."""

    def __init__(self, place: int = 0, of: int = 2, on_divergence: str = "copy") -> None:
        self.orders, self.checkpoints = Orders(place, of), Checkpoints()
        self.state = SimpleNamespace(digests=Digests(), step=7, on_divergence=on_divergence)
        parts: Any = (self.orders, self.state, None, self.checkpoints)
        self.watch = StateWatch(*parts)

    @property
    def is_suspicious(self) -> bool:
        return bool(self.state.digests.is_suspicious)


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    yield
    world.enter(None)


def test_a_worker_alone_hashes_nothing() -> None:
    alone = Watched(of=1)
    alone.watch.compare_headers([0], True)
    alone.watch.hash_due(has_saved=True)
    assert (alone.watch.digest, alone.watch.has_saved, alone.watch.sample()) == (0, False, 0)


def test_at_each_boundary_one_block_is_hashed() -> None:
    watched = Watched()
    watched.watch.hash_due(has_saved=False)
    assert (watched.watch.digest, watched.watch.has_saved) == (BLOCK, False)


def test_equal_hashes_say_nothing_of_a_checkpoint_unless_a_sample_is_among_them() -> None:
    watched = Watched()
    watched.watch.hash_due(has_saved=False)
    watched.watch.compare_headers([BLOCK, BLOCK], False)
    assert (watched.is_suspicious, watched.checkpoints.verdicts) == (False, [])


def test_after_a_checkpoint_of_any_rank_a_sample_decides_whether_it_counts() -> None:
    watched = Watched()
    watched.watch.hash_due(has_saved=True)
    assert watched.watch.has_saved
    watched.watch.compare_headers([BLOCK, BLOCK], True)
    watched.watch.hash_due(has_saved=False)
    assert (watched.watch.digest, watched.watch.has_saved) == (BLOCK ^ SAMPLE, False)
    watched.watch.compare_headers([BLOCK ^ SAMPLE] * 2, False)
    assert watched.checkpoints.verdicts == [True]
    watched.watch.hash_due(has_saved=False)
    assert watched.watch.digest == BLOCK, "one sample is enough"


def test_different_hashes_raise_suspicion_and_no_checkpoint_counts() -> None:
    watched = Watched()
    watched.watch.hash_due(has_saved=False)
    watched.watch.compare_headers([BLOCK, 9], False)
    assert (watched.is_suspicious, watched.checkpoints.verdicts) == (True, [False])


def test_after_a_sync_all_have_the_same_state_and_a_checkpoint_counts() -> None:
    watched = Watched()
    watched.watch.compare_headers([BLOCK, BLOCK], True)
    watched.watch.synchronized(SyncReport(0, ()))
    watched.watch.hash_due(has_saved=False)
    assert (watched.checkpoints.verdicts, watched.watch.digest) == ([True], BLOCK)
    assert watched.orders.link.sent == []


@pytest.mark.parametrize("place", [0, 1])
def test_rank_0_reports_that_states_have_differed(place: int) -> None:
    watched = Watched(place)
    watched.watch.synchronized(SyncReport(0, (1,), FOUND))
    assert watched.checkpoints.verdicts == [False]
    said = StatesDiffered(1, 7, "model.weight", 2, (1,), 0, False)
    assert watched.orders.link.sent == ([said] if place == 0 else [])


def test_a_state_that_is_set_to_fail_does_so_when_it_has_differed() -> None:
    watched = Watched(on_divergence="fail")
    with pytest.raises(StateDiverged, match=r"model\.weight"):
        watched.watch.synchronized(SyncReport(0, (1,), FOUND))
    assert [said.is_fatal for said in watched.orders.link.sent] == [True]
