"""Parts of tensors between workers of two numbers, and mirrors that take the steps of the parts that they mirror."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from farandole.integrations.sharding.division import Held, choose, mirrors, rows_of
from farandole.integrations.sharding.mirror import Mirror
from farandole.integrations.sharding.parts import Part, cut, digest, joined
from farandole.integrations.sharding.redivision import Former, redivided, to_mirror
from tests.support.thread_world import ThreadTransport, ThreadWorld

HEIGHTS = (17, 5, 1, 2)  # with 4 workers shards of 5, 5, 5, 2 rows; of 2, 2, 1, 0; and empty ones
KEPT = ("", "exp_avg", "counts")


def whole_tensors() -> list[dict[str, torch.Tensor]]:
    """The tensors of each parameter and of its optimizer state, of several dtypes and shapes."""
    found, place = [], 0
    for number, rows in enumerate(HEIGHTS):
        shape = (rows, 3) if number % 2 == 0 else (rows,)
        values = torch.arange(place, place + rows * (3 if number % 2 == 0 else 1)).view(shape)
        found.append({"": values.to(torch.bfloat16), "exp_avg": values / 7, "counts": values + 2**40})
        place += 100
    return found


def parts_of(size: int, index: int) -> list[Part]:
    """The parts of a shard of so many."""
    return [
        Part(
            {
                key: each[rows_of(rows, size, index).start : rows_of(rows, size, index).stop]
                for key, each in one.items()
            },
            {"step": torch.tensor(float(number)), "name": f"parameter {number}"},
        )
        for number, (rows, one) in enumerate(zip(HEIGHTS, whole_tensors(), strict=True))
    ]


def all_to_new_world(old: int, owners: Sequence[int | None]) -> list[Any]:
    """Divide anew among workers of which each was of an old rank, or is new."""
    held = [[Held(3, old, rank, (rank - 1) % old, 8)] if rank is not None else [] for rank in owners]
    plan = choose(held)
    assert plan is not None

    def work(transport: ThreadTransport) -> list[Part]:
        rank = owners[transport.rank]
        former = Former() if rank is None else Former(parts_of(old, rank), parts_of(old, (rank - 1) % old))
        return redivided(HEIGHTS, former, plan, held, transport)

    return ThreadWorld(len(owners)).run(work)


@pytest.mark.parametrize(
    ("old", "owners"),
    [
        (4, [0, 1, 2, 3]),
        (4, [0, 2, 3]),  # a shard comes from its mirror
        (4, [3, 1]),  # two of them, in another order
        (2, [1]),
        (4, [None, 0, 2, None, 3, None]),  # new workers have nothing, and the first one is new
        (3, [2, None, 0, None, None, None, None]),  # more workers than some parameters have rows
    ],
)
def test_each_worker_gets_its_rows_bit_for_bit(old: int, owners: list[int | None]) -> None:
    for rank, parts in enumerate(all_to_new_world(old, owners)):
        assert not isinstance(parts, BaseException), parts
        for part, expected in zip(parts, parts_of(len(owners), rank), strict=True):
            assert tuple(part.rows) == KEPT
            for key, each in expected.rows.items():
                assert part.rows[key].dtype == each.dtype
                assert torch.equal(part.rows[key], each)
            assert part.shared == expected.shared


def test_rows_are_in_new_memory() -> None:
    held = [[Held(1, 1, 0, -1, 0)]]
    plan, mine = choose(held), parts_of(1, 0)
    assert plan is not None

    def work(transport: ThreadTransport) -> list[Part]:
        return redivided(HEIGHTS, Former(mine), plan, held, transport)

    (parts,) = ThreadWorld(1).run(work)
    assert not isinstance(parts, BaseException), parts
    assert all(
        new.rows[key].data_ptr() != old.rows[key].data_ptr()
        for new, old in zip(parts, mine, strict=True)
        for key in KEPT
    )


@pytest.mark.parametrize("before", range(3))
def test_a_worker_that_is_lost_on_the_way_leaves_all_others_with_an_error(before: int) -> None:
    held = [[Held(1, 3, rank, (rank - 1) % 3, 0)] for rank in range(3)]
    plan = choose(held)
    assert plan is not None
    threads = ThreadWorld(3)
    threads.kill(1, before)
    results = threads.run(
        lambda transport: redivided(
            HEIGHTS, Former(parts_of(3, transport.rank), parts_of(3, (transport.rank - 1) % 3)), plan, held, transport
        )
    )
    assert [type(each).__name__ for each in results] == ["PeerLost", "SystemExit", "PeerLost"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_go_to_the_next_worker_of_whatever_dtype_and_number(size: int) -> None:
    def work(transport: ThreadTransport) -> list[torch.Tensor]:
        like = [each for part in parts_of(size, (transport.rank - 1) % size) for each in part.rows.values()]
        own = [each for part in parts_of(size, transport.rank) for each in part.rows.values()]
        room = torch.empty(sum(each.nbytes for each in like), dtype=torch.uint8)
        to_mirror(joined(own), room, mirrors([(rank, 0) for rank in range(size)]), transport)
        return cut(room, like)

    for rank, found in enumerate(ThreadWorld(size).run(work)):
        assert not isinstance(found, BaseException), found
        expected = [each for part in parts_of(size, (rank - 1) % size) for each in part.rows.values()]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# Mirrors -------------------------------------------------------------------------------------------------------------

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "AdamW with amsgrad, not foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True, foreach=False),
    "AdamW with a tensor as rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
}


def grouped(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, in another order than that of the model."""
    return [{"params": [parameters[2], parameters[0]]}, {"params": [parameters[1]], "weight_decay": 0.05}]


def part_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, rows: slice) -> Part:
    state = optimizer.state.get(parameter, {})
    divided = {key: each[rows].clone() for key, each in state.items() if getattr(each, "shape", ()) == parameter.shape}
    shared = {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in state.items()}
    return Part(
        {"": parameter.detach()[rows].clone(), **divided},
        {key: each for key, each in shared.items() if key not in divided},
    )


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("loaded_after", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mirror_has_the_rows_of_the_whole_tensors_bit_for_bit(
    make: Make, loaded_after: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(7, 4), (5,), (6, 2)]]
    optimizer = make(grouped(parameters))
    mirror, rows = Mirror(optimizer, type(optimizer), [(0, 1), (1, 0), (0, 0)]), slice(2, 5)
    for number in range(8):
        if number == loaded_after:
            mirror.load([part_of(optimizer, each, rows) for each in parameters])
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.8
        for place, each in enumerate(parameters):
            # One has no gradient in some of the steps: an optimizer passes over it.
            each.grad = None if place == 1 and number % 3 == 1 else torch.randn_like(each)
        if number >= loaded_after:
            mirror.apply([None if each.grad is None else each.grad[rows].clone() for each in parameters])
        optimizer.step()
    expected = [part_of(optimizer, each, rows) for each in parameters]
    assert digest(mirror.parts()) == digest(expected)
    for mirrored, part in zip(mirror.parts(), expected, strict=True):
        assert mirrored.rows.keys() == part.rows.keys()
        assert mirrored.shared == part.shared
        assert all(torch.equal(mirrored.rows[key], each) for key, each in part.rows.items())


def test_a_mirror_of_empty_shards_takes_steps_and_leaves_the_owners_optimizer_as_it_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.AdamW([parameter])
    mirror = Mirror(optimizer, torch.optim.AdamW, [(0, 0)])
    mirror.load([Part({"": torch.empty(0, 2)}, {})])
    mirror.apply([torch.empty(0, 2)])
    (part,) = mirror.parts()
    assert part.rows["exp_avg"].shape == (0, 2)
    assert part.shared["step"] == 1
    assert not optimizer.state
    assert torch.equal(parameter, torch.ones(3, 2))


def test_a_frozen_parameter_is_mirrored_though_it_is_in_no_group() -> None:
    trained, frozen = torch.nn.Parameter(torch.ones(2)), torch.full((2,), 5.0)
    optimizer = torch.optim.SGD([trained], lr=1.0)
    mirror = Mirror(optimizer, torch.optim.SGD, [(-1, -1), (0, 0)])
    mirror.load([Part({"": frozen}, {}), Part({"": torch.ones(2)}, {})])
    mirror.apply([None, torch.ones(2)])
    first, second = mirror.parts()
    assert torch.equal(first.rows[""], frozen)
    assert torch.equal(second.rows[""], torch.zeros(2))
