"""Values as bytes plus tensors."""

from __future__ import annotations

import pytest
import torch

from farandole.training.state import packing

pytestmark = pytest.mark.core


def test_a_nested_value_comes_back_with_its_tensors() -> None:
    value = {"a": [torch.arange(6).reshape(2, 3), "text"], "b": (1.5, {"c": torch.tensor(True)})}
    packed = packing.pack(value)
    again = packing.unpack(packing.Packed(packed.skeleton, [tensor.clone() for tensor in packed.tensors]))
    assert torch.equal(again["a"][0], value["a"][0])
    assert again["a"][1] == "text"
    assert again["b"][0] == 1.5
    assert bool(again["b"][1]["c"])


def test_tensors_do_not_travel_in_the_skeleton() -> None:
    assert len(packing.pack({"big": torch.zeros(1_000_000)}).skeleton) < 1_000


def test_a_tensor_that_appears_twice_is_one_tensor_again() -> None:
    shared = torch.ones(3)
    packed = packing.pack([shared, shared])
    assert len(packed.tensors) == 1
    first, second = packing.unpack(packed)
    assert first is second


def test_room_for_a_value_is_filled_in_place() -> None:
    packed = packing.pack({"x": torch.arange(4), "y": torch.ones(2, 2, dtype=torch.bfloat16), "z": 3})
    room = packing.make_room(packed.skeleton)
    assert [(t.shape, t.dtype) for t in room] == [(t.shape, t.dtype) for t in packed.tensors]
    for empty, tensor in zip(room, packed.tensors, strict=True):
        empty.copy_(tensor)
    value = packing.unpack(packing.Packed(packed.skeleton, room))
    assert torch.equal(value["x"], torch.arange(4))
    assert value["z"] == 3


class OwnsItsMemory:
    """Reads its tensor when it is unpickled."""

    def __init__(self) -> None:
        self.tensor = torch.full((4,), 7.0)

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"].clone()


def test_a_value_that_reads_its_tensors_is_made_when_they_are_there() -> None:
    value = {"own": OwnsItsMemory(), "generator": torch.Generator().manual_seed(3), "shared": torch.ones(2)}
    packed = packing.pack([value, value["shared"]])
    room = packing.make_room(packed.skeleton)
    for empty in room:
        empty.zero_()
    for empty, tensor in zip(room, packed.tensors, strict=True):
        empty.copy_(tensor)
    made, shared = packing.unpack(packing.Packed(packed.skeleton, room))
    assert made["own"].tensor.tolist() == [7.0] * 4
    assert torch.equal(made["generator"].get_state(), value["generator"].get_state())
    assert made["shared"] is shared
