"""Parameters in every order of memory, through every way from gradient to step: the same model as one process has, and
gradients in the order in which torch makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import CollectiveMismatch
from tests.checks.stepping import SAMPLES, STEPS, refuse_difference, renew, share

Make = Callable[..., torch.optim.Optimizer]


class Layouts(torch.nn.Module):
    """One parameter of each layout; `is_dense`: without the one that does not fill its memory."""

    def __init__(self, is_dense: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        conv2 = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        conv3 = torch.nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)
        self.flat, self.deep = conv2.to(dtype), conv3.to(dtype)
        self.turned = torch.nn.Parameter(torch.randn(4, 3, dtype=dtype).t())
        self.empty = torch.nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.single = torch.nn.Parameter(torch.randn(1, 2, dtype=dtype)[:, 1])
        self.strided = torch.nn.Parameter(torch.randn(4, 6, dtype=dtype)[:, ::2], requires_grad=not is_dense)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.flat(x[:, :27].reshape(-1, 3, 3, 3)).flatten(1)
        deep = self.deep(x[:, :16].reshape(-1, 2, 2, 2, 2)).flatten(1)
        rest = x[:, :3] @ self.turned @ self.strided + self.empty.sum() + self.single
        return torch.cat([flat, deep, rest], 1).tanh()


def data(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SAMPLES, 27, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    return optimizer.step()


def as_alone(make: Make, is_dense: bool = True) -> torch.nn.Module:
    model = Layouts(is_dense)
    optimizer = make(model.parameters())
    for _ in range(STEPS):
        step_of(model, optimizer, data())
    return model


def compare(model: torch.nn.Module, other: torch.nn.Module) -> None:
    refuse_difference(model, other)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert mine.stride() == theirs.stride()
        if theirs.grad is not None and theirs.numel() > 1:
            assert mine.grad is not None
            assert mine.grad.stride() == theirs.grad.stride(), name


MAKES: list[tuple[Make, bool]] = [
    (lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True), True),
    (lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True), False),
    (lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, foreach=False), False),
]


def check_gradients_have_the_order_of_their_parameters() -> None:
    for make, is_dense in MAKES:
        for micro_batches in (1, 2):
            model = Layouts(is_dense)
            optimizer = fd.DistributedOptimizer(make(model.parameters()), bucket_mb=0.0001)
            for _ in range(STEPS):
                for mine in share(micro_batches):
                    applied = step_of(model, optimizer, data()[mine])
                assert applied is True
            compare(model, as_alone(make, is_dense))


def check_gradients_of_named_operations_have_the_order_of_their_parameters() -> None:
    rows = slice(SAMPLES * fd.rank() // fd.size(), SAMPLES * (fd.rank() + 1) // fd.size())
    for make, is_dense in MAKES:
        model = Layouts(is_dense)
        optimizer = fd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
        for _ in range(STEPS):
            assert step_of(model, optimizer, data()[rows]) is True
        compare(model, as_alone(make, is_dense))


class Waves(torch.nn.Module):
    """A model of complex numbers, and of real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.phases = torch.nn.Parameter(torch.randn(27, 4, dtype=torch.complex128))
        self.mixed = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex128).t())
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.phases @ self.mixed).abs() * self.scale


def check_complex_parameters_are_trained_as_alone() -> None:
    for micro_batches in (1, 2):
        model, other = Waves(), Waves()
        optimizer = fd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), bucket_mb=0.0001)
        plain = torch.optim.Adam(other.parameters(), lr=0.05)
        for _ in range(STEPS):
            for mine in share(micro_batches):
                applied = step_of(model, optimizer, data()[mine])
            assert applied is True
            step_of(other, plain, data())
        compare(model, other)


def check_a_model_that_is_moved_to_another_layout_between_steps() -> None:
    def moved(model: torch.nn.Module, turn: int) -> None:
        model.flat.to(memory_format=torch.contiguous_format if turn % 2 else torch.channels_last)  # type: ignore[union-attr]

    make = MAKES[0][0]
    model, other = Layouts(True), Layouts(True)
    optimizer, plain = fd.DistributedOptimizer(make(model.parameters())), make(other.parameters())
    for turn in range(STEPS):
        # State of Adam keeps the former layout, in torch, too: only what is without state is moved.
        optimizer.state.clear()
        plain.state.clear()
        moved(model, turn)
        moved(other, turn)
        for mine in share():
            assert step_of(model, optimizer, data()[mine]) is True
        step_of(other, plain, data())
    compare(model, other)


def check_a_cast_of_the_model_between_steps_loses_no_gradient() -> None:
    for is_named in (False, True):
        model, other = Layouts(False), Layouts(False)
        optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        plain = torch.optim.SGD(other.parameters(), lr=0.5)
        rows = slice(SAMPLES * fd.rank() // fd.size(), SAMPLES * (fd.rank() + 1) // fd.size())
        for _ in range(STEPS):
            if is_named:
                step_of(model, optimizer, data()[rows])
            else:
                for mine in share():
                    step_of(model, optimizer, data()[mine])
            step_of(other, plain, data())
            for each in (model, other):
                each.float()
                each.double()
        refuse_difference(model, other, 1e-6)


def check_gradients_whose_data_are_assigned_are_those_that_are_applied() -> None:
    model, other = Layouts(False), Layouts(False)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    plain = torch.optim.SGD(other.parameters(), lr=0.5)

    def doubled(each: torch.nn.Module) -> None:
        for parameter in each.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 2.0

    for _ in range(STEPS):
        for micro_batches in (1, 2):
            for mine in share(micro_batches):
                optimizer.zero_grad()
                model(data()[mine]).square().mean().backward()
                doubled(model)
                optimizer.step()
            plain.zero_grad()
            other(data()).square().mean().backward()
            doubled(other)
            plain.step()
    refuse_difference(model, other)


def check_ranks_with_other_layouts_are_refused() -> None:
    model = torch.nn.Conv2d(3, 4, 2)
    if fd.rank() == 0:
        model = model.to(memory_format=torch.channels_last)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(CollectiveMismatch, match="in memory by strides"):  # noqa: PT012 - a generator holds the batch
        for _ in share():
            model(torch.randn(2, 3, 4, 4)).mean().backward()
            optimizer.step()
    renew()
