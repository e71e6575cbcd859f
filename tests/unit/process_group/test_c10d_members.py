"""Who may be in an operation of a group, and when."""

from __future__ import annotations

import pytest
import torch

from farandole.base.membership import GenerationId, Placement
from farandole.errors import GroupOutdated, StepError
from farandole.integrations.torchrun.process_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.works import Everybody, Some, alone_in
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport

pytestmark = pytest.mark.core


def make_world(number: int) -> world.World:
    return world.World(GenerationId(1, 1, number, ""), Placement(0, 1, 0, 1, 0, 1), AloneTransport(number))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> world.World:
    entered = make_world(1)
    monkeypatch.setattr(world.view, "world", entered)
    return entered


def test_two_operations_of_all_ranks_are_not_carried_out_at_once(here: world.World) -> None:
    group = FarandoleGroup(Everybody())
    with alone_in(here.transport, "broadcast"), pytest.raises(StepError, match="all_reduce: another thread is in a"):
        group.allreduce([torch.ones(1)])
    group.allreduce([torch.ones(1)])


def test_an_error_in_an_operation_lets_the_next_one_be(here: world.World) -> None:
    group = FarandoleGroup(Everybody())
    with pytest.raises(ValueError, match="moves dense tensors"):
        group.allreduce([torch.ones(1, device="meta")])
    group.allreduce([torch.ones(1)])


def test_a_group_with_letters_of_its_own_is_not_in_the_way(here: world.World) -> None:
    with alone_in(here.transport, "all_reduce"), alone_in(AloneTransport(), "all_reduce"):
        pass


def test_a_group_is_over_with_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FarandoleGroup(Some([0], 0))
    group.barrier()
    monkeypatch.setattr(world.view, "world", later := make_world(2))
    with pytest.raises(GroupOutdated, match="created for ranks \\[0\\] in generation 1, and this is generation 2"):
        group.barrier()
    assert later.transport.size == group.size() == 1


def test_everybodys_group_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FarandoleGroup(Everybody())
    placement = Placement(2, 5, 2, 5, 0, 1)
    monkeypatch.setattr(world.view, "world", world.World(GenerationId(1, 1, 2, ""), placement, AloneTransport(2)))
    assert (group.rank(), group.size(), group.getRank(), group.getSize()) == (2, 5, 2, 5)
