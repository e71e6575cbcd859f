"""What goes into the replicas of a DataParallel, and what becomes of what comes out."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from farandole.errors import ConfigError
from farandole.integrations.data_parallel.data_parallel import DataParallel
from farandole.integrations.data_parallel.dividing import divide

pytestmark = pytest.mark.core


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Record:
    value: Any
    name: str = "record"
    length: int = dataclasses.field(default=0, init=False)


class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput: a dict that can be read by attributes."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Returns(nn.Module):
    """What a function makes of the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def returns(function: Callable[..., Any], threads: int = 2, **options: Any) -> DataParallel:
    return DataParallel(Returns(function), threads=threads, **options)


def rows(count: int) -> torch.Tensor:
    return torch.arange(2.0 * count).view(count, 2)


# Inputs -----------------------------------------------------------------------------------------------------------


def test_nested_inputs_are_divided_and_the_rest_comes_whole() -> None:
    x, seen = rows(5), []

    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return args[0]

    args = (x, [x + 1, (x + 2, "a")], {"b": Pair(x + 3, None)}, Record(x + 4), 7)
    returns(function)(*args, c=UserDict(d=x + 5), e=torch.tensor(6.0), f=torch.ones(1, 9))
    seen.sort(key=lambda each: each[0][0][0, 0].item())
    low = 0
    for (first, middle, mapping, record, number), kwargs in seen:
        part = slice(low, low + len(first))
        low += len(first)
        assert torch.equal(first, x[part])
        assert torch.equal(middle[0], x[part] + 1)
        assert torch.equal(middle[1][0], x[part] + 2)
        assert middle[1][1] == "a"
        assert isinstance(mapping["b"], Pair)
        assert torch.equal(mapping["b"].left, x[part] + 3)
        assert mapping["b"].right is None
        assert torch.equal(record.value, x[part] + 4)
        assert (record.name, record.length, number) == ("record", 0, 7)
        assert isinstance(kwargs["c"], UserDict)
        assert torch.equal(kwargs["c"]["d"], x[part] + 5)
        assert kwargs["e"] == 6
        assert kwargs["f"].shape == (1, 9)
    assert low == 5


def test_parts_are_views_of_the_batch() -> None:
    x = rows(4)

    def function(part: torch.Tensor) -> torch.Tensor:
        return part.add_(1).clone()

    before = x.clone()
    assert torch.equal(returns(function)(x), before + 1)
    assert torch.equal(x, before + 1)


@pytest.mark.parametrize(
    ("samples", "most", "min_local_batch", "sizes"),
    [
        (8, 2, 1, [4, 4]),
        (7, 2, 1, [3, 4]),
        (5, 4, 1, [1, 1, 1, 2]),
        (3, 8, 1, [1, 1, 1]),
        (1, 4, 1, [1]),
        (0, 4, 1, [0]),
        (7, 4, 2, [2, 2, 3]),
        (3, 4, 2, [3]),
    ],
)
def test_parts_are_as_equal_as_possible(samples: int, most: int, min_local_batch: int, sizes: list[int]) -> None:
    parts = divide((rows(samples),), {}, 0, most, min_local_batch)
    assert [part.samples for part in parts] == sizes
    assert torch.equal(torch.cat([part.args[0] for part in parts]), rows(samples))


def test_another_dimension_may_be_that_of_the_samples() -> None:
    x = torch.randn(3, 7, 2)
    assert torch.equal(returns(lambda part: part * 2, dim=1)(x), x * 2)
    assert torch.equal(returns(lambda part: part * 2, dim=-1)(x), x * 2)


def test_without_tensors_the_module_is_called_once() -> None:
    calls: list[str] = []
    assert returns(lambda name: calls.append(name) or name)("a") == "a"
    assert calls == ["a"]


def test_tensors_with_different_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(4, 2\) at \[0\], \(5, 2\) at \['b'\]"):
        returns(lambda a, b: a)(rows(4), b=rows(5))


def test_packed_sequences_are_refused() -> None:
    packed = pack_padded_sequence(torch.ones(4, 2, 1), [4, 3])
    with pytest.raises(ConfigError, match="PackedSequence"):
        returns(lambda a: a)(packed)


# Outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_of_any_nesting_are_joined_in_order() -> None:
    def function(x: torch.Tensor) -> Any:
        return {
            "a": [x, (x + 1, None)],
            "b": Pair(Record(x + 2), "text"),
            "c": defaultdict(list, {"d": x + 3}),
            "e": torch.max(x, dim=1),
        }

    x = rows(7)
    found = returns(function, threads=3)(x)
    assert torch.equal(found["a"][0], x)
    assert torch.equal(found["a"][1][0], x + 1)
    assert found["a"][1][1] is None
    assert torch.equal(found["b"].left.value, x + 2)
    assert found["b"].right == "text"
    assert torch.equal(found["c"]["d"], x + 3)
    assert found["c"]["missing"] == []
    assert torch.equal(found["e"].values, x[:, 1])


def test_an_output_that_is_dict_and_object_at_once_stays_both() -> None:
    found = returns(lambda x: Output(logits=x * 2))(rows(5))
    assert isinstance(found, Output)
    assert torch.equal(found.logits, rows(5) * 2)
    assert torch.equal(found["logits"], rows(5) * 2)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_loss_is_that_of_the_whole_batch(count: int) -> None:
    x = torch.randn(count, 3, dtype=torch.float64, requires_grad=True)

    def loss(module: nn.Module) -> torch.Tensor:
        value: torch.Tensor = module(x)
        (gradient,) = torch.autograd.grad(value, x)
        return torch.cat([value.view(1), gradient.flatten()])

    mean = Returns(lambda part: part.square().mean())
    total = Returns(lambda part: part.square().sum())
    torch.testing.assert_close(loss(DataParallel(mean, threads=3)), loss(mean), rtol=0, atol=1e-14)
    torch.testing.assert_close(loss(DataParallel(total, threads=3, scalars="sum")), loss(total), rtol=0, atol=1e-14)
    each = DataParallel(total, threads=3, scalars="each")(x)
    assert each.shape == (min(count, 3),)
    torch.testing.assert_close(each.sum(), total(x))


def test_counts_are_added_up_and_no_mean_is_taken_of_them() -> None:
    def count(x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0] > 3).sum()

    assert returns(count, scalars="sum")(rows(5)) == 3
    assert returns(count, scalars="sum")(rows(5)).dtype == torch.int64
    with pytest.raises(ConfigError, match=r"different values in output: \[0, 3\].*sum"):
        returns(count)(rows(5))
    assert returns(lambda x: torch.tensor(4))(rows(5)) == 4


def test_values_that_are_no_tensors_must_be_the_same() -> None:
    assert returns(lambda x: {"width": x.shape[1]})(rows(5)) == {"width": 2}
    with pytest.raises(ConfigError, match=r"output\['length'\]: \[2, 3\]"):
        returns(lambda x: {"length": len(x)})(rows(5))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: {len(x): x}, "has keys"),
        (lambda x: [x] * len(x), "has items"),
        (lambda x: x if len(x) == 2 else [x], "different"),
        (lambda x: x.T, "cannot be merged along dimension 0"),
    ],
)
def test_outputs_that_do_not_fit_together_are_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        returns(function)(rows(5))


def test_outputs_of_which_some_need_gradients_and_one_comes_twice() -> None:
    x = rows(5).requires_grad_()

    def function(part: torch.Tensor) -> Any:
        y = part * 2
        return y, y, part.detach(), (part > 0), part

    one, two, three, four, five = returns(function)(x)
    assert not three.requires_grad
    assert four.dtype == torch.bool
    (one.sum() + two.sum() + five.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 5))
