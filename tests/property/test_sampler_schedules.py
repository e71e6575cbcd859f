"""Whatever the ranks do, ElasticSampler hands out each sample once per epoch, up to the padding at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from farandole.base.membership import GenerationId, Placement
from farandole.integrations.horovod.sampler import ElasticSampler
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport

NOBODY = GenerationId(run_id=1, coordinator_epoch=1, number=0, nonce="alone")
no_deadline = settings(deadline=None)


@dataclass(frozen=True)
class Phase:
    """`batches` local batches on each rank, then the ranks change."""

    ranks: int
    batch_size: int
    batches: int


phases = st.lists(st.builds(Phase, st.integers(1, 6), st.integers(1, 5), st.integers(0, 6)), max_size=6)
sizes = st.integers(0, 90)


@pytest.fixture(autouse=True, scope="module")
def _leave_no_world() -> Iterator[None]:
    yield
    world.enter(None)


def in_worlds(samplers: list[ElasticSampler]) -> Iterator[ElasticSampler]:
    """Each of them, while its rank's world is the current one."""
    for rank, sampler in enumerate(samplers):
        enter(rank, len(samplers))
        yield sampler


def enter(rank: int, size: int) -> None:
    world.enter(world.World(NOBODY, Placement(rank, size, rank, size, 0, 1), AloneTransport()))


def regroup(samplers: list[ElasticSampler], ranks: int, size: int, seed: int, **options: Any) -> list[ElasticSampler]:
    """The old ranks that stay, and new ones, after a sync of what all the old ones know."""
    enter(0, 1)
    state = samplers[0].merge([sampler.state_dict() for sampler in samplers]) if samplers else None
    joined = [ElasticSampler(range(size), seed=seed, **options) for _ in range(ranks - len(samplers))]
    regrouped = [*joined, *samplers][:ranks]
    for sampler in in_worlds(regrouped):
        if state is not None:
            sampler.load_state_dict(state)
        else:
            sampler.reset()
    return regrouped


@no_deadline
@given(sizes, st.integers(0, 3), st.integers(0, 2), st.booleans(), phases, st.integers(1, 6))
def test_each_sample_is_trained_once_under_any_schedule(
    size: int, seed: int, epoch: int, by_index: bool, schedule: list[Phase], last_ranks: int
) -> None:
    enter(0, 1)
    trained: Counter[int] = Counter()
    samplers = [ElasticSampler(range(size), seed=seed)]
    samplers[0].set_epoch(epoch)
    for phase in [*schedule, Phase(last_ranks, 7, size + 1)]:
        samplers = regroup(samplers, phase.ranks, size, seed)
        before = samplers[0].processed_num
        shares = [list(sampler) for sampler in samplers]
        assert len({len(share) for share in shares}) == 1, "a rank makes more steps than another"
        for batch in range(phase.batches):
            low = batch * phase.batch_size
            for sampler, share in zip(samplers, shares, strict=True):
                samples = share[low : low + phase.batch_size]
                if not samples:
                    continue
                trained.update(samples)
                assert samples == sampler.get_indices(batch, phase.batch_size)
                if by_index:
                    sampler.record_indices(samples)
                else:
                    sampler.record_batch(batch, phase.batch_size)
        behind = min(size, before + phase.ranks * phase.batch_size * phase.batches)
        if not by_index:
            assert {sampler.processed_num for sampler in samplers} == {behind}
        assert len(trained) == behind
        assert {sampler.epoch for sampler in samplers} == {epoch}
    assert set(trained) == set(range(size))
    assert sum(trained.values()) - size <= 5, "more padded than the one phase that came to the end of the epoch may"


@no_deadline
@given(sizes, st.integers(1, 7), st.integers(0, 90), st.integers(0, 3))
def test_shares_cover_what_is_left_and_repeat_less_than_one_round(
    size: int, ranks: int, behind: int, epoch: int
) -> None:
    behind = min(behind, size)
    handed_out: Counter[int] = Counter()
    left: list[int] = []
    for rank in range(ranks):
        enter(rank, ranks)
        sampler = ElasticSampler(range(size))
        sampler.load_state_dict({"epoch": epoch, "processed_num": behind})
        handed_out.update(sampler)
        left = sampler.remaining_indices
        assert sampler.processed_indices.isdisjoint(left)
    assert set(handed_out) == set(left)
    assert len(left) == size - behind
    assert sum(handed_out.values()) - len(left) < ranks


@no_deadline
@given(sizes, st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_after_k_batches_of_every_rank_the_first_so_many_of_what_was_left_are_behind(
    size: int, ranks: int, batch_size: int, batches: int
) -> None:
    trained: set[int] = set()
    order: list[int] = []
    for rank in range(ranks):
        enter(rank, ranks)
        sampler = ElasticSampler(range(size))
        order = sampler.remaining_indices
        trained.update(*(sampler.get_indices(batch, batch_size) for batch in range(batches)))
    assert trained >= set(order[: ranks * batch_size * batches])
    assert len(trained) == min(size, ranks * batch_size * batches)


@no_deadline
@given(sizes, st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(0, 9))
def test_a_state_that_was_saved_goes_on_where_it_was_with_any_number_of_ranks(
    size: int, ranks: int, later_ranks: int, by_index: bool, batches: int
) -> None:
    enter(ranks - 1, ranks)
    sampler = ElasticSampler(range(size))
    for batch in range(batches):
        if by_index:
            sampler.record_indices(sampler.get_indices(batch, 2))
        else:
            sampler.record_batch(batch, 2)
    state = sampler.state_dict()
    enter(later_ranks - 1, later_ranks)
    other = ElasticSampler(range(size))
    other.load_state_dict(state)
    sampler.reset()
    assert list(other) == list(sampler)
    assert (other.processed_num, other.processed_indices) == (sampler.processed_num, sampler.processed_indices)
    assert other.state_dict() == state


def retire(samplers: list[ElasticSampler], trained: Counter[int], batch_size: int, batches: int) -> None:
    """Each rank trains so many batches, and records them."""
    shares = [list(sampler) for sampler in samplers]
    assert len({len(share) for share in shares}) == 1, "a rank makes more steps than another"
    for batch in range(batches):
        for sampler, share in zip(samplers, shares, strict=True):
            samples = share[batch * batch_size : (batch + 1) * batch_size]
            if samples:
                trained.update(samples)
                sampler.record_batch(batch, batch_size)


@no_deadline
@given(sizes, st.integers(0, 3), st.lists(st.tuples(phases, st.integers(1, 6)), min_size=1, max_size=4))
def test_carrying_trains_each_sample_once_per_epoch_up_to_what_the_next_one_begins_with(
    size: int, seed: int, epochs: list[tuple[list[Phase], int]]
) -> None:
    enter(0, 1)
    trained: Counter[int] = Counter()
    samplers = [ElasticSampler(range(size), seed=seed, pad="carry")]
    for epoch, (schedule, last_ranks) in enumerate(epochs):
        for phase in [*schedule, Phase(last_ranks, 7, 2 * size + 1)]:
            samplers = regroup(samplers, phase.ranks, size, seed, pad="carry")
            retire(samplers, trained, phase.batch_size, phase.batches)
        left = size * (epoch + 1) - sum(trained.values())
        assert 0 <= left < 6, "more is left than the ranks do not divide"
        for sampler in in_worlds(samplers):
            sampler.set_epoch(epoch + 1)
        carried = Counter(samplers[0].remaining_indices[:left])
        assert trained + carried == Counter(dict.fromkeys(range(size), epoch + 1)), "lost or repeated"
        assert len(samplers[0].state_dict()) <= 7, "the state grows"


@no_deadline
@given(st.integers(1, 60), st.integers(2, 6), st.integers(1, 5), st.integers(0, 9))
def test_a_state_with_carried_samples_goes_on_where_it_was(size: int, ranks: int, later: int, batches: int) -> None:
    enter(0, ranks)
    sampler = ElasticSampler(range(size), pad="carry")
    sampler.record_batch(0, size)
    sampler.set_epoch(1)
    sampler.record_batch(0, batches)
    state = sampler.state_dict()
    enter(0, later)
    other = ElasticSampler(range(size), pad="carry")
    other.load_state_dict(state)
    sampler.reset()
    assert (list(other), other.remaining_indices) == (list(sampler), sampler.remaining_indices)
    assert other.state_dict() == state
