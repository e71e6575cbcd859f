"""The balance of one loader: what it measures, what it tells others, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import TensorDataset

from farandole.base.liveness import status_reporting
from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.errors import ConfigError
from farandole.training.data import balance as balance_module
from farandole.training.data.balance import Balance, OwnTime
from farandole.training.data.division_by_speed import (
    STRAGGLER_STEPS,
    CostWindow,
    SpeedDivision,
    Straggler,
    Stragglers,
    divide_by_cost,
    halfway,
    mean_speed_cost,
)
from farandole.training.data.loader import DataLoader
from farandole.training.data.partition import BatchLayout, make_global_batch
from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state import step

DATA = TensorDataset(torch.arange(100))
LAYOUT = BatchLayout(1000, 40, is_balanced=True)


@pytest.fixture(autouse=True)
def no_open_step() -> Iterator[None]:
    yield
    step.close()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1000
        monkeypatch.setattr(balance_module, "now_ns", lambda: self.ns)
        monkeypatch.setattr(status_reporting, "now_ns", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_time_in_which_a_worker_waits_for_others_is_not_its_own(clock: Clock) -> None:
    own = OwnTime()
    own.stop()
    own.run()
    clock.ns += 30
    with WaitingForPeers():
        clock.ns += 500
    clock.ns += 7
    own.stop()
    clock.ns += 9000
    assert own.take() == 37
    assert own.take() == 0


def test_an_interrupted_step_does_not_count(clock: Clock) -> None:
    own = OwnTime()
    own.run()
    clock.ns += 30
    own.run()
    clock.ns += 5
    own.stop()
    assert own.take() == 5


def test_the_time_of_a_step_is_that_from_the_batch_to_the_gradients_and_that_of_the_optimizer(clock: Clock) -> None:
    one = Balance(fetched_ahead=0)
    one.begin(LAYOUT, [(0, 0), (0, 0)], 0)
    sent = []
    for position in (0, 40, 80):
        one.handing_out()
        clock.ns += 100
        sent.append(one.take_own_ns())
        clock.ns += 5000  # the reduction
        one.agreed([20, 20], [sent[-1], 1])
        clock.ns += 11  # the optimizer
        one.decided(LAYOUT, make_global_batch(LAYOUT, 0, position, 0, 2))
        clock.ns += 7000  # an evaluation
    assert sent == [100, 111, 111]


def test_several_reductions_of_one_step_are_added_up(clock: Clock) -> None:
    one = Balance(fetched_ahead=0)
    one.begin(LAYOUT, [(0, 0), (0, 0)], 0)
    for position in range(0, 200, 40):
        one.handing_out()
        one.agreed([20, 20], [1000, 2000])
        one.agreed([20, 20], [1000, 2000])
        one.decided(LAYOUT, make_global_batch(LAYOUT, 0, position, 0, 2))
    assert one.note() == (100_000, 0)  # picoseconds for a sample


@pytest.mark.parametrize(("fetched_ahead", "counts"), [(0, True), (2, False)])
def test_the_step_in_which_loader_processes_start_does_not_count(fetched_ahead: int, counts: bool) -> None:
    """Each epoch has new ones. Their start would hide in short epochs that the workers have other speeds."""
    one = Balance(fetched_ahead=fetched_ahead)
    one.begin(LAYOUT, [(0, fetched_ahead)] * 2, 0)
    for epoch in range(12):
        for position in (0, 40):
            one.handing_out()
            one.agreed([20, 20], [900_000 if position == 0 else 2000, 2000])
            one.decided(LAYOUT, make_global_batch(LAYOUT, epoch, position, 0, 2))
    assert (one.note()[0] > 100_000) == counts


def test_survivors_bring_their_speeds_and_others_get_the_mean() -> None:
    workers = [Balance(fetched_ahead=0) for _ in range(3)]
    for rank, each in enumerate(workers):
        each.begin(LAYOUT, [(100, 0), (300, 4), (0, 0)], rank)
    assert {each.turns.of(0, 0) for each in workers} == {(21, 6, 13)}
    assert mean_speed_cost([100, 300, 0]) == 150
    assert divide_by_cost(40, [100, 300, 150], 2, 28) == (21, 6, 13)


def test_a_new_division_begins_behind_the_batches_that_some_worker_has_fetched() -> None:
    one = Balance(fetched_ahead=1)
    one.begin(LAYOUT, [(0, 1), (0, 3)], 0)
    position = 0
    while one.turns.at is None:
        one.handing_out()
        one.agreed([20, 20], [1000, 3000])
        has_moved = one.decided(LAYOUT, make_global_batch(LAYOUT, 0, position, 0, 2))
        assert has_moved == (one.turns.at is not None)
        position += 40
    assert one.turns.at == (0, position + 3 * 40)
    assert one.turns.of(0, position + 2 * 40) == ()
    assert one.turns.of(0, position + 3 * 40) == one.turns.of(1, 0) == (30, 10)
    one.turns.passed(0, position + 3 * 40)
    assert (one.turns.at, one.turns.of(0, 0)) == (None, (30, 10))


def test_workers_without_balance_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ranks \[1\] have a DataLoader without balance"):
        Balance(fetched_ahead=0).begin(LAYOUT, [(0, 0), ()], 0)


@pytest.mark.parametrize(
    ("layout", "costs", "counts"),
    [
        pytest.param(LAYOUT, [(100, 0), (9_000, 0)], (38, 2), id="a tenth of an equal share"),
        pytest.param(LAYOUT, [(1, 0), (9, 0), (9, 0), (9, 0)], (20, 7, 7, 6), id="twice an equal share"),
        pytest.param(BatchLayout(99, 40, 25, is_balanced=True), [(1, 0), (9, 0)], (25, 15), id="max_local_batch"),
        pytest.param(BatchLayout(99, 40, 5, is_balanced=True), [(1, 0), (9, 0)], (36, 4), id="micro-batches"),
        pytest.param(BatchLayout(99, 40, None, 9, is_balanced=True), [(1, 0), (9, 0)], (31, 9), id="min_local_batch"),
        pytest.param(BatchLayout(99, 40, shards=10, is_balanced=True), [(1, 0), (9, 0)], (9, 1), id="shards"),
        pytest.param(BatchLayout(99, 2, is_balanced=True), [(1, 0), (9, 0), (9, 0)], (), id="fewer samples than ranks"),
    ],
)
def test_the_limits_of_a_local_batch(layout: BatchLayout, costs: list[tuple[int, int]], counts: tuple[int]) -> None:
    one = Balance(fetched_ahead=0)
    one.begin(layout, costs, 0)
    assert one.turns.of(0, 0) == counts


def test_equal_speeds_keep_an_equal_division_and_a_worker_alone_has_none() -> None:
    assert SpeedDivision(40, 1, 40, [100, 102, 99]).counts == ()
    one = Balance(fetched_ahead=0)
    one.begin(LAYOUT, [(100, 0)], 0)
    assert one.turns.of(0, 0) == ()
    one.handing_out()
    assert not one.decided(LAYOUT, make_global_batch(LAYOUT, 0, 0, 0, 1))


def test_a_single_long_step_is_no_change_and_three_are() -> None:
    window = CostWindow()
    assert not any(window.add(cost) for cost in [100, 104, 96, 101, 99, 100, 100, 3000, 100, 101])
    assert 99 <= window.cost <= 101
    assert [window.add(cost) for cost in (250, 300, 300)] == [False, False, True]
    assert window.cost == 300


def test_half_of_the_way_between_two_divisions_has_all_units() -> None:
    assert halfway((10, 10, 1), (3, 4, 14)) == (6, 7, 8)


def test_a_straggler_is_reported_once_and_its_end_once() -> None:
    stragglers = Stragglers(3)
    found = [stragglers.update([100, 100, 210]) for _ in range(2 * STRAGGLER_STEPS)]
    assert [at for at, each in enumerate(found) if each] == [STRAGGLER_STEPS - 1]
    assert found[STRAGGLER_STEPS - 1] == [Straggler(2, 47, is_slow=True)]
    assert stragglers.update([100, 100, 180]) == []
    assert stragglers.update([100, 100, 130]) == [Straggler(2, 76, is_slow=False)]
    assert stragglers.update([100, 100, 0]) == []


def test_the_job_decides_unless_the_loader_has_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DataLoader(DATA, 24).balance is None
    assert DataLoader(DATA, 24, balance="auto").balance is not None
    monkeypatch.setenv("FARANDOLE_BALANCE", "auto")
    assert DataLoader(DATA, 24).balance is not None
    assert DataLoader(DATA, 24, balance="off").balance is None
    with pytest.raises(ConfigError, match=r"--balance auto: a StreamLoader cannot"):
        StreamLoader(iter([]), 8)
    monkeypatch.setenv("FARANDOLE_BALANCE", "fast")
    with pytest.raises(ConfigError, match="FARANDOLE_BALANCE must be auto or off, got 'fast'"):
        DataLoader(DATA, 24)


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match='DataLoader: balance must be "auto" or "off", got True'):
        DataLoader(DATA, 24, balance=True)  # type: ignore[arg-type]
