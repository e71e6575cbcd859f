"""The order of samples: its frozen values, its quality and its limits."""

from __future__ import annotations

import numpy as np
import pytest

from farandole.errors import DataError
from farandole.training.data.permutation import FORMAT_VERSION, Permutation

# (size, seed, epoch): the first samples of the order, in format version 1.
GOLDEN = {
    (1, 0, 0): [0],
    (10, 0, 0): [2, 6, 9, 1, 8, 0, 5, 4],
    (10, 0, 1): [1, 5, 0, 4, 9, 3, 6, 2],
    (17, 7, 3): [1, 0, 7, 5, 14, 15, 10, 13],
    (1_280_000, 0, 0): [609472, 477182, 1240204, 241796, 803317, 732499],
    (10**12, 2**64 - 1, 90): [939503331184, 102146910106, 746949963634, 852201423397],
    (2**62, 1, 1): [3801971630873084031, 2096456408011889937, 138118896441658888],
}


@pytest.mark.parametrize("key", GOLDEN)
def test_a_saved_cursor_means_the_same_samples_in_every_release(key: tuple[int, int, int]) -> None:
    """If this fails, runs that were saved before cannot go on: raise FORMAT_VERSION and freeze new values."""
    assert FORMAT_VERSION == 1
    samples = GOLDEN[key]
    order = Permutation(*key)
    assert order(np.arange(len(samples))).tolist() == samples
    assert [order.sample_at(position) for position in range(len(samples))] == samples


def test_seed_and_epoch_are_not_simply_added() -> None:
    positions = np.arange(1000)
    assert not np.array_equal(Permutation(1000, 1, 0)(positions), Permutation(1000, 0, 1)(positions))


@pytest.mark.parametrize("size", [7, 100, 4097])
def test_over_many_epochs_every_sample_is_equally_likely_at_every_place(size: int) -> None:
    """Chi-square over 7 equal parts of the data set, for the first, middle and last place; |z| below 5."""
    epochs = 2000
    positions = np.array([0, size // 2, size - 1])
    drawn = np.stack([Permutation(size, 11, epoch)(positions) for epoch in range(epochs)])
    for column in drawn.T:
        counts = np.bincount(column * 7 // size, minlength=7)
        shares = np.bincount(np.arange(size) * 7 // size, minlength=7) / size
        chi_square = ((counts - epochs * shares) ** 2 / (epochs * shares)).sum()
        assert abs(chi_square - 6) / np.sqrt(12) < 5


@pytest.mark.parametrize("size", [1009, 65_537, 1_280_000])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_in_the_order_are_unrelated(size: int, lag: int) -> None:
    count = min(size, 50_000)
    order = Permutation(size, 5, 0)(np.arange(count)).astype(np.float64)
    correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
    assert abs(correlation) * np.sqrt(count) < 5


@pytest.mark.parametrize(("size", "seed", "epoch"), [(0, 0, 0), (2**62 + 1, 0, 0), (5, -1, 0), (5, 0, -1)])
def test_what_cannot_be_ordered_is_refused_with_its_value(size: int, seed: int, epoch: int) -> None:
    with pytest.raises(DataError, match=r"got (0|4611686018427387905|-1)$"):
        Permutation(size, seed, epoch)


@pytest.mark.parametrize("outside", [-1, 10])
def test_positions_outside_the_data_set_are_refused(outside: int) -> None:
    order = Permutation(10, 0, 0)
    with pytest.raises(DataError, match=r"expected values in \[0, 10\)"):
        order(np.array([3, outside]))
    with pytest.raises(DataError, match=r"expected values in \[0, 10\)"):
        order.inverse(np.array([3, outside]))
    with pytest.raises(DataError, match=r"expected values in \[0, 10\)"):
        order.sample_at(outside)


def test_shape_is_kept_and_nothing_is_asked_of_nothing() -> None:
    order = Permutation(10, 0, 0)
    positions = np.arange(6).reshape(2, 3)
    assert order(positions).shape == (2, 3)
    assert np.array_equal(positions, np.arange(6).reshape(2, 3))
    assert order(np.empty(0, dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 7])
def test_narrow_and_wide_words_give_the_plain_definition(size: int) -> None:
    order = Permutation(size, 2**63 + 9, 4)
    positions = np.random.default_rng(size).integers(0, size, 50)
    samples = order(positions)
    assert samples.tolist() == [order.sample_at(position) for position in positions.tolist()]
    assert np.array_equal(order.inverse(samples), positions)
