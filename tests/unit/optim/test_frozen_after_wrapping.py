"""Layers that are frozen after their module was wrapped in a DistributedDataParallel, and trained later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.integrations.ddp.module import _names, note_wrapped


class Wrapped(torch.nn.Module):
    """The part of a DistributedDataParallel that is looked at."""

    def __init__(self, finds_unused: bool) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
        self.module[1].requires_grad_(False)
        self.find_unused_parameters = finds_unused
        self.parameters_to_ignore: set[str] = set()


def reduced(wrapped: Any) -> list[bool]:
    """Which parameters the reducer has; they are not changed by the question."""
    before = [each.requires_grad for each in wrapped.module.parameters()]
    names = _names(wrapped).values()
    assert [each.requires_grad for each in wrapped.module.parameters()] == before
    return [name in names for name, _ in wrapped.module.named_parameters()]


@pytest.mark.parametrize("finds_unused", [True, False])
def test_a_reducer_has_them_where_unused_parameters_are_found(finds_unused: bool) -> None:
    wrapped: Any = Wrapped(finds_unused)
    note_wrapped(wrapped)
    wrapped.module[0].requires_grad_(False)
    assert reduced(wrapped) == [finds_unused, finds_unused, False, False, True, True]


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_reducer_has_them_where_nothing_is_left_to_train(is_noted: bool) -> None:
    """A target encoder that is wrapped and then frozen: torch makes no reducer for no parameter."""
    wrapped: Any = Wrapped(finds_unused=False)
    if is_noted:
        note_wrapped(wrapped)
    wrapped.module.requires_grad_(False)
    assert reduced(wrapped) == [True, True, not is_noted, not is_noted, True, True]
