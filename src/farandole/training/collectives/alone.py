"""The transport of a world of one: every collective is local.

It is used without a launcher, before admission, and by the last survivor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from farandole.base.wire.sockets import can_read
from farandole.errors import GenerationEnded
from farandole.training.collectives.connection_pair import combiner, flat_on_its_device
from farandole.training.collectives.transport import Reduction

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division


class AloneTransport:
    """A Transport (transport.py) whose only rank is 0.

    It refuses the calls that a ring would refuse, so that a script which runs alone also runs with others.
    """

    rank, size = 0, 1

    def __init__(self, generation: int = 0) -> None:
        self._generation = generation
        self._abort_reason: str | None = None

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        self._raise_if_ended("all_reduce")
        flat_on_its_device(tensor)
        combiner(op)
        return [bytes(trailer)]

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        self._raise_if_ended("all_reduce_shards")
        if factor != 1.0:
            rows[0].mul_(factor)
        return [bytes(trailer)]

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._raise_if_ended("all_gather")
        return [bytes(payload)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._raise_if_ended("broadcast")
        flat_on_its_device(tensor)
        if source != 0:
            raise ValueError(f"broadcast: source must be rank 0, the only one, got {source}")

    def barrier(self) -> None:
        self._raise_if_ended("barrier")

    def wait_for_peer(self, wake: int) -> bool | None:
        self._raise_if_ended("wait")
        can_read(wake, within_s=None)
        return False

    def abort(self, reason: str) -> None:
        self._abort_reason = self._abort_reason or reason

    def close(self) -> None:
        self.abort("its transport was closed")

    def _raise_if_ended(self, op: str) -> None:
        if self._abort_reason is not None:
            raise GenerationEnded(op, self._generation, self._abort_reason)
