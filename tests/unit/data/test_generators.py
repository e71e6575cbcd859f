"""The global generators: watched, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from farandole.training.data import augmentation
from farandole.training.data.augmentation import DrawWatch, generators_kept

pytestmark = pytest.mark.core


@pytest.fixture(params=["MT19937", "PCG64"])
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """numpy's global generator is MT19937, unless somebody exchanges it."""
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, request.param)(3))
    torch.manual_seed(3), random.seed(3)
    try:
        yield
    finally:
        np.random.set_bit_generator(usual)


def numbers() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), random.gauss(0, 1), float(np.random.rand())


def seed_all() -> None:
    torch.manual_seed(4), random.seed(4)
    if type(np.random.get_bit_generator()) is np.random.MT19937:
        np.random.seed(4)


DRAWS: list[Callable[[], object]] = [
    lambda: torch.rand(()),
    lambda: torch.randperm(7),
    random.random,
    lambda: random.gauss(0, 1),
    lambda: [random.random() for _ in range(312)],  # all words of Mersenne Twister: its place is the same again
    np.random.rand,
    np.random.normal,
    lambda: np.random.bytes(4 * 624),  # likewise
    seed_all,
    numbers,
]


@pytest.mark.usefixtures("seeded")
def test_nobody_who_draws_nothing_is_seen() -> None:
    watch = DrawWatch()
    torch.ones(3).sum(), np.arange(4).sum(), random.Random(5).random(), np.random.default_rng(3).random()
    assert not watch.undo()


@pytest.fixture(params=["memory", "getstate"])
def of_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's generator is read from memory where this is CPython's; else by getstate()."""
    if request.param == "memory":
        assert augmentation._has_known_layout()
    else:
        monkeypatch.setattr(augmentation, "_has_known_layout", lambda: False)


@pytest.mark.parametrize("place", range(len(DRAWS)))
@pytest.mark.usefixtures("seeded", "of_python")
def test_every_draw_is_seen_and_undone(place: int) -> None:
    with generators_kept():
        wanted = numbers()
    watch = DrawWatch()
    DRAWS[place]()
    assert watch.undo()
    assert numbers() == wanted


def test_they_are_kept_also_where_numpy_has_a_normal_number_in_reserve() -> None:
    np.random.normal(), random.gauss(0, 1)
    with generators_kept():
        wanted = np.random.normal(), numbers()
    with generators_kept():
        np.random.normal(), numbers()
    assert (np.random.normal(), numbers()) == wanted
