"""Horovod's sampler as its scripts use it, in both of its generations."""

from __future__ import annotations

import copy
import gc
import tracemalloc
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from farandole.base.membership import GenerationId, Placement
from farandole.errors import DataError, NotInitialized
from farandole.integrations.horovod.sampler import ElasticSampler
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport

pytestmark = pytest.mark.core


def enter(rank: int, size: int) -> None:
    nobody = GenerationId(run_id=1, coordinator_epoch=1, number=0, nonce="alone")
    world.enter(world.World(nobody, Placement(rank, size, rank, size, 0, 1), AloneTransport()))


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    enter(0, 1)
    yield
    world.enter(None)


def samplers(size: int, ranks: int, **options: Any) -> list[ElasticSampler]:
    """One for each rank."""
    made = []
    for rank in range(ranks):
        enter(rank, ranks)
        made.append(ElasticSampler(range(size), **options))
    return made


def test_before_init_it_says_what_to_call() -> None:
    world.enter(None)
    with pytest.raises(NotInitialized, match="init"):
        ElasticSampler(range(8))


def test_the_ranks_take_turns() -> None:
    every = samplers(10, 3, shuffle=False)
    assert [list(sampler) for sampler in every] == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    assert [(len(s), s.num_samples, s.total_size, s.rank, s.num_replicas) for s in every] == [
        (4, 4, 12, rank, 3) for rank in range(3)
    ]


@pytest.mark.parametrize(("size", "ranks"), [(1, 4), (3, 8), (5, 16), (7, 3), (1, 1)])
def test_there_may_be_fewer_samples_than_ranks(size: int, ranks: int) -> None:
    handed_out = [list(sampler) for sampler in samplers(size, ranks)]
    assert {len(share) for share in handed_out} == {-(-size // ranks)}
    assert {sample for share in handed_out for sample in share} == set(range(size))


def test_there_may_be_no_samples() -> None:
    for sampler in samplers(0, 2):
        sampler.record_batch(0, 4)
        assert (list(sampler), len(sampler), sampler.processed_num, sampler.remaining_indices) == ([], 0, 0, [])


def test_each_epoch_has_an_order_of_its_own_and_seed_1_is_not_seed_0_one_epoch_later() -> None:
    orders = set()
    for seed in range(3):
        sampler = ElasticSampler(range(50), seed=seed)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.add(tuple(sampler))
    assert len(orders) == 9


def test_without_shuffle_the_order_is_that_of_the_data_set() -> None:
    sampler = ElasticSampler(range(5), shuffle=False)
    sampler.set_epoch(3)
    assert list(sampler) == [0, 1, 2, 3, 4]


def test_what_is_recorded_shows_at_once_and_changes_what_is_handed_out_at_a_reset_only() -> None:
    sampler = ElasticSampler(range(8), shuffle=False)
    sampler.record_batch(0, 3)
    assert sampler.processed_num == 3
    assert list(sampler) == list(sampler) == list(range(8))
    assert len(sampler) == 8
    sampler.reset()
    assert (list(sampler), len(sampler), sampler.processed_num) == ([3, 4, 5, 6, 7], 5, 3)


def test_an_iterator_goes_on_as_it_began() -> None:
    sampler = ElasticSampler(range(6), shuffle=False)
    begun = iter(sampler)
    sampler.record_batch(0, 4)
    sampler.reset()
    assert list(begun) == list(range(6))


def test_a_short_last_batch_counts_as_what_it_is() -> None:
    for sampler in samplers(10, 3):
        for batch in range(2):
            sampler.record_batch(batch, 3)
        assert sampler.processed_num == 10
        sampler.reset()
        assert list(sampler) == []


def test_when_the_ranks_change_what_is_left_is_divided_anew() -> None:
    (sampler, *_) = samplers(12, 2, shuffle=False)
    sampler.record_batch(0, 2)
    for rank, share in enumerate(([4, 7, 10], [5, 8, 11], [6, 9, 4])):
        enter(rank, 3)
        sampler.reset()
        assert list(sampler) == share
        assert (sampler.rank, sampler.num_replicas, len(sampler)) == (rank, 3, 3)


def test_the_number_survives_as_horovod_saved_it() -> None:
    sampler = ElasticSampler(range(10))
    whole = list(sampler)
    sampler.load_state_dict({"epoch": 0, "processed_num": 4})
    assert (list(sampler), sampler.processed_num, sampler.epoch) == (whole[4:], 4, 0)
    assert sampler.state_dict()["processed_num"] == 4


def test_sets_survive_as_horovod_saved_them() -> None:
    sampler = ElasticSampler(range(10))
    sampler.set_epoch(2)
    whole = list(sampler)
    done = {whole[0], whole[1], whole[5], whole[9]}
    sampler.set_epoch(0)
    sampler.load_state_dict({"epoch": 2, "processed_indices": done})
    assert list(sampler) == sampler.remaining_indices == [sample for sample in whole if sample not in done]
    assert sampler.processed_indices == done
    assert sampler.state_dict()["processed_indices"] == done
    assert sampler.processed_num == 4


def test_batches_are_recorded_by_their_samples_too() -> None:
    every = samplers(20, 2)
    for sampler in every:
        for batch in range(2):
            sampler.record_indices(sampler.get_indices(batch, 3))
            sampler.record_indices(torch.tensor(sampler.get_indices(batch, 3)))  # twice is once
        assert sampler.get_indices(9, 3) == []
        assert sampler.processed_indices == set(list(sampler)[:6])
        assert sampler.processed_num == 6
    first = every[0]
    whole = first.remaining_indices
    first.load_state_dict(first.merge([sampler.state_dict() for sampler in every]))
    assert first.remaining_indices == whole[12:]
    assert first.processed_num == 12


def test_both_ways_of_recording_add_up() -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_batch(0, 3)
    sampler.record_indices([1, 2, 3, 7])
    assert sampler.processed_indices == {0, 1, 2, 3, 7}
    assert sampler.processed_num == 5
    sampler.reset()
    sampler.record_batch(0, 2)
    assert sampler.processed_indices == {0, 1, 2, 3, 4, 5, 7}
    sampler.reset()
    assert list(sampler) == [6, 8, 9]


def test_states_of_several_ranks_say_together_what_the_newest_epoch_says() -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_batch(0, 7)
    before = copy.deepcopy(sampler.state_dict())
    counted = [{"epoch": 3, "processed_num": 2}, {"epoch": 0, "processed_num": 9}, {"epoch": 3, "processed_num": 5}]
    assert sampler.merge(counted) == before | {"epoch": 3, "processed_num": 5}
    named: list[dict[str, Any]] = [{"epoch": 3, "processed_indices": {8}}, {"epoch": 3, "processed_num": 2}]
    assert sampler.merge(named)["processed_indices"] == {0, 1, 8}
    assert sampler.state_dict() == before


def test_a_state_is_not_changed_by_what_is_recorded_later() -> None:
    sampler = ElasticSampler(range(10))
    sampler.record_indices([1, 2])
    state = sampler.state_dict()
    sampler.record_indices([3])
    sampler.load_state_dict(state)
    assert sampler.processed_indices == {1, 2}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"epoch": 0, "processed_num": 11}, r"processed_num must be in 0..10, .* got 11"),
        ({"epoch": 0, "processed_num": -1}, "got -1"),
        ({"epoch": -1, "processed_num": 0}, "epoch must be in"),
        ({"epoch": 0, "processed_indices": {3, 10}}, r"expected samples in \[0, 10\), got 3..10"),
        ({"epoch": 0, "processed_num": 0, "size": 12}, "saved sampler has size=12, this one 10"),
        ({"epoch": 0, "processed_num": 0, "seed": 1}, "saved sampler has seed=1, this one 0"),
    ],
)
def test_a_state_that_cannot_be_meant_is_refused_and_changes_nothing(state: dict[str, Any], reason: str) -> None:
    sampler = ElasticSampler(range(10))
    sampler.set_epoch(1)
    sampler.record_batch(0, 2)
    before, handed_out = sampler.state_dict(), list(sampler)
    with pytest.raises(DataError, match=reason):
        sampler.load_state_dict(state)
    assert (sampler.state_dict(), list(sampler)) == (before, handed_out)


def test_a_number_of_ones_own_is_for_the_next_reset() -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_batch(0, 3)
    sampler.processed_num = 8
    assert sampler.processed_num == 8
    sampler.reset()
    assert list(sampler) == [8, 9]


def test_the_size_of_the_data_set_costs_nothing() -> None:
    class Huge:
        def __len__(self) -> int:
            return 10**12

    tracemalloc.start()
    sampler = ElasticSampler(Huge())
    sampler.record_batch(0, 10**11)
    sampler.set_epoch(1)
    sampler.record_batch(0, 10**11)
    sampler.reset()
    assert len(sampler) == 9 * 10**11
    assert len(set(islice(sampler, 2000))) == 2000
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_data_loader_hands_out_what_it_says() -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    loader: DataLoader[torch.Tensor] = DataLoader(torch.arange(10), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampler.record_batch(0, 4)
    sampler.reset()
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [8, 9]]


def test_what_the_ranks_do_not_divide_begins_the_next_epoch() -> None:
    every = samplers(5, 2, shuffle=False, pad="carry")
    assert [list(sampler) for sampler in every] == [[0, 2], [1, 3]]
    for rank, sampler in enumerate(every):
        sampler.record_batch(0, 2)
        enter(rank, 2)
        sampler.set_epoch(1)
    assert [list(sampler) for sampler in every] == [[4, 1, 3], [0, 2, 4]]
    assert every[0].state_dict()["carried"] == [[-1, 0]]


def test_with_fewer_samples_than_ranks_they_are_carried_until_there_are_enough() -> None:
    enter(0, 5)
    sampler = ElasticSampler(range(2), shuffle=False, pad="carry")
    assert [len(sampler), sampler.set_epoch(1), len(sampler), sampler.set_epoch(2), len(sampler)] == [
        0,
        None,
        0,
        None,
        1,
    ]
    assert sampler.remaining_indices == [0, 1, 0, 1, 0, 1]


def test_an_epoch_that_was_skipped_carries_nothing_and_one_begun_again_carries_the_same() -> None:
    enter(0, 2)
    sampler = ElasticSampler(range(5), shuffle=False, pad="carry")
    sampler.set_epoch(3)
    assert sampler.remaining_indices == [0, 1, 2, 3, 4]
    sampler.record_batch(0, 5)
    sampler.set_epoch(4)
    sampler.set_epoch(4)
    assert sampler.remaining_indices == [4, 0, 1, 2, 3, 4]
    sampler.set_epoch(2)
    assert sampler.remaining_indices == [0, 1, 2, 3, 4]


def test_carrying_takes_horovods_states_of_both_forms_and_refuses_what_it_cannot_follow() -> None:
    sampler = ElasticSampler(range(6), shuffle=False, pad="carry")
    sampler.load_state_dict({"epoch": 1, "processed_num": 4})
    assert list(sampler) == [4, 5]
    sampler.load_state_dict({"epoch": 1, "processed_indices": {0, 4}})
    assert list(sampler) == [1, 2, 3, 5]
    with pytest.raises(DataError, match="record_batch"):
        sampler.record_indices([1])
    with pytest.raises(DataError, match="got False"):
        ElasticSampler(range(6), pad=False)


def test_a_loop_that_begins_anew_without_a_reset_counts_its_samples_once_and_says_so() -> None:
    sampler = ElasticSampler(range(20), shuffle=False)
    for batch, _ in zip(range(3), iter(sampler), strict=False):
        sampler.record_batch(batch, 4)
    iter(sampler)
    with pytest.warns(UserWarning, match="a second time"):
        sampler.record_batch(0, 4)
    for batch in (1, 2):
        sampler.record_batch(batch, 4)
    assert sampler.processed_num == 12
    sampler.record_batch(3, 4)
    assert sampler.processed_num == 16
    sampler.reset()
    assert list(sampler) == [16, 17, 18, 19]


def test_an_evaluation_on_the_same_loader_in_the_middle_of_an_epoch_changes_nothing() -> None:
    sampler = ElasticSampler(range(20), shuffle=False)
    sampler.record_batch(0, 4)
    list(sampler)
    sampler.record_batch(1, 4)
    assert sampler.processed_num == 8


def test_ranks_tell_each_other_which_samples_each_has_recorded() -> None:
    every = samplers(21, 3)
    for sampler in every:
        assert not sampler.has_news
        for batch in range(4):
            sampler.record_indices(sampler.get_indices(batch, 2))
        assert sampler.has_news
    told = [sampler.take_news() for sampler in every]
    for rank, sampler in enumerate(every):
        for other in {0, 1, 2} - {rank}:
            sampler.add_news(told[other])
        assert sampler.processed_indices == set(range(21))
        assert sampler.take_news() == []


def test_what_cannot_be_a_state_or_a_batch_is_refused() -> None:
    sampler = ElasticSampler(range(8))
    for state in ({}, {"epoch": 0}, {"processed_num": 1}):
        with pytest.raises(DataError, match="has epoch, and processed_num or processed_indices"):
            sampler.load_state_dict(state)
    with pytest.raises(DataError, match="got -1"):
        sampler.record_batch(0, -1)
    assert sampler.state_dict() == ElasticSampler(range(8)).state_dict()


@pytest.mark.parametrize("size", [90, 120])
@pytest.mark.parametrize("make", ["batch_size", "batch_sampler", "single samples", "torchdata"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_of_another_data_set_is_told_so_before_it_reads(make: str, size: int) -> None:
    sampler, dataset = ElasticSampler(range(100)), range(size)
    loaders = {
        "batch_size": lambda: DataLoader(dataset, 10, sampler=sampler),
        "batch_sampler": lambda: DataLoader(dataset, batch_sampler=BatchSampler(sampler, 10, False)),
        "single samples": lambda: DataLoader(dataset, None, sampler=sampler),
        "torchdata": lambda: StatefulDataLoader(dataset, 10, sampler=sampler),
    }
    with pytest.raises(DataError, match=f"made for 100 samples, but the data set of the DataLoader .* has {size}"):
        next(iter(loaders[make]()))
    assert sampler.processed_num == 0


@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_iterator_of_a_loader_ends_with_its_last_reference(loader_class: Any) -> None:
    """Not at the next garbage collection: see dataset_of_caller()."""
    loader = loader_class(range(8), sampler=ElasticSampler(range(8)))
    gc.disable()
    try:
        batches = iter(loader)
        next(batches)
        has_ended = weakref.ref(batches)
        del batches
        loader._iterator = None
        assert has_ended() is None
    finally:
        gc.enable()


def test_a_data_set_that_has_grown_is_refused_and_another_of_the_same_length_is_not() -> None:
    dataset = list(range(10))
    sampler = ElasticSampler(dataset)
    transformed = [str(sample) for sample in dataset]
    assert sorted(DataLoader(transformed, None, sampler=sampler)) == transformed
    dataset.append(10)
    with pytest.raises(DataError, match="made for 10 samples, but its data set has 11"):
        list(sampler)


def test_a_rank_sees_its_own_samples_as_a_list() -> None:
    for rank in range(3):
        enter(rank, 3)
        sampler = ElasticSampler(range(10), seed=4)
        assert sampler.indices == list(sampler)
        sampler.record_batch(0, 2)
        sampler.reset()
        assert sampler.indices == list(sampler)
        assert len(sampler.indices) == len(sampler) == 2
    world.enter(None)
