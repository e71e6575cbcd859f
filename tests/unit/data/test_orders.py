"""The orders besides the shuffled one: what they promise, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from farandole.errors import ConfigError, DataError
from farandole.training.data.grouped_order import (
    Bucketed,
    ManyPermutations,
    ShardLocal,
    Stratified,
    Weighted,
    alias_table,
)
from farandole.training.data.loader import DataLoader
from farandole.training.data.partition import BatchLayout
from farandole.training.data.permutation import Permutation, absorbed
from farandole.training.data.sample_order import Order, Sequential, Shuffled

pytestmark = pytest.mark.core


def look_up(order: Order, size: int, batch: int, epoch: int = 0, seed: int = 3) -> list[int]:
    """A whole epoch."""
    layout = BatchLayout(order.length(size), batch)
    samples: list[int] = order.bind(layout, seed)(epoch, np.arange(layout.size)).tolist()
    return samples


# One that fails means that runs which were saved before cannot go on: raise FORMAT_VERSION.
GOLDEN = {
    "shuffled": (Shuffled(), [1, 2, 0, 9, 5, 3, 4, 7, 8, 6]),
    "weighted": (Weighted(range(10)), [9, 5, 9, 4, 4, 7, 7, 7, 5, 6]),
    "stratified": (Stratified([0, 1, 1, 0, 2, 1, 0, 0, 1, 0]), [7, 2, 6, 8, 0, 4, 5, 9, 1, 3]),
    "bucketed": (Bucketed([5, 3, 9, 1, 2, 8, 7, 6, 4, 0], window=2), [0, 5, 2, 9, 3, 1, 4, 8, 7, 6]),
    "shard-local": (ShardLocal([3, 5, 2]), [3, 7, 6, 4, 5, 8, 9, 2, 0, 1]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_saved_cursor_means_the_same_samples_in_every_release(name: str) -> None:
    order, samples = GOLDEN[name]
    assert look_up(order, 10, 3, epoch=1) == samples


def test_many_small_permutations_are_those_of_the_plain_definition() -> None:
    sizes = np.array([1, 2, 7, 64, 65, 2**40, 2**62])
    many = ManyPermutations(sizes, seed=5)
    rng = np.random.default_rng(0)
    which = rng.integers(0, sizes.size, 400)
    places = rng.integers(0, sizes[which])
    expected = [
        Permutation(int(sizes[i]), absorbed(5, i), 9).sample_at(place)
        for i, place in zip(which.tolist(), places.tolist(), strict=True)
    ]
    assert many(9, which, places).tolist() == expected


# Weighted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[1], [0, 1], [1] * 7, [5, 0, 1, 1], list(range(50)), [1e9, 1, 1e-9], [0.1] * 10])
def test_the_alias_table_gives_each_sample_its_weight(weights: list[float]) -> None:
    keep, other = alias_table(np.array(weights, dtype=np.float64))
    chances = keep.copy()
    np.add.at(chances, other, 1 - keep)
    assert ((keep >= 0) & (keep <= 1)).all()
    np.testing.assert_allclose(chances / len(weights), np.array(weights) / sum(weights), atol=1e-12)


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = np.array([0, 1, 2, 3, 10, 0.5])
    order = Weighted(weights, samples_per_epoch=200_000)
    for epoch in range(2):
        counts = np.bincount(look_up(order, 6, 100, epoch), minlength=6)
        expected = 200_000 * weights / weights.sum()
        assert counts[0] == 0
        chi_square = ((counts - expected)[1:] ** 2 / expected[1:]).sum()
        assert chi_square < 4 + 5 * np.sqrt(8)


def test_draws_of_neighbours_and_of_epochs_are_unrelated() -> None:
    order = Weighted(np.ones(1000), samples_per_epoch=50_000)
    first, second = (np.array(look_up(order, 1000, 100, epoch), dtype=float) for epoch in (0, 1))
    for one, other in ((first[:-1], first[1:]), (first, second)):
        assert abs(np.corrcoef(one, other)[0, 1]) * np.sqrt(one.size) < 5


def test_an_epoch_of_weighted_samples_may_have_another_length_than_the_data_set() -> None:
    loader = DataLoader(range(10), 8, order=Weighted([1] * 10, samples_per_epoch=32))
    assert len(loader) == 4
    assert loader.state_dict()["size"] == 32


# Stratified ------------------------------------------------------------------------------------------------------


def test_each_global_batch_has_the_labels_in_proportion() -> None:
    labels = np.array(["rare"] * 50 + ["usual"] * 350 + ["common"] * 600)
    drawn = labels[look_up(Stratified(labels), 1000, 20)]
    for batch in drawn.reshape(50, 20):
        assert abs((batch == "rare").sum() - 1) <= 1
        assert abs((batch == "usual").sum() - 7) <= 1
        assert abs((batch == "common").sum() - 12) <= 1


def test_a_stratum_has_another_order_in_each_epoch_at_the_same_places() -> None:
    labels = torch.arange(100) % 2
    order = Stratified(labels)
    first, second = (look_up(order, 100, 10, epoch) for epoch in (0, 1))
    assert first != second
    assert [s % 2 for s in first] == [s % 2 for s in second]


# Bucketed --------------------------------------------------------------------------------------------------------


def test_the_samples_of_a_global_batch_have_neighbouring_lengths_in_their_window() -> None:
    lengths = np.random.default_rng(1).integers(1, 10_000, 1000)
    drawn = lengths[look_up(Bucketed(lengths, window=25), 1000, 10)]
    for window in drawn.reshape(4, 25, 10):
        batches = sorted(window.tolist(), key=min)
        assert [length for batch in batches for length in batch] == sorted(window.ravel().tolist())
        assert batches != window.tolist()


def test_buckets_save_most_of_the_padding() -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, 10_000)

    def padded(order: Order) -> int:
        batches = lengths[look_up(order, 10_000, 20)].reshape(-1, 20)
        return int((batches.max(axis=1) * 20).sum() - lengths.sum())

    assert padded(Bucketed(lengths)) < 0.05 * padded(Shuffled())


@pytest.mark.parametrize("size", [1, 2, 9, 20, 31])
def test_buckets_have_each_sample_once_whatever_is_left_for_the_short_batch(size: int) -> None:
    for batch in range(1, size + 1):
        for epoch in range(3):
            assert sorted(look_up(Bucketed(range(size), window=3), size, batch, epoch)) == list(range(size))


def test_the_short_batch_at_the_end_is_not_always_the_longest_samples() -> None:
    order = Bucketed(range(43), window=10)
    means = [np.mean(look_up(order, 43, 10, epoch)[40:]) for epoch in range(30)]
    assert min(means) < 15 < 28 < max(means)


def test_buckets_refuse_batches_that_straddle_them() -> None:
    with pytest.raises(DataError, match="use tail="):
        DataLoader(range(10), 4, order=Bucketed(range(10)), tail="carry")


# Shards ----------------------------------------------------------------------------------------------------------


def test_shards_come_one_after_the_other_in_a_new_order_each_epoch() -> None:
    sizes = [7, 1, 30, 12, 50]
    shard_of = np.repeat(np.arange(5), sizes)
    sequences = set()
    for epoch in range(8):
        drawn = look_up(ShardLocal(sizes), 100, 10, epoch)
        shards = shard_of[drawn].tolist()
        sequence = list(dict.fromkeys(shards))
        assert shards == [shard for shard in sequence for _ in range(sizes[shard])]
        assert drawn != sorted(drawn)
        sequences.add(tuple(sequence))
    assert len(sequences) > 4


# Refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weighted([]), r"one dimension, got shape \(0,\)"),
        (lambda: Weighted([1, -1]), r"0 or more, and not all 0; got -1\.0\.\.1\.0"),
        (lambda: Weighted([0, 0]), "not all 0"),
        (lambda: Weighted([1, float("nan")]), "must be finite"),
        (lambda: Weighted([1], samples_per_epoch=0), "samples_per_epoch must be 1 or more, got 0"),
        (lambda: Stratified([[1, 2]]), r"got shape \(1, 2\)"),
        (lambda: Bucketed([1.5]), "lengths must be whole numbers"),
        (lambda: Bucketed([3, -2]), "the smallest -2"),
        (lambda: Bucketed([1], window=0), "window must be 1 global batch or more, got 0"),
        (lambda: ShardLocal([3, 0]), "shard number 1 has no samples"),
        (lambda: ShardLocal([]), "shard_sizes must be whole numbers"),
    ],
)
def test_what_makes_no_order_is_refused_with_its_value(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize("order", [Weighted([1] * 4), Stratified([0] * 4), Bucketed([1] * 4), ShardLocal([3, 1])])
def test_an_order_made_for_another_data_set_is_refused(order: Order) -> None:
    with pytest.raises(DataError, match="for 4 samples were given, but the data set has 5"):
        DataLoader(range(5), 2, order=order)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (Weighted([1, 2, 3]), Weighted([1, 2, 4])),
        (Stratified([0, 0, 1]), Stratified([0, 1, 1])),
        (Bucketed([1, 2, 3]), Bucketed([1, 2, 3], window=3)),
        (Bucketed([1, 2, 3]), Bucketed([1, 2, 4])),
        (ShardLocal([1, 2]), ShardLocal([2, 1])),
        (Shuffled(), Sequential()),
    ],
)
def test_a_state_saved_under_another_order_is_refused(saved: Order, now: Order) -> None:
    loader = DataLoader(range(3), 2, order=now)
    with pytest.raises(DataError, match=f"the saved loader has order={saved.identity}, this one {now.identity}"):
        loader.load_state_dict(DataLoader(range(3), 2, order=saved).state_dict())


def test_the_same_labels_have_the_same_identity_whatever_they_are_called() -> None:
    assert Stratified(["a", "b", "a"]).identity == Stratified(torch.tensor([3, 7, 3])).identity


def test_an_order_and_no_shuffling_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        DataLoader(range(3), 2, order=Shuffled(), shuffle=False)
