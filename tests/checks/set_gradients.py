"""Gradients that come from no backward pass: of torch.autograd.grad(), or computed in another way. They are those of
the global batch after synchronize(), or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import farandole as fd
from farandole.errors import StepError
from tests.checks.stepping import STEPS, loss_of, net, optimizer_of, refuse_difference, renew, samples, share

Set = Callable[[torch.nn.Module, torch.Tensor], None]


def assigned(model: torch.nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model, x), parameters), strict=True):
        parameter.grad = gradient


def copied(model: torch.nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model, x), parameters), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient)


def as_data(model: torch.nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model, x), parameters), strict=True):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.data = gradient.detach().t().contiguous().t()


WAYS: list[Set] = [assigned, copied, as_data]


def as_alone(set_gradients: Set) -> torch.nn.Module:
    model = net()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.5), samples(model)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        set_gradients(model, x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return model


def check_set_gradients_are_those_of_the_global_batch_after_synchronize() -> None:
    for way in WAYS:
        for micro_batches in (1, 2):
            model = net()
            optimizer, x = optimizer_of(model.parameters()), samples(model)
            for _ in range(STEPS):
                for mine in share(micro_batches):
                    optimizer.zero_grad(set_to_none=False)
                    way(model, x[mine])
                    optimizer.synchronize()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    applied = optimizer.step()
                assert applied is True
            refuse_difference(model, as_alone(way))


def check_set_gradients_are_refused_without_synchronize() -> None:
    for way in WAYS:
        for micro_batches in (1, 2):
            model = net()
            optimizer, x = optimizer_of(model.parameters()), samples(model)
            before = [each.detach().clone() for each in model.parameters()]
            with pytest.raises(StepError, match="comes from no backward pass"):  # noqa: PT012 - a generator holds it
                for mine in share(micro_batches):
                    optimizer.zero_grad(set_to_none=False)
                    way(model, x[mine])
                    optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
            renew()


def check_gradients_set_before_a_backward_pass_are_reduced_with_it() -> None:
    def of_half(model: torch.nn.Module, x: torch.Tensor) -> None:
        first, rest = model[:4], model[4:]  # type: ignore[index]
        parameters = list(first.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model, x), parameters), strict=True):
            parameter.grad = gradient
        rest(first(x).detach()).square().mean().backward()

    for micro_batches in (1, 2):
        model, plain = net(), net()
        optimizer, other = optimizer_of(model.parameters()), torch.optim.SGD(plain.parameters(), lr=0.5)
        x = samples(model)
        for _ in range(STEPS):
            for mine in share(micro_batches):
                optimizer.zero_grad()
                of_half(model, x[mine])
                optimizer.step()
            other.zero_grad()
            of_half(plain, x)
            other.step()
        refuse_difference(model, plain)


def check_gradients_set_after_the_reduction_are_not_reduced_once_more() -> None:
    model = net()
    optimizer, x = optimizer_of(model.parameters()), samples(model)
    with pytest.raises(StepError, match="set after those of this batch were reduced"):  # noqa: PT012
        for mine in share():
            loss_of(model, x[mine]).backward()
            assigned(model, x[mine])
            optimizer.synchronize()
    renew()


def check_what_a_script_makes_of_gradients_between_micro_batches_does_not_count() -> None:
    def decayed(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=0.1)

    model, plain = net(), net()
    optimizer, other = optimizer_of(model.parameters()), torch.optim.SGD(plain.parameters(), lr=0.5)
    x = samples(model)
    for _ in range(STEPS):
        for mine in share(3):
            optimizer.zero_grad()
            loss_of(model, x[mine]).backward()
            decayed(model)
            optimizer.step()
        other.zero_grad()
        loss_of(plain, x).backward()
        decayed(plain)
        other.step()
    refuse_difference(model, plain)


def check_gradients_that_are_never_zeroed_add_up() -> None:
    model, plain = net(), net()
    optimizer, other = optimizer_of(model.parameters()), torch.optim.SGD(plain.parameters(), lr=0.1)
    for each in optimizer.param_groups:
        each["lr"] = 0.1
    x = samples(model)
    for turn in range(STEPS):
        stop = 4 if turn == 1 else 12  # not all parameters are used
        for mine in share():
            loss_of(model[:stop], x[mine]).backward()
            optimizer.step()
        loss_of(plain[:stop], x).backward()
        other.step()
    refuse_difference(model, plain)


def check_an_empty_share_of_set_gradients() -> None:
    """A rank whose part is a dummy batch: its gradients have no weight."""
    model, plain = net(), net()
    optimizer, other = optimizer_of(model.parameters()), torch.optim.SGD(plain.parameters(), lr=0.5)
    x = samples(model)
    for mine in share(4):
        optimizer.zero_grad()
        assigned(model, x[mine] if mine.stop > mine.start else x[:1])
        optimizer.synchronize()
        optimizer.step()
    assigned(plain, x)
    other.step()
    refuse_difference(model, plain)
    assert fd.size() > 1


# Gradients of a backward pass that a script puts aside, by reference: those of another loss, or of the last step ------


def combined(model: torch.nn.Module, x: torch.Tensor, last: list[torch.Tensor]) -> None:
    """Set each `.grad` to a combination of the gradients of two losses and of the last step, which are left in `last`,
    as methods that deal with conflicts between losses do."""
    parameters = list(model.parameters())
    loss_of(model, x).backward(retain_graph=True)
    first = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    (0.1 * model(x).square().mean()).backward()
    both = [(one, each.grad) for one, each in zip(first, parameters, strict=True)]
    for each, (one, other), before in zip(parameters, both, last or [None] * len(both), strict=True):
        assert one is not None
        assert other is not None
        each.grad = one + 2 * other if before is None else one + 2 * other - 0.5 * before
    last[:] = [one for one, _ in both if one is not None]


def check_gradients_that_are_put_aside_do_not_change() -> None:
    alone = net()
    optimizer, x, last = torch.optim.SGD(alone.parameters(), lr=0.5), samples(alone), list[torch.Tensor]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        combined(alone, x, last)
        optimizer.step()
    model = net()
    optimizer, x, last = optimizer_of(model.parameters()), samples(model), []
    for _ in range(STEPS):
        for mine in share(1):
            optimizer.zero_grad()
            combined(model, x[mine], last)
            assert optimizer.step() is True
    refuse_difference(model, alone)
