"""Objects and state in a world of one: what is refused, and that nothing is changed there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farandole.base.membership import GenerationId, Placement
from farandole.integrations.horovod.named.engine import NAMED, NamedCollectives
from farandole.integrations.horovod.named.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.transport import Transport

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    placement = Placement(0, 1, 0, 1, 0, 1)

    def connect(ranks: tuple[int, ...], process_set: int) -> Transport:
        return AloneTransport(1)

    named = NamedCollectives(AloneTransport(1), placement=placement, connect=connect)
    world.enter(world.World(GenerationId(1, 1, 1, ""), placement, AloneTransport(1), {NAMED: named}))
    yield
    named.close()
    world.enter(None)


def test_objects_come_back() -> None:
    obj = {"a": [1, 2], "f": lambda: 3}
    assert broadcast_object(obj) is obj
    (gathered,) = allgather_object(obj)
    assert gathered["a"] == [1, 2]
    assert gathered["f"]() == 3


@pytest.mark.parametrize("wrong", [3, "weight", iter([torch.zeros(1)])])
def test_parameters_come_in_a_dict_or_a_list(wrong: Any) -> None:
    with pytest.raises(ValueError, match="takes a dict of tensors, or a list"):
        broadcast_parameters(wrong, 0)


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match="'count' is a int, not a tensor"):
        broadcast_parameters({"count": 3}, 0)  # type: ignore[dict-item]


def test_parameters_may_come_with_or_without_names() -> None:
    tensor = torch.ones(3)
    broadcast_parameters({"a": tensor}, 0)
    broadcast_parameters([tensor, tensor.clone()], 0)
    broadcast_parameters([("a", tensor), ("b", torch.tensor(3))], 0)
    assert torch.equal(tensor, torch.ones(3))


def test_the_roots_state_and_options_stay_as_they_are() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    tensors = list(optimizer.state[model.weight].values())
    weight = model.weight.detach().clone()
    broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(optimizer.state[model.weight][key], value) for key, value in before.items())
    assert all(a is b for a, b in zip(optimizer.state[model.weight].values(), tensors, strict=True))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert torch.equal(model.weight, weight)


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=rate)
    broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] is rate


def test_the_state_of_lbfgs_is_refused_with_advice() -> None:
    optimizer = torch.optim.LBFGS(torch.nn.Linear(3, 1).parameters())
    with pytest.raises(ValueError, match=r"LBFGS.*broadcast_object"):
        broadcast_optimizer_state(optimizer, 0)
