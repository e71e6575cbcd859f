"""A step that was interrupted after all gradients had arrived: other workers may have taken it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farandole.errors import PeerLost
from farandole.integrations.sharding import shard_path
from farandole.integrations.sharding.shard_path import Gradients, ShardPath


class Shards:
    """What a path needs of ElasticShards: one gradient, and the options of one group."""

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = torch.ones(3)
        self.rate = 0.1

    def gradients(self) -> Gradients:
        return [self.gradient]

    def exchange(self, own: Gradients) -> Gradients:
        return [torch.full((3,), 2.0)]

    def digests(self) -> tuple[int, int]:
        return 0, 0

    def refuse_changed(self) -> None:
        """Nothing has changed."""

    def options(self) -> list[dict[str, Any]]:
        return [{"lr": self.rate}]

    def drop_gradients(self) -> None:
        self.gradient = None


class Transport:
    size = 2

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes) -> list[bytes]:
        raise PeerLost("all_reduce", 1, 1)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The decided steps of the state, in a world of two workers whose next collective fails."""
    found = SimpleNamespace(decided=5)
    monkeypatch.setattr(shard_path.SESSION, "run_loop", SimpleNamespace(steps_decided=lambda: found.decided))
    monkeypatch.setattr(shard_path.world, "current", lambda: SimpleNamespace(transport=Transport()))
    monkeypatch.setattr(shard_path, "absorb", lambda: True)
    return found


def interrupted(shards: Shards) -> ShardPath:
    path = ShardPath(shards)  # type: ignore[arg-type]
    path._give_to_mirror()
    return path


def test_a_step_that_others_have_taken_is_kept_with_the_options_that_it_had(steps: SimpleNamespace) -> None:
    shards = Shards()
    path = interrupted(shards)
    shards.rate, steps.decided = 0.05, 6  # those of the worker that has taken it, and of its scheduler
    ready = path.take_decided()
    assert ready is not None
    assert ready.options == [{"lr": 0.1}]
    assert path.take_decided() is None


def test_a_script_that_zeroes_gradients_in_place_after_the_step_does_not_change_those_of_the_step(
    steps: SimpleNamespace,
) -> None:
    shards = Shards()
    path = interrupted(shards)
    assert shards.gradient is None  # nothing is left that it could zero
    steps.decided = 6
    ready = path.take_decided()
    assert ready is not None
    (gradient,) = ready.own
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(3))


def test_a_step_that_nobody_has_taken_is_forgotten_in_the_next_world(steps: SimpleNamespace) -> None:
    path = interrupted(Shards())
    assert path.take_decided() is None
    path.begin_world()
    steps.decided = 6
    assert path.take_decided() is None
