"""Flags and numbers of modules, and groups of optimizers, as parts of the state: changes in the course of the training
are restored before a step is repeated, and reach other workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.errors import ConfigError
from farandole.training.state.module_values import ModuleValues
from farandole.training.state.packing import Packed, pack, unpack
from farandole.training.state.step_state import StepState


class Net(torch.nn.Module):
    """Counts the calls of forward(), and has a number of its own worker."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.calls, self.temperature, self.rank = 0, 1.0, rank
        self.first, self.norm, self.last = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.last(self.norm(self.first(x))) / self.temperature
        return result


def state_of(rank: int = 0) -> StepState:
    torch.manual_seed(0)
    net = Net(rank)
    state = StepState(net, torch.optim.SGD(net.first.parameters(), lr=0.1, momentum=0.9))
    state.capture()
    return state


def change(state: StepState) -> None:
    net = state.model
    net(torch.ones(3, 2)).sum().backward()
    net.temperature = 0.5
    net.added = 3
    net.norm.eval()
    net.first.weight.requires_grad_(False)


def picture(state: StepState) -> Any:
    net = state.model
    return net.calls, net.temperature, net.norm.training, net.training, net.first.weight.requires_grad


def test_a_repeated_step_begins_with_the_flags_and_numbers_that_it_had() -> None:
    state = state_of()
    change(state)
    state.capture()
    before = picture(state)
    state.model(torch.ones(3, 2))
    state.model.eval()
    state.model.first.weight.requires_grad_(True)
    state.put_back()
    assert picture(state) == before


def copy_of(value: Any) -> Any:
    packed = pack(value)
    return unpack(Packed(packed.skeleton, [each.detach().clone() for each in packed.tensors]))


def give(source: StepState, newcomer: StepState) -> None:
    newcomer.load_tensors(copy_of(source.live_tensors()))
    newcomer.load_metadata(source.copy_of_metadata())
    newcomer.capture()


def test_a_newcomer_gets_what_has_changed_and_keeps_its_own_numbers() -> None:
    source, newcomer = state_of(), state_of(rank=1)
    change(source)
    source.capture()
    newcomer.model(torch.ones(3, 2))  # in its warm-up
    give(source, newcomer)
    assert picture(newcomer) == picture(source)
    assert (newcomer.model.rank, source.model.rank) == (1, 0)
    newcomer.model.train()  # at the start of its function
    newcomer.restore_module_values()
    assert picture(newcomer) == picture(source)


def test_without_a_change_there_is_nothing_to_keep() -> None:
    values = ModuleValues({"model": Net()})
    assert values.changed() == {}


def test_a_group_that_was_added_later_reaches_a_newcomer_with_its_state() -> None:
    source, newcomer = state_of(), state_of()
    net = source.model
    source.optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 0.5})
    net(torch.randn(3, 2)).square().sum().backward()
    source.optimizer.step()
    source.capture()
    give(source, newcomer)
    groups = newcomer.optimizer.param_groups
    assert [each["lr"] for each in groups] == [0.1, 0.5]
    assert [id(each) for each in groups[1]["params"]] == [id(each) for each in newcomer.model.last.parameters()]
    ours, theirs = newcomer.optimizer.state, source.optimizer.state
    for here, there in zip(newcomer.model.parameters(), net.parameters(), strict=True):
        if there in theirs:
            assert torch.equal(ours[here]["momentum_buffer"], theirs[there]["momentum_buffer"])
    assert len(ours) == len(theirs)


def test_a_group_that_was_added_in_an_aborted_step_is_removed_again() -> None:
    state = state_of()
    state.optimizer.add_param_group({"params": list(state.model.last.parameters())})
    state.put_back()
    assert len(state.optimizer.param_groups) == 1
    state.optimizer.add_param_group({"params": list(state.model.last.parameters())})  # when the step is repeated


def test_parameters_in_another_order_are_refused_by_name() -> None:
    source, newcomer = state_of(), state_of()
    newcomer.optimizer.param_groups[0]["params"].reverse()
    with pytest.raises(ConfigError, match=r"parameter 0 is 'model.first.weight' there and 'model.first.bias' here"):
        give(source, newcomer)
