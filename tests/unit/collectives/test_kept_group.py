"""Process groups that live through the generations: who has them, and how their members are agreed on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.training.collectives.kept_group import (
    KeptGroup,
    Members,
    Offer,
    ReconfigurableGroup,
    agreed_members,
    make_reconfigurable,
)
from farandole.training.collectives.torch_group import ExchangedStore
from tests.support.rings import needs_reconfigure

pytestmark = pytest.mark.core


def test_the_members_have_the_number_of_rank_0_and_the_handles_of_all() -> None:
    assert agreed_members([Offer("a", 5), Offer("b", 6)]) == Members(5, ["a", "b"])


@pytest.mark.parametrize("offers", [[Offer("a", 5), Offer()], [Offer(), Offer("b", 6)], [Offer("a", 5), Offer("a", 6)]])
def test_there_are_no_members_if_a_rank_has_no_group_or_two_could_not_be_told_apart(offers: list[Offer]) -> None:
    assert agreed_members(offers) is None


class FakeGroup:
    """torch's group, as far as it takes part here."""

    def __init__(self, supports_reconfigure: bool = True) -> None:
        self.supports_reconfigure = supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        return "fake:0"


class User:
    """One generation of a group."""

    def __init__(self, group: ReconfigurableGroup | None) -> None:
        self.group = group

    def hand_over(self) -> ReconfigurableGroup | None:
        return self.group


def fake(supports_reconfigure: bool = True) -> ReconfigurableGroup | None:
    return make_reconfigurable(lambda _: FakeGroup(supports_reconfigure))


def test_each_generation_gets_the_group_of_the_one_before() -> None:
    kept, group = KeptGroup(), fake()
    assert kept.take() is None
    for _ in range(2):
        user = User(group)
        kept.is_used_by(user)
        assert kept.take() is group
        assert kept.take() is None


def test_a_generation_that_is_gone_has_taken_its_group_with_it() -> None:
    kept, user = KeptGroup(), User(fake())
    kept.is_used_by(user)
    del user
    gc.collect()
    assert kept.take() is None


def test_each_offer_has_a_number_of_its_own() -> None:
    group = fake()
    assert group is not None
    offers = [group.offer() for _ in range(100)]
    assert {each.handle for each in offers} == {"fake:0"}
    assert len({each.number for each in offers}) == 100


def test_there_is_no_such_group_where_torch_says_so() -> None:
    def refused(_: Any) -> None:
        raise RuntimeError("Gloo does not support enable_reconfigure")

    def has_no_option(_: Any) -> None:
        raise AttributeError("enable_reconfigure")

    assert fake(supports_reconfigure=False) is None
    assert make_reconfigurable(refused) is None
    assert make_reconfigurable(has_no_option) is None


@needs_reconfigure
def test_a_group_of_gloos_gets_members_again_and_again_and_its_handle_changes() -> None:
    def make(store: Any) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options.enable_reconfigure = True
        return dist.ProcessGroupGloo(store, 0, 1, options)

    group = make_reconfigurable(make)
    assert group is not None
    handles = []
    for _ in range(3):
        store, offer = ExchangedStore(5), group.offer()
        handles.append(offer.handle)
        group.held.append("memory of the generation before")
        members = agreed_members([offer])
        assert members is not None
        group.reconfigure(store, members, 5)
        store.close()
        assert group.held == []
        tensor = torch.ones(10)
        group.group.allreduce([tensor]).wait()
        assert tensor.eq(1).all()
    assert len(set(handles)) == 3
