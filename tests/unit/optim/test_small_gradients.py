"""Small gradients are copied into their buckets some at a time, and come out as if each was copied alone."""

from __future__ import annotations

import random

import pytest
import torch

from farandole.training.optim.buckets import Buckets, SmallGradients

pytestmark = pytest.mark.core

_SHAPES = [(), (1,), (3,), (2, 5), (0,), (4096,), (4097,), (1, 1), (2, 3, 4)]


def random_parameters(rng: random.Random) -> list[torch.Tensor]:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    return [
        torch.nn.Parameter(torch.zeros(rng.choice(_SHAPES), dtype=rng.choice(dtypes)))
        for _ in range(rng.randrange(1, 90))
    ]


@pytest.mark.parametrize("seed", range(60))
def test_gradients_in_any_order_and_with_several_factors_are_as_if_each_was_multiplied_alone(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parameters = random_parameters(rng)
    buckets = Buckets(parameters)
    small = SmallGradients(buckets, parameters)
    expected, order = {}, list(parameters)
    if rng.random() < 0.7:
        order.reverse() if rng.random() < 0.5 else rng.shuffle(order)
    factor = 1.0
    for parameter in order:
        factor = rng.choice([factor, factor, factor, 1.0, 0.3])
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient.clone()
        expected[parameter] = gradient * factor
        if not small.take(parameter, factor):
            assert not 0 < parameter.numel() <= 4096
            buckets.view(parameter).copy_(gradient * factor)
            parameter.grad = None
        assert parameter.grad is None
    small.write()
    for parameter, gradient in expected.items():
        assert torch.equal(buckets.view(parameter), gradient)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(3, 2).t(),
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(2, 3).to_sparse(),
    ],
    ids=["other order", "other shape", "other dtype", "of a differentiable backward", "sparse"],
)
def test_a_gradient_of_another_form_is_not_taken(gradient: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    small = SmallGradients(Buckets([parameter]), [parameter])
    if gradient.shape == parameter.shape and gradient.dtype == parameter.dtype:
        parameter.grad = gradient
    else:
        other = torch.nn.Parameter(torch.zeros_like(gradient))
        other.grad = gradient
        small._parts[id(other)] = small._parts[id(parameter)]
        parameter = other
    assert not small.take(parameter, 0.5)
    assert parameter.grad is gradient


def test_a_gradient_that_is_the_bucket_itself_is_not_taken() -> None:
    parameter = torch.nn.Parameter(torch.zeros(5))
    buckets = Buckets([parameter])
    buckets.show_all()
    assert not SmallGradients(buckets, [parameter]).take(parameter, 0.5)


def test_a_script_that_leads_grad_to_another_memory_does_not_lead_the_bucket_there() -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(3)),
        torch.nn.Parameter(torch.zeros(0)),
        torch.nn.Parameter(torch.zeros(2)),
    ]
    buckets = Buckets(parameters)
    buckets.show_all()
    first = parameters[0].grad
    assert first is not None
    first.data = torch.full((3,), 7.0)
    buckets.flats[0].fill_(1.0)
    assert buckets.view(parameters[0]).tolist() == [1.0] * 3
    assert first.tolist() == [7.0] * 3
    buckets.show_all()
    assert parameters[0].grad is not first
    assert all(
        each.grad is not None and each.grad.shape == each.shape and (each.grad == 1).all() for each in parameters
    )


def put_aside(buckets: Buckets, parameters: list[torch.Tensor]) -> bool:
    """Whether the gradients are kept when `.grad` was set to None."""
    for parameter in parameters:
        parameter.grad = None
    return buckets.is_kept()


@pytest.mark.parametrize("how", ["itself", "a part", "detached", "in a graph"])
def test_a_gradient_that_a_script_has_put_aside_is_noticed(how: str) -> None:
    parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    buckets = Buckets(parameters)
    buckets.show_all()
    assert not buckets.is_kept()
    aside: list[torch.Tensor] = []
    for gradient in (parameters[1].grad,):
        assert gradient is not None
        if how == "itself":
            aside.append(gradient)
        elif how == "a part":
            aside.append(gradient[1:])
        elif how == "detached":
            aside.append(gradient.detach())
        else:
            aside.append((torch.ones(3, requires_grad=True) * gradient).sum())
    del gradient
    assert put_aside(buckets, parameters)
    aside.clear()
    assert not buckets.is_kept()
    buckets.cut(8)
    buckets.show_all()
    assert not put_aside(buckets, parameters)


def test_a_gradient_in_the_part_of_another_parameter_is_not_taken() -> None:
    one, other, third = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    buckets = Buckets([one, other, third])
    small = SmallGradients(buckets, [one, other, third])
    buckets.view(one).fill_(2)
    other.grad = buckets.view(one)
    assert not small.take(other, 1.0)
    one.grad, third.grad = torch.full((2, 3), 3.0), torch.full((2, 3), 4.0)
    assert small.take(one, 1.0)
    assert small.take(third, 1.0)
    small.write()
    assert buckets.view(one).unique().tolist() == [3]
    assert buckets.view(third).unique().tolist() == [4]
