"""Every sample exactly once per epoch, under any schedule of faults, joins, leaves, saves and loads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from farandole.errors import DataError, StepError
from farandole.training.data.elastic_loader import LoaderHooks
from farandole.training.data.grouped_order import Bucketed, ShardLocal, Stratified, Weighted
from farandole.training.data.index_stream import IndexStream
from farandole.training.data.loader import DataLoader
from farandole.training.data.partition import (
    BatchLayout,
    batches,
    even_slice,
    global_batch_range,
    make_global_batch,
    micro_batches,
)
from farandole.training.data.permutation import Permutation
from farandole.training.data.sample_order import Order, Sequential, Shuffled
from farandole.training.state import step
from tests.support.read_ahead import read_ahead

EPOCHS = 2
SCHEDULES = int(os.environ.get("DATA_SCHEDULES", "300"))  # `make schedules` runs 100,000
no_deadline = settings(deadline=None)  # a busy machine is not a failure
sizes = st.one_of(
    st.integers(1, 300),
    st.integers(1, 12).flatmap(lambda k: st.sampled_from([2**k - 1, 2**k, 2**k + 1])),
    st.integers(1, 6).map(lambda k: 4**k + 1),
)
huge_sizes = st.one_of(st.integers(1, 2**62), st.integers(1, 62).map(lambda k: 2**k))
seeds = st.integers(0, 2**64 - 1)


@st.composite
def layouts(draw: st.DrawFn) -> BatchLayout:
    size = draw(st.integers(1, 40))
    global_batch_size = draw(st.integers(1, size))
    min_local_batch = draw(st.integers(1, min(3, global_batch_size)))
    max_local_batch = draw(st.none() | st.integers(2 * min_local_batch - 1, 12))
    return BatchLayout(
        size, global_batch_size, max_local_batch, min_local_batch, draw(st.sampled_from(["short", "carry", "drop"]))
    )


def orders(layout: BatchLayout) -> st.SearchStrategy[Order]:
    """Orders for a data set of layout.size samples."""
    size = layout.size
    numbers = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    kinds = [
        st.just(Shuffled()),
        st.just(Sequential()),
        numbers.map(lambda weights: Weighted([1 + weight for weight in weights])),
        numbers.map(Stratified),
        st.sets(st.integers(0, size), max_size=6).map(
            lambda cuts: ShardLocal([size for size in np.diff(sorted({0, *cuts, size})).tolist() if size])
        ),
    ]
    if layout.tail != "carry":
        kinds.append(st.builds(Bucketed, numbers, st.integers(1, 4)))
    return st.one_of(*kinds)


@st.composite
def ordered_layouts(draw: st.DrawFn) -> tuple[BatchLayout, Order]:
    layout = draw(layouts())
    return layout, draw(orders(layout))


# The order --------------------------------------------------------------------------------------------------


@no_deadline
@given(sizes, seeds, seeds)
def test_every_order_is_a_bijection_and_inverse_takes_it_back(size: int, seed: int, epoch: int) -> None:
    positions = np.arange(size)
    order = Permutation(size, seed, epoch)
    indices = order(positions)
    assert np.array_equal(np.sort(indices), positions)
    assert np.array_equal(order.inverse(indices), positions)


@no_deadline
@given(huge_sizes, seeds, st.data())
def test_huge_orders_stay_in_range_and_can_be_inverted(size: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=np.int64)
    order = Permutation(size, seed, 0)
    indices = order(positions)
    assert indices.dtype == np.int64
    assert all(0 <= index < size for index in indices.tolist())
    assert np.array_equal(order.inverse(indices), positions)


@no_deadline
@given(huge_sizes, seeds, st.data())
def test_one_position_at_a_time_gives_the_same_as_many(size: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=np.int64)
    order = Permutation(size, seed, 1)
    assert order(positions).tolist() == [order.sample_at(int(position)) for position in positions]


@settings(no_deadline, max_examples=500)
@given(ordered_layouts(), seeds, st.integers(0, 2**40), st.data())
def test_every_order_has_random_access_and_each_sample_once_unless_it_draws_them(
    made: tuple[BatchLayout, Order], seed: int, epoch: int, data: st.DataObject
) -> None:
    layout, order = made
    look_up = order.bind(layout, seed)
    positions = np.arange(layout.end)
    samples = look_up(epoch, positions)
    if isinstance(order, Weighted):
        assert ((samples >= 0) & (samples < layout.size)).all()
    else:
        assert len(set(samples.tolist())) == layout.end
        assert layout.tail == "drop" or np.array_equal(np.sort(samples), positions)
    asked = np.array(data.draw(st.lists(st.sampled_from(positions.tolist() or [0]), max_size=9)), dtype=np.int64)
    if layout.end:
        assert np.array_equal(order.bind(layout, seed)(epoch, asked), samples[asked])


# The division -----------------------------------------------------------------------------------------------


@no_deadline
@given(st.integers(0, 1000), st.integers(0, 100), st.integers(1, 20), st.integers(1, 4))
def test_shares_are_disjoint_cover_everything_and_differ_by_at_most_one(
    start: int, samples: int, parts: int, min_local_batch: int
) -> None:
    slices = [even_slice(start, start + samples, part, parts, min_local_batch) for part in range(parts)]
    assert [p for low, high in slices for p in range(low, high)] == list(range(start, start + samples))
    lengths = [high - low for low, high in slices]
    if min_local_batch == 1:
        assert max(lengths) - min(lengths) <= 1
    else:
        filled = [length for length in lengths if length]
        assert not filled or max(filled) - min(filled) <= 1
        assert samples < min_local_batch or min(filled) >= min_local_batch


@no_deadline
@given(layouts(), st.integers(1, 9), st.integers(0, 39))
def test_micro_batches_respect_both_limits_and_are_equally_many_on_all_ranks(
    layout: BatchLayout, world: int, at: int
) -> None:
    cursor = at % layout.end
    global_batches = [make_global_batch(layout, 0, cursor, rank, world) for rank in range(world)]
    all_batches = [batches(global_batch, layout.min_local_batch) for global_batch in global_batches]
    start, stop = global_batch_range(layout, cursor)
    count = micro_batches(start, stop, world, layout.max_local_batch, layout.min_local_batch)
    assert {len(each) for each in all_batches} == {count}
    flat = [batch for each in all_batches for batch in each]
    assert [p for batch in flat for p in range(batch.low, batch.high)] == list(range(start, stop))
    assert [batch.is_last for batch in all_batches[0]] == [False] * (count - 1) + [True]
    for batch in flat:
        assert layout.max_local_batch is None or batch.samples <= layout.max_local_batch
        assert batch.is_dummy or batch.samples >= min(layout.min_local_batch, stop - start)


@no_deadline
@given(layouts(), st.integers(1, 9), st.integers(0, 39), st.integers(0, 2**32))
def test_the_weighted_gradients_of_all_ranks_add_up_to_that_of_the_global_batch(
    layout: BatchLayout, world: int, at: int, seed: int
) -> None:
    gradients = np.random.default_rng(seed).normal(
        size=(2 * layout.size, 3)
    )  # a global batch may reach over the border
    total = np.zeros(3)
    for rank in range(world):
        global_batch = make_global_batch(layout, 0, at % layout.end, rank, world)
        for batch in batches(global_batch, layout.min_local_batch):
            if not batch.is_dummy:
                total += batch.weight * gradients[batch.low : batch.high].mean(axis=0)
    np.testing.assert_allclose(
        total, gradients[global_batch.start : global_batch.stop].mean(axis=0), rtol=0, atol=1e-13
    )


# Prefetching ------------------------------------------------------------------------------------------------


@settings(no_deadline, max_examples=200)
@given(layouts(), st.integers(0, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), max_size=12))
def test_after_a_restart_nothing_of_the_old_deal_is_delivered_however_much_was_fetched(
    layout: BatchLayout, depth: int, restarts: list[tuple[int, int]]
) -> None:
    index_stream = IndexStream(layout, lambda epoch, positions: positions)
    prefetch = read_ahead(index_stream, depth)
    epoch = cursor = 0
    for takes, world in restarts:
        index_stream.restart(layout, epoch, cursor, world - 1, world)
        for _ in range(takes):
            if cursor >= layout.end:
                assert all(each.batch.global_batch.epoch == epoch for each in index_stream.on_way)
                epoch, cursor = epoch + 1, layout.next_epoch(cursor)
                index_stream.restart(layout, epoch, cursor, world - 1, world)
            global_batch = make_global_batch(layout, epoch, cursor, world - 1, world)
            for batch in batches(global_batch, layout.min_local_batch):
                assert prefetch.take()[0].batch == batch
            cursor = global_batch.stop


# A whole job ------------------------------------------------------------------------------------------------


class Numbers:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Worker(LoaderHooks):
    """A training loop as a user writes it, which stops for the simulation at every batch and after every
    epoch. It is the hooks of its own loader."""

    def __init__(self, layout: BatchLayout, order: Order, seed: int) -> None:
        self.all_advance = True
        self.loader = DataLoader(
            Numbers(layout.size),
            layout.global_batch_size,
            seed=seed,
            order=order,
            tail=layout.tail,
            collate_fn=list,
            max_local_batch=layout.max_local_batch,
            min_local_batch=layout.min_local_batch,
        )
        self.loader.hooks = self
        self.run = self._train()

    def _train(self) -> Iterator[str]:
        for _ in self.loader.epochs(EPOCHS):
            for samples in self.loader:
                batch = self.loader.batch
                assert batch is not None
                assert samples
                assert self.loader.indices == ([] if batch.is_dummy else samples)
                if step.is_rehearsal():  # behind the last batch, where workers have regrouped
                    assert self.loader.is_over
                    step.close()  # it is one for all of these workers
                    continue
                yield "batch"
            yield "tail"

    def reach_epoch_end(self) -> bool:
        return self.all_advance

    @property
    def place(self) -> tuple[int, int]:
        return self.loader.epoch, self.loader.cursor

    def resume(self) -> str:
        """Run to the next global batch's last micro-batch, to the tail of the epoch, or to the end."""
        where = next(self.run, "end")
        self.samples = list(self.loader.indices)
        self.loop_bodies = 1
        while where == "batch" and not self.loader.batch.is_last:
            next(self.run)
            self.samples += self.loader.indices
            self.loop_bodies += 1
        self.all_advance = True
        return where


@dataclass
class Event:
    """What happens at a batch, or in the tail of an epoch. After all but "step" there are `world` workers.

    step     nothing: all workers make the step, or advance to the next epoch
    fault    no worker has done so when some are lost
    uneven   `done` workers have
    planned  all have
    save     none has; the job ends, and starts again from the state it saved
    """

    kind: str
    world: int = 1
    lost: int = 0  # a bit for each rank
    done: int = 0


class Simulation:
    """A job in lockstep. `applied` holds epoch and samples of each decided step."""

    def __init__(self, layout: BatchLayout, order: Order, seed: int, world: int) -> None:
        self.make = lambda: Worker(layout, order, seed)
        self.applied: list[tuple[int, list[int]]] = []
        self.workers = [self.make() for _ in range(world)]
        self._set_world()

    def run(self, schedule: list[Event]) -> None:
        for event in chain(schedule, repeat(Event("step"))):
            (where,) = {worker.resume() for worker in self.workers}
            if where == "end":
                return
            place = self.workers[0].place
            samples = self._handed_out() if where == "batch" else []
            self._complete(event, where)
            if event.kind != "step":
                self._regroup(event)
            if where == "batch" and self.workers[0].place != place:
                self.applied.append((place[0], samples))
            self._all_hold_the_same_small_state()

    def _handed_out(self) -> list[int]:
        assert len({worker.loop_bodies for worker in self.workers}) == 1
        samples = [index for worker in self.workers for index in worker.samples]
        global_batch = self.workers[0].loader.global_batch
        assert global_batch is not None
        assert len(samples) == global_batch.global_samples
        return samples

    def _complete(self, event: Event, where: str) -> None:
        """Those workers that get so far make the step, or advance to the next epoch."""
        everybody = len(self.workers)
        count = {"step": everybody, "planned": everybody, "uneven": event.done}.get(event.kind, 0)
        for worker in self.workers[:count]:
            if where == "batch":
                worker.loader.commit(worker.loader.global_batch)
            elif event.kind != "step":
                worker.resume()

    def _regroup(self, event: Event) -> None:
        """Some workers are lost, new ones take the lowest ranks; all get the state of the furthest one."""
        survivors = [worker for rank, worker in enumerate(self.workers) if not event.lost >> rank & 1]
        survivors = (survivors or self.workers[-1:])[: event.world]
        state = max(survivors, key=lambda worker: worker.place).loader.state_dict()
        if event.kind == "save":
            survivors = []
        joined = [self.make() for _ in range(event.world - len(survivors))]
        self.workers = joined + survivors
        for worker in self.workers:
            worker.loader.load_state_dict(state)
            worker.all_advance = False
        self._set_world()

    def _set_world(self) -> None:
        for rank, worker in enumerate(self.workers):
            worker.loader.set_world(rank, len(self.workers))

    def _all_hold_the_same_small_state(self) -> None:
        states = [worker.loader.state_dict() for worker in self.workers]
        assert all(state == states[0] for state in states)


events = st.builds(
    Event,
    kind=st.sampled_from(["step", "step", "fault", "uneven", "planned", "save"]),
    world=st.integers(1, 5),
    lost=st.integers(0, 31),
    done=st.integers(0, 5),
)


@pytest.mark.timeout(max(120, SCHEDULES // 20))
@settings(no_deadline, max_examples=SCHEDULES)
@given(ordered_layouts(), seeds, st.integers(1, 5), st.lists(events, max_size=20))
def test_every_step_has_the_same_samples_whatever_happens_and_every_epoch_all_of_them_once(
    made: tuple[BatchLayout, Order], seed: int, world: int, schedule: list[Event]
) -> None:
    layout, order = made
    job = Simulation(layout, order, seed, world)
    try:
        job.run(schedule)
    finally:
        step.close()
    # One sequence of samples for all epochs, of which each step takes the next ones.
    look_up, positions = order.bind(layout, seed), np.arange(layout.end)
    sequence = [(epoch, sample) for epoch in range(EPOCHS + 1) for sample in look_up(epoch, positions).tolist()]
    undisturbed, at = [], 0
    while at < EPOCHS * layout.end:
        epoch = sequence[at][0]
        until = at + layout.global_batch_size
        if layout.tail != "carry":
            until = min(until, (epoch + 1) * layout.end)
        undisturbed.append((epoch, [sample for _, sample in sequence[at:until]]))
        at = until
    assert job.applied == undisturbed
    if not isinstance(order, Weighted):
        taken = Counter(sequence[:at])
        assert max(taken.values()) == 1
        assert all(len({s for e, s in taken if e == epoch}) == layout.end for epoch in range(EPOCHS))


@no_deadline
@given(ordered_layouts(), seeds, st.lists(st.sampled_from(["fetch", "commit", "again", "other"]), max_size=30))
def test_fetching_moves_nothing_and_only_the_next_ticket_can_be_committed(
    made: tuple[BatchLayout, Order], seed: int, actions: list[str]
) -> None:
    layout, order = made
    loader = DataLoader(Numbers(layout.size), layout.global_batch_size, seed=seed, order=order, tail=layout.tail)
    global_batches = [make_global_batch(layout, 0, 0, 0, 1)]
    while global_batches[-1].stop < layout.end:
        global_batches.append(make_global_batch(layout, 0, global_batches[-1].stop, 0, 1))
    done = 0
    for action in actions:
        before = loader.state_dict()
        if action == "fetch":
            if loader.record.is_through:
                with pytest.raises(StepError, match="all batches of epoch 0 are trained"):
                    iter(loader)
            else:
                next(iter(loader), None)
        elif action == "commit" and done < len(global_batches):
            loader.commit(global_batches[done])
            done += 1
            assert loader.cursor == global_batches[done - 1].stop
            continue
        else:
            wrong = global_batches[:done] if action == "again" else global_batches[done + 1 :]
            for global_batch in wrong:
                with pytest.raises(DataError, match="commit each global batch once, in order"):
                    loader.commit(global_batch)
        assert loader.state_dict() == before
    step.close()


@no_deadline
@given(huge_sizes, seeds, st.integers(0, 2**40), st.data())
def test_the_saved_state_is_a_few_integers_for_any_size(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    loader = DataLoader(Numbers(size), data.draw(st.integers(1, size)), seed=seed)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "cursor": data.draw(st.integers(0, size))})
    assert len(msgspec.msgpack.encode(loader.state_dict())) <= 128
