"""The trial of a division: losses that are means over samples pass it, all others do not."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farandole.integrations.torchrun.in_place.division_trial import (
    DivisionTrial,
    Found,
    Sizes,
    differing_state,
    rows_of,
)
from farandole.training.collectives.alone import AloneTransport
from tests.support.losses import Loss, State, mean, total, weighted

FEW, CLASSES, NOW = 4, 3, 2
seen = [NOW]  # by the script: workers


def tried(
    loss: Loss,
    samples: int,
    *layers: torch.nn.Module,
    is_table: bool = True,
    last: tuple[int, int] = (0, 0),
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[str, int]:
    """Return why the division matters, and the number of bodies. `is_table`: the batch has a row for each sample.
    `last`: as in Sizes."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), *layers, torch.nn.Linear(8, CLASSES)).double()
    x, y = torch.randn(samples, 6, dtype=torch.float64), torch.arange(samples) % CLASSES
    state: Any = State(model)
    state.optimizers = lambda: [] if optimizer is None else [optimizer]
    trial = DivisionTrial(state, 5, Sizes(FEW, (3, NOW), last), lambda rows: (x[rows], y[rows]), False, dict, 1)
    for bodies in range(1, 20):
        model.zero_grad()
        seen[0] = trial.workers_seen() or NOW
        trial.begin_body()
        given = (x, y) if is_table else iter((x, y))
        result = loss(model, *trial.batch(given, range(samples)))
        if result.requires_grad:
            result.backward()
        trial.look()
        trial.end_body()
        if trial.is_over(AloneTransport()):
            assert all(module.training for module in model.modules())
            return trial.because, bodies
    raise AssertionError("it has no end")


def ignoring(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), torch.where(x[:, 0] > 0.3, -100, y))


def pairs(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(model(x))
    return torch.logsumexp(z @ z.t(), 1).mean()


def own_noise(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(F.dropout(x, 0.5)), y)


@pytest.mark.parametrize("samples", [2, 3, 5, 6, 8])
def test_a_mean_over_samples_does_not_depend_on_the_division(samples: int) -> None:
    assert tried(mean, samples) == ("", 9)


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8)])
def test_layers_that_are_known_to_depend_on_chance_or_the_batch_are_off(layer: torch.nn.Module) -> None:
    assert tried(mean, 6, layer) == ("", 9)


@pytest.mark.parametrize("samples", [5, 6, 8])
@pytest.mark.parametrize("loss", [weighted, ignoring])
def test_a_mean_over_something_else_depends_on_it(loss: Loss, samples: int) -> None:
    assert tried(loss, samples) == ("the gradient of a batch is not the mean of those of its samples", 10)


def test_samples_that_are_compared_with_each_other_depend_on_it() -> None:
    assert tried(pairs, 6)[0]


@pytest.mark.parametrize("samples", [3, 6])
def test_a_sum_depends_on_the_number_of_samples(samples: int) -> None:
    because, bodies = tried(total, samples)
    assert because.startswith("gradients depend on how many samples a worker has")
    assert bodies == 10


@pytest.mark.parametrize(
    ("loss", "is_alike"),
    [
        (lambda *given: mean(*given) * seen[0], False),
        (lambda *given: total(*given) * seen[0] / 12, True),  # 6 samples on each of 2 workers, 4 on each of 3
        (lambda *given: total(*given) / seen[0], False),
    ],
)
def test_a_loss_may_depend_on_the_number_of_workers_only_as_the_part_of_each_does(loss: Loss, is_alike: bool) -> None:
    assert tried(loss, 6) == ("", 9) if is_alike else tried(loss, 6)[0].startswith("gradients depend on how many")


@pytest.mark.parametrize(("fewest", "is_alike"), [(4, False), (3, True), (6, True)])
def test_a_batch_that_is_left_out_by_its_size_is_left_out_on_as_many_workers(fewest: int, is_alike: bool) -> None:
    def long_enough(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean(model, x, y) if len(x) not in (3, 5) or len(x) >= fewest else torch.zeros(())

    assert (tried(long_enough, 6, last=(3, 5))[0] == "") is is_alike
    assert tried(mean, 6, last=(3, 5)) == ("", 11)


@pytest.mark.parametrize("loss", [mean, total, weighted])
def test_a_batch_without_rows_is_collated_anew(loss: Loss) -> None:
    assert tried(loss, 6, is_table=False) == tried(loss, 6)


def test_where_chance_may_be_the_reason_nothing_is_said() -> None:
    assert tried(own_noise, 6) == ("", 10)


def test_a_single_sample_cannot_be_divided() -> None:
    assert tried(mean, 1) == ("", 1)


Pair = namedtuple("Pair", "x y")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (dict, UserDict)):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(same(*each) for each in zip(one, other, strict=True))
    return bool(one == other)


X, Y = torch.arange(6.0).reshape(3, 2), torch.arange(3)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (X, X[[2, 0]]),
        ((X, Y), (X[[2, 0]], Y[[2, 0]])),
        (Pair(X, Y), Pair(X[[2, 0]], Y[[2, 0]])),
        ({"x": X, "names": ["a", "b", "c"]}, {"x": X[[2, 0]], "names": ["c", "a"]}),
        ([X, [{"boxes": 1}, {"boxes": 2}, {"boxes": 3}]], [X[[2, 0]], [{"boxes": 3}, {"boxes": 1}]]),
        (UserDict(x=X), UserDict(x=X[[2, 0]])),
    ],
)
def test_rows_of_a_batch(data: Any, expected: Any) -> None:
    assert same(rows_of(data, 3, [2, 0]), expected)


@pytest.mark.parametrize(
    "data", [torch.zeros(()), torch.zeros(4, 2), {"x": X, "size": 3}, "abc", [], object(), (X, None)]
)
def test_what_has_no_row_for_each_sample(data: Any) -> None:
    assert rows_of(data, 3, [0]) is None


def test_a_tensor_that_all_had_alike_and_that_differs_after_a_step_is_named() -> None:
    alike = [Found(states={"center": (1, 2)}), Found(states={"center": (1, 2)})]
    assert differing_state(alike) == ""
    differing = [alike[0], Found(states={"center": (1, 3)})]
    assert differing_state(differing).startswith("center, which all workers had alike")
    assert differing_state([alike[0], Found(states={"center": (4, 3)})]) == "", "it was each worker's own"
    assert differing_state([alike[0], Found()]) == "", "another worker does not change it"


@pytest.mark.parametrize(("rate", "is_alike"), [(lambda size: 0.1, True), (lambda size: 0.1 * size, False)])
def test_a_learning_rate_that_depends_on_the_number_of_samples_is_named(
    rate: Callable[[int], float], is_alike: bool
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = rate(len(x))
        return mean(model, x, y)

    because, _ = tried(loss, 6, optimizer=optimizer)
    assert because == ("" if is_alike else "SGD.param_groups[0]['lr'] depends on how many samples a worker has")
