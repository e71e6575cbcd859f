"""Local batches that follow the speed of the workers: every sample exactly once and alike on all workers, under any
schedule of speeds, faults and joins; and the division calms down."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings, strategies as st

import farandole as fd
from farandole.training.data.balance import Balance
from farandole.training.data.division_by_speed import (
    LEAST_SHARE,
    MOST_SHARE,
    Counts,
    SpeedDivision,
    divide_by_cost,
    even_counts,
    slowest,
)
from farandole.training.data.index_stream import IndexStream
from farandole.training.data.partition import BatchLayout, batches, global_batch_range, make_global_batch
from farandole.training.state import step
from farandole.training.state.batch import Batch
from tests.property.test_gradient_weights import Sequences, loss_of, net
from tests.support.read_ahead import read_ahead
from tests.support.thread_workers import run_workers

SCHEDULES = int(os.environ.get("BALANCE_SCHEDULES", "60"))  # `make schedules` runs 2,000
no_deadline = settings(deadline=None)


# The division -----------------------------------------------------------------------------------------------


@no_deadline
@given(st.integers(1, 9), st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 9))
def test_no_other_division_within_the_limits_needs_less_time(
    units: int, costs: list[int], least: int, most: int
) -> None:
    ranks = len(costs)
    least, most = min(least, units // ranks), max(most, -(-units // ranks))
    counts = divide_by_cost(units, costs, least, most)
    assert sum(counts) == units
    assert all(least <= count <= most for count in counts)
    others = itertools.product(range(least, min(most, units) + 1), repeat=ranks)
    assert slowest(counts, costs) == min(slowest(other, costs) for other in others if sum(other) == units)


# Speeds that vary -------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Workers whose time for n samples is `fixed` and n ** `power`, in equal parts of a step at an equal share, times
    some noise. Times are in nanoseconds; a step at an equal share takes a millisecond for each sample."""

    ranks: int
    units: int = 256
    noise: float = 0.0
    fixed: float = 0.0
    power: float = 1.0
    delay: int = 0
    seed: int = 0
    counts_by_step: list[Counts] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        equal = -(-self.units // self.ranks)
        least = -(-self.units // (LEAST_SHARE * self.ranks))
        self.least, self.most = least, MOST_SHARE * equal
        self.division = SpeedDivision(self.units, least, self.most, [0] * self.ranks, self.delay)
        self._coming: list[Counts] = [even_counts(self.units, self.ranks)] * (self.delay + 1)

    def time_of(self, count: int, slowness: float) -> float:
        equal = self.units / self.ranks
        return slowness * (self.fixed * equal + (1 - self.fixed) * equal * (count / equal) ** self.power)

    def run(self, steps: int, slowness: Sequence[float]) -> None:
        for _ in range(steps):
            counts = self._coming.pop(0)
            self.counts_by_step.append(counts)
            times = [
                int(1e6 * self.time_of(count, slow) * max(0.1, self._random.gauss(1, self.noise)))
                for count, slow in zip(counts, slowness, strict=True)
            ]
            if self.division.measured(counts, times):
                self.moves.append(len(self.counts_by_step) - 1)
            newest = self.division.counts or even_counts(self.units, self.ranks)
            assert sum(newest) == self.units
            assert all(self.least <= count <= self.most for count in newest)
            self._coming.append(newest)

    def longest(self, at: int, slowness: Sequence[float]) -> float:
        return max(map(self.time_of, self.counts_by_step[at], slowness))


SLOW = (1 / 0.3, 1.0, 1.0, 1.0)
EQUAL = (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("delay", [0, 4])
def test_a_throttled_worker_has_its_part_within_ten_steps_and_its_old_one_within_ten_steps_afterwards(
    delay: int,
) -> None:
    machine = Machine(4, delay=delay)
    machine.run(40, EQUAL)
    machine.run(40, SLOW)
    machine.run(40, EQUAL)
    assert machine.counts_by_step[40 + 10][0] == 23
    assert machine.longest(50, SLOW) <= 256 / 3.3 * 1.02
    assert machine.counts_by_step[80 + 10] == (64, 64, 64, 64)
    assert machine.moves == [42, 82]


@settings(deadline=None, max_examples=SCHEDULES)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(2, 9),
    noise=st.floats(0, 0.1),
    fixed=st.floats(0, 0.5),
    power=st.floats(0.7, 1.6),
    delay=st.integers(0, 6),
    slow=st.floats(1.0, 4.0),
)
def test_with_any_speeds_the_division_calms_down_and_is_better_than_an_even_one(
    seed: int, ranks: int, noise: float, fixed: float, power: float, delay: int, slow: float
) -> None:
    machine = Machine(ranks, 64 * ranks, noise, fixed, power, delay, seed)
    slowness = [slow, *[1.0] * (ranks - 1)]
    machine.run(400, slowness)
    late = [at for at in machine.moves if at >= 100]
    assert len(late) <= 12, machine.moves
    even = replace(machine, counts_by_step=[even_counts(machine.units, ranks)])
    assert machine.longest(-1, slowness) <= even.longest(0, slowness) * 1.15


@settings(deadline=None, max_examples=SCHEDULES)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 9), noise=st.floats(0, 0.1), slow=st.floats(1.5, 4.0))
def test_where_time_grows_with_the_samples_the_division_is_the_right_one_within_twelve_steps_and_stays(
    seed: int, ranks: int, noise: float, slow: float
) -> None:
    machine = Machine(ranks, 64 * ranks, noise, seed=seed)
    slowness = [slow, *[1.0] * (ranks - 1)]
    machine.run(40, [1.0] * ranks)
    machine.run(160, slowness)
    best = 64 * ranks / (ranks - 1 + 1 / slow)
    worst = max(machine.longest(at, slowness) for at in range(60, 200))
    assert worst <= best * (1.12 + 3 * noise), machine.moves
    assert len([at for at in machine.moves if at >= 60]) <= 8, machine.moves


def test_steps_that_take_long_by_chance_change_nothing() -> None:
    machine = Machine(4)
    machine.run(20, EQUAL)
    for _ in range(20):
        machine.run(1, (30.0, 1.0, 1.0, 1.0))
        machine.run(9, EQUAL)
    assert machine.moves == []


# A whole job ------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """What one worker knows: its loader's index stream, from which batches are taken ahead."""

    layout: BatchLayout
    ahead: int

    def __post_init__(self) -> None:
        self.balance = Balance(self.ahead)
        self.stream = IndexStream(self.layout, lambda epoch, positions: positions, self.balance.turns)
        self.prefetch = read_ahead(self.stream, self.ahead)

    def take(self) -> Batch:
        return self.prefetch.take()[0].batch


@st.composite
def layouts(draw: st.DrawFn) -> BatchLayout:
    least = draw(st.integers(1, 2))
    global_batch_size = draw(st.integers(6 * least, 60))
    size = draw(st.integers(global_batch_size, 300))
    fitting = [shards for shards in range(6, global_batch_size + 1) if global_batch_size % shards == 0]
    return BatchLayout(
        size,
        global_batch_size,
        draw(st.none() | st.integers(2 * least - 1, 20)),
        least,
        draw(st.sampled_from(["short", "carry", "drop"])),
        draw(st.sampled_from([0, 0, *fitting])),
        is_balanced=True,
    )


@settings(deadline=None, max_examples=SCHEDULES)
@given(layouts(), st.integers(0, 2**32))
def test_every_sample_is_trained_once_whatever_was_fetched_ahead_and_whoever_comes_and_goes(
    layout: BatchLayout, seed: int
) -> None:
    chance = random.Random(seed)
    epoch = cursor = 0
    workers: list[Worker] = []

    def regroup() -> None:
        survivors = [each for each in workers if chance.random() < 0.7]
        joined = [Worker(layout, chance.randrange(6)) for _ in range(chance.randint(0, 6 - len(survivors)))]
        workers[:] = (survivors + joined) or [Worker(layout, 0)]
        notes = [each.balance.note() for each in workers]
        for rank, each in enumerate(workers):
            each.balance.begin(layout, notes, rank)
            each.stream.restart(layout, epoch, cursor, rank, len(workers))

    regroup()
    speeds = [1.0] * 6
    for _ in range(60):
        if cursor >= layout.end:
            epoch, cursor = epoch + 1, layout.next_epoch(cursor)
            for rank, each in enumerate(workers):
                each.stream.restart(layout, epoch, cursor, rank, len(workers))
        if chance.random() < 0.1:
            speeds = [chance.choice([0.3, 1.0, 1.0, 2.0]) for _ in range(6)]
        if chance.random() < 0.05:
            regroup()
        start, stop = global_batch_range(layout, cursor)
        handed_out: list[list[Batch]] = []
        for each in workers:
            each.balance.handing_out()
            bodies = [each.take()]
            while not bodies[-1].is_last:
                bodies.append(each.take())
            handed_out.append(bodies)
        trained = [p for bodies in handed_out for batch in bodies for p in range(batch.low, batch.high)]
        assert trained == list(range(start, stop))
        assert {(batch.global_batch.epoch, batch.global_batch.start) for each in handed_out for batch in each} == {
            (epoch, start)
        }
        for bodies in handed_out:
            for batch in bodies:
                assert batch.is_dummy or batch.samples >= min(layout.min_local_batch, stop - start)
                assert layout.shards or layout.max_local_batch is None or batch.samples <= layout.max_local_batch
        if chance.random() < 0.05:  # a fault before the step is decided: the same global batch comes again
            regroup()
            continue
        samples = [bodies[0].global_batch.samples for bodies in handed_out]
        times = [
            int(1e6 * count / speed * chance.uniform(0.95, 1.05))
            for count, speed in zip(samples, speeds[: len(samples)], strict=True)
        ]
        answers = set()
        for bodies, each in zip(handed_out, workers, strict=True):
            if len(workers) > 1:
                each.balance.agreed(samples, times)
            has_moved = each.balance.decided(layout, bodies[0].global_batch)
            answers.add((has_moved, each.balance.turns.at, each.balance.turns.of(epoch + 9, 0)))
            if has_moved:
                each.stream.turn()
        assert len(answers) == 1
        event("changes" if answers.pop()[0] else "stays")
        cursor = stop


# The gradient -----------------------------------------------------------------------------------------------


def train(rank: int, data: Sequences, kind: str, counts: Counts, **sizes: Any) -> list[list[torch.Tensor]]:
    """The gradients of each global batch of an epoch, where every rank has `counts` of its samples."""
    model = net()
    loss = "sum" if kind == "sum" else "mean"
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), loss=loss)
    loader = fd.elastic.DataLoader(data, seed=7, balance="auto", **sizes)
    assert loader.balance is not None
    loader.balance.turns.reset(counts if len(counts) > 1 else ())
    loader.set_world(rank, len(counts))
    step.on_decided(lambda batch: loader.commit(batch.global_batch))
    seen = []
    for x, y, tokens in loader:
        optimizer.zero_grad()
        if kind == "tokens":
            fd.weight(int(tokens.sum()))
        loss_of(kind, model, x, y, tokens).backward()
        if len(counts) > 1 and loader.global_batch.global_samples == sizes["global_batch_size"]:
            assert loader.global_batch.samples == counts[rank]
        if optimizer.step():
            seen.append([parameter.grad.clone() for parameter in model.parameters()])
    return seen


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    size=st.integers(0, 20),
    kind=st.sampled_from(["mean", "sum", "tokens"]),
    most=st.none() | st.integers(1, 4),
)
def test_the_gradient_of_unequal_local_batches_is_that_of_the_global_batch(
    counts: list[int], size: int, kind: str, most: int | None
) -> None:
    data = Sequences(sum(counts) + size)
    sizes = {"global_batch_size": sum(counts), "max_local_batch": most}
    alone = run_workers(1, lambda rank: train(rank, data, kind, (sum(counts),), **sizes))[0]
    for found in run_workers(len(counts), lambda rank: train(rank, data, kind, tuple(counts), **sizes)):
        assert len(found) == len(alone) == -(-len(data) // sum(counts))
        for one, other in zip(found, alone, strict=True):
            for ours, theirs in zip(one, other, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_short_last_batch_is_divided_in_proportion_and_evenly_where_parts_would_be_too_small() -> None:
    layout = BatchLayout(100, 40, min_local_batch=2, is_balanced=True)

    def parts(counts: Counts) -> Iterator[int]:
        for rank in range(len(counts)):
            yield make_global_batch(layout, 0, 80, rank, len(counts), counts).samples

    assert list(parts((10, 20, 10))) == [5, 10, 5]
    assert list(parts((19, 19, 2))) == [6, 7, 7]
    whole = [make_global_batch(layout, 0, 40, rank, 3, (19, 19, 2)) for rank in range(3)]
    assert [sum(batch.samples for batch in batches(each, 2)) for each in whole] == [19, 19, 2]
