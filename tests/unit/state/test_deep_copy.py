"""Copies of nested values, and snapshots whose tensors are filled in later."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from farandole.errors import ConfigError
from farandole.training.state.deep_copy import ValueSnapshot, deep_copy, tensors_in

pytestmark = pytest.mark.core


def test_what_is_nested_is_copied_too() -> None:
    live = {"trail": [[1], {"best": [0.5]}], "weights": [torch.ones(2)]}
    kept = deep_copy(live, "state")
    live["trail"][1]["best"].append(0.7)
    live["weights"][0].zero_()
    assert kept["trail"] == [[1], {"best": [0.5]}]
    assert kept["weights"][0].tolist() == [1, 1]


def test_what_two_values_share_they_share_in_the_copy() -> None:
    shared: list[int] = []
    kept = deep_copy({"a": shared, "b": [shared]}, "state")
    assert kept["a"] is kept["b"][0]


def test_a_loss_is_copied_without_its_graph() -> None:
    loss = (torch.ones(1, requires_grad=True) * 2).sum()
    kept = deep_copy({"loss": loss}, "state")["loss"]
    assert kept.item() == 2
    assert kept.grad_fn is None


def test_a_value_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(ConfigError, match=r"state\.guard of type lock"):
        deep_copy({"batch": 1, "guard": threading.Lock()}, "state")


def test_tensors_are_found_in_nested_containers_once_each() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    assert list(tensors_in({"a": [first, (second, first)], "b": "text", "c": {"d": first}})) == [first, second]


def test_a_container_that_holds_itself_is_walked_once() -> None:
    loop: list[Any] = [torch.zeros(1)]
    loop.append(loop)
    assert len(list(tensors_in(loop))) == 1


def test_later_copies_are_the_callers_and_all_others_are_made_at_once() -> None:
    now, later = torch.ones(2), torch.full((2,), 5.0)
    snapshot = ValueSnapshot()
    pairs = snapshot.take({"now": now, "later": later}, lambda tensor: tensor is later)
    assert len(pairs) == 1
    source, target = pairs[0]
    target.copy_(source)
    now.zero_()
    later.zero_()
    assert snapshot.copy()["now"].tolist() == [1, 1]
    assert snapshot.copy()["later"].tolist() == [5, 5]


def test_memory_is_used_again_where_the_layout_is_the_same() -> None:
    snapshot = ValueSnapshot()
    snapshot.take([torch.zeros(4), torch.zeros(2)])
    before = [tensor.data_ptr() for tensor in snapshot.view()]
    snapshot.take([torch.ones(4), torch.ones(3)])
    after = snapshot.view()
    assert after[0].data_ptr() == before[0]
    assert after[1].tolist() == [1, 1, 1]


def test_a_copy_that_fails_leaves_the_snapshot_as_it_was() -> None:
    snapshot = ValueSnapshot()
    snapshot.take({"weights": torch.ones(2), "more": 1})
    with pytest.raises(TypeError):
        snapshot.take({"weights": torch.zeros(2), "more": threading.Lock()})
    assert snapshot.copy()["weights"].tolist() == [1, 1]


def test_what_a_snapshot_gives_out_is_not_its_own() -> None:
    snapshot = ValueSnapshot()
    snapshot.take({"trail": [1], "weights": torch.ones(2)})
    out = snapshot.copy()
    out["trail"].append(2)
    out["weights"].zero_()
    snapshot.view()["trail"].append(3)
    assert snapshot.copy()["trail"] == [1]
    assert snapshot.copy()["weights"].tolist() == [1, 1]


def test_a_snapshot_of_a_module_keeps_the_versions_of_its_parts() -> None:
    """Without them, load_state_dict() takes it for one of an old torch, and sets counters to zero."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    snapshot = ValueSnapshot(is_on_host=True)
    snapshot.take(state)
    for taken in (snapshot.copy(), snapshot.view()):
        assert type(taken) is type(state)
        assert taken._metadata == state._metadata
        assert taken._metadata["0"] is not state._metadata["0"]


def test_what_is_shared_within_a_value_is_shared_in_its_snapshot() -> None:
    shared = [1, torch.ones(2)]
    itself: dict[str, object] = {"a": shared, "b": (shared, {3: shared})}
    itself["itself"] = itself
    snapshot = ValueSnapshot()
    snapshot.take(itself)
    shared.append("later")
    taken = snapshot.copy()
    assert taken["a"] is taken["b"][0] is taken["b"][1][3]
    assert (len(taken["a"]), taken["itself"] is taken) == (2, True)
