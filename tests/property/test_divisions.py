"""Whatever workers are lost, and wherever in a step or in a regroup: no row of a divided parameter is lost or stale."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

from farandole.integrations.sharding.division import Held, Plan, choose, lost, mirrors, pieces, rows_of, source_for

# Sizes, and pieces ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(1, 12))
def test_shards_have_the_rows_of_torch_chunk(rows: int, size: int) -> None:
    chunks = [each.tolist() for each in torch.arange(rows).chunk(size)] if rows else []
    assert [list(rows_of(rows, size, index)) for index in range(size)] == [*chunks, *[[]] * (size - len(chunks))]


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9))
def test_pieces_of_old_shards_make_up_each_new_shard_once_and_in_order(rows: int, old: int, new: int) -> None:
    for index in range(new):
        wanted, found = rows_of(rows, new, index), pieces(rows, old, rows_of(rows, new, index))
        assert [row for each in found for row in range(each.begin, each.end)] == list(wanted)
        for each in found:
            assert {each.begin, each.end - 1} <= set(rows_of(rows, old, each.shard))


# Any divisions -------------------------------------------------------------------------------------------------------


@st.composite
def held_by_ranks(draw: st.DrawFn) -> list[list[Held]]:
    """Draw up to two divisions for each of some ranks, whether or not such a history can be."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))

    def division(generation: int, shard: int, mirrors: bool, version: int) -> Held:
        size = sizes[generation]
        mirrored = (shard - 1) % size if mirrors and size > 1 else -1
        return Held(generation, size, shard % size, mirrored, version)

    one = st.builds(division, st.integers(0, 2), st.integers(0, 3), st.booleans(), st.integers(4, 5))
    worker = st.lists(one, max_size=2, unique_by=lambda each: each.generation)
    return draw(st.lists(worker, min_size=1, max_size=6).filter(any))


@given(held_by_ranks())
def test_a_plan_names_holders_of_the_last_version_and_is_missing_only_where_a_shard_has_no_holder(
    held: list[list[Held]],
) -> None:
    last = max(each.version for worker in held for each in worker)

    def holders(generation: int, shard: int) -> list[int]:
        return [
            rank
            for rank, worker in enumerate(held)
            for each in worker
            if (each.generation, each.version) == (generation, last) and shard in (each.shard, each.mirrored)
        ]

    plan = choose(held)
    if plan is None:
        for generation, size in {(each.generation, each.size) for worker in held for each in worker}:
            assert not all(holders(generation, shard) for shard in range(size))
        missing, count = lost(held)
        assert missing
        assert all(each in range(count) for each in missing)
        return
    assert plan.version == last
    for shard, source in enumerate(plan.sources):
        assert source.rank in holders(plan.generation, shard)
        for rank in range(len(held)):
            given_by = source_for(rank, shard, plan, held)
            assert given_by.rank == (rank if rank in holders(plan.generation, shard) else source.rank)


# Histories -----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    number: int
    version: int


@dataclass
class Division:
    """A division at a worker, with the rows of its shard and of its mirror."""

    held: Held
    own: list[Row]
    mirror: list[Row] = field(default_factory=list)

    def step(self) -> None:
        self.held = self.held._replace(version=self.held.version + 1)
        self.own = [Row(each.number, each.version + 1) for each in self.own]
        self.mirror = [Row(each.number, each.version + 1) for each in self.mirror]


class Worker:
    """What elastic_shards.py keeps, in plain lists."""

    def __init__(self) -> None:
        self.now: Division | None = None
        self.before: Division | None = None
        self.is_ready = False  # all gradients of a step are here, and it is not taken
        self.steps = 0  # of the state that all workers share

    def take_step(self) -> None:
        assert self.now is not None
        self.now.step()
        self.before, self.is_ready = None, False

    def divisions(self) -> list[Division]:
        return [each for each in (self.now, self.before) if each is not None]


class History:
    """A job of a parameter with some rows, whose workers are lost at any time."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.rows, self.generation = dice, dice.randint(0, 11), 1
        self.world = [Worker() for _ in range(dice.randint(1, 5))]
        self.safe: list[list[set[Worker]]] = []  # of divisions that must be usable: the holders of each shard
        for rank, worker in enumerate(self.world):
            held = Held(1, len(self.world), rank, -1, 0)
            worker.now = Division(held, [Row(each, 0) for each in self.rows_at(rank)])
        self.load_mirrors()
        self.is_whole = True  # all have their shards and their mirrors

    def rows_at(self, rank: int) -> range:
        return rows_of(self.rows, len(self.world), rank)

    def run(self) -> bool:
        """Return whether all shards lasted until the end."""
        for _ in range(self.dice.randint(3, 25)):
            if self.is_whole and self.dice.random() < 0.6:
                self.step()
            else:
                self.lose_and_join()
                if not self.regroup():
                    return False
        return True

    def step(self) -> None:
        """Take a step, all workers or some; then the next thing is a loss."""
        if self.dice.random() < 0.3:  # a collective fails before all are ready
            for worker in self.world:
                worker.is_ready = self.dice.random() < 0.5
            self.is_whole = False
            return
        taking = self.world if self.dice.random() < 0.5 else self.dice.sample(self.world, 1)
        for worker in self.world:
            worker.is_ready = True
            if worker in taking:
                worker.take_step()
                worker.steps += 1
        self.safe = self.safe[-1:]
        self.is_whole = taking is self.world

    def lose_and_join(self) -> None:
        stay = [each for each in self.world if self.dice.random() < 0.8] or [self.dice.choice(self.world)]
        join = [Worker() for _ in range(self.dice.choice([0, 0, 1, 2]))]
        self.world = [*stay, *join]
        self.dice.shuffle(self.world)
        self.is_whole = False

    def regroup(self) -> bool:
        """Go through a regroup, up to any point of it. Returns False where shards are lost."""
        self.generation += 1
        if not self.share_state():
            return True
        held = [[each.held for each in worker.divisions()] for worker in self.world]
        if not any(held):
            return False
        plan = choose(held)
        if plan is None:
            self.check_loss(held)
            return False
        self.safe = [self.holders_of(plan)]
        parts = self.redivided(plan, held)
        installing = self.some_or_all()
        for rank, worker in enumerate(self.world):
            if worker in installing:
                self.install(rank, worker, plan, parts[rank])
        if installing == self.world:
            self.load_mirrors()
        return True

    def share_state(self) -> bool:
        """Give the steps of the worker with the most to some or all others, which complete what they have begun.
        Returns whether all have them."""
        most, receiving = max(each.steps for each in self.world), self.some_or_all()
        for worker in receiving:
            if worker.now is None or worker.steps < most:
                if worker.now is not None:
                    assert worker.is_ready
                    worker.take_step()
                worker.steps = most
        return receiving == self.world

    def some_or_all(self) -> list[Worker]:
        return self.world if self.dice.random() < 0.6 else [each for each in self.world if self.dice.random() < 0.5]

    def redivided(self, plan: Plan, held: Sequence[Sequence[Held]]) -> list[list[Row]]:
        parts = []
        for rank in range(len(self.world)):
            part: list[Row] = []
            for piece in pieces(self.rows, plan.size, self.rows_at(rank)):
                source = source_for(rank, piece.shard, plan, held)
                found = next(e for e in self.world[source.rank].divisions() if e.held.generation == plan.generation)
                first = rows_of(self.rows, plan.size, piece.shard).start
                part += (found.mirror if source.is_mirror else found.own)[piece.begin - first : piece.end - first]
            parts.append(part)
        taken = max(each.held.version for worker in self.world for each in worker.divisions())
        assert [row for part in parts for row in part] == [Row(each, taken) for each in range(self.rows)]
        assert plan.version == taken
        return parts

    def install(self, rank: int, worker: Worker, plan: Plan, part: list[Row]) -> None:
        planned = (plan.generation, plan.version)
        kept = [each for each in worker.divisions() if (each.held.generation, each.held.version) == planned]
        worker.before = kept[0] if kept else None
        worker.now = Division(Held(self.generation, len(self.world), rank, -1, plan.version), part)
        worker.is_ready = False

    def load_mirrors(self) -> None:
        """Give mirrors to all workers or some, each from the one before it."""
        loading = self.some_or_all() if self.safe else self.world
        for rank, worker in enumerate(self.world):
            source, now = self.world[rank - 1].now, worker.now
            assert now is not None
            assert source is not None
            if worker in loading and len(self.world) > 1:
                now.held, now.mirror = now.held._replace(mirrored=source.held.shard), list(source.own)
        self.is_whole = loading == self.world
        if self.is_whole:
            size = len(self.world)
            self.safe.append([{self.world[rank], self.world[(rank + 1) % size]} for rank in range(size)])

    def holders_of(self, plan: Plan) -> list[set[Worker]]:
        holders: list[set[Worker]] = [set() for _ in range(plan.size)]
        for worker in self.world:
            for held in (each.held for each in worker.divisions()):
                if (held.generation, held.version) == (plan.generation, plan.version):
                    for shard in {held.shard, held.mirrored} - {-1}:
                        holders[shard].add(worker)
        return holders

    def check_loss(self, held: Sequence[Sequence[Held]]) -> None:
        """Check that of each division that was safe a shard has gone with all its holders."""
        there = set(self.world)
        assert not any(all(holders & there for holders in division) for division in self.safe)
        assert lost(held)[0]


@settings(max_examples=600)
@given(st.integers(0, 2**32))
def test_no_row_is_lost_or_stale_while_each_shard_has_a_holder(seed: int) -> None:
    History(random.Random(seed)).run()


def test_histories_of_both_ends_are_tried() -> None:
    ends = [History(random.Random(seed)).run() for seed in range(150)]
    assert 15 < sum(ends) < 135


@pytest.mark.parametrize(
    ("workers", "expected"),
    [([1], [0]), ([3], [1, 2, 0]), ([2, 2], [2, 3, 1, 0]), ([1, 1, 1], [1, 2, 0]), ([2, 1], [2, 0, 1])],
)
def test_a_shard_is_mirrored_on_another_host_where_hosts_have_as_many_workers(
    workers: list[int], expected: list[int]
) -> None:
    places = [(local, host) for host, count in enumerate(workers) for local in range(count)]
    assert mirrors(places) == expected
    hosts = [host for _, host in places]
    if len(set(workers)) == 1 < len(workers):
        assert all(hosts[rank] != hosts[by] for rank, by in enumerate(mirrors(places)))
