"""The results of c10d's collectives: a Work that has completed, a message to come, and the error of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import Work
from torch.futures import Future

from farandole.collectives import world
from farandole.collectives.p2p.incoming import Expected, P2PMessage
from farandole.collectives.p2p.point_to_point import PointToPoint
from farandole.errors import CollectiveMismatch, GroupOutdated, RecoverableError
from farandole.process_group.c10d_collectives import as_bytes, in_place
from farandole.process_group.old_torch import FORGETS_WORKS, ended_work


class Done(Work):
    """A completed Work.

    Collectives run in the order in which they are called, and in the calling thread, so no caller has to wait. An error
    is raised by the call itself, for callers in C++ as well.

    Args:
        tensors: The tensors that the operation wrote.
        source: The rank that a message came from.
    """

    def __new__(cls, tensors: Sequence[torch.Tensor] = (), source: int = -1) -> Work:  # type: ignore[misc]
        return ended_work(tensors) if FORGETS_WORKS else super().__new__(cls)

    def __init__(self, tensors: Sequence[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._tensors, self._source = list(tensors), source

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once, as wait() does."""

    def block_current_stream(self) -> None:
        """Do nothing: a CPU has no streams."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a completed future with the tensors."""
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._tensors)
        return future


class Receiving(Work):
    """A message that may not have come yet; wait() writes it into the tensor.

    `ranks` are the members of the group, by their ranks in `p2p`.
    """

    def __init__(self, p2p: PointToPoint, expected: Expected, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        super().__init__()
        self._p2p, self._expected, self._tensor, self._ranks = p2p, expected, tensor, ranks
        self._message: P2PMessage | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait for the message.

        Raises RecoverableError when the sender was lost, CollectiveMismatch for a message of another size, and
        GroupOutdated when there was a regroup since the receive was requested.
        """
        if self._message is not None:
            return True
        if world.current().p2p is not self._p2p:
            raise GroupOutdated(
                f"recv: a message of generation {self._p2p.generation} cannot arrive any more, this is generation "
                f"{world.current().id}: call recv again in each generation"
            )
        try:
            message = self._p2p.wait_for(self._expected)
        except RecoverableError as error:
            remember_failure(error)
            raise
        with in_place(self._tensor) as dense:
            memory = as_bytes(dense)
            if memory.numel() != len(message.content):
                raise CollectiveMismatch(
                    f"recv: rank {self._ranks.index(message.source)} has sent {len(message.content)} bytes, and the "
                    f"tensor of shape {tuple(dense.shape)} and dtype {dense.dtype} has {memory.numel()}"
                )
            if memory.numel():
                memory.copy_(torch.frombuffer(message.content, dtype=torch.uint8))
        self._message = message
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._expected.message is not None and self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._tensor]

    def source_rank(self) -> int:
        self.wait()
        assert self._message is not None
        return list(self._ranks).index(self._message.source)

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        self.wait()
        return Done([self._tensor]).get_future()


# The error that ended the collectives of a generation -----------------------------------------------------------------
#
# It is kept for callers that lost it on the way through C++.

_seen: tuple[world.World, RecoverableError] | None = None


def remember_failure(error: RecoverableError) -> None:
    """Store the error that an operation of a group has raised."""
    global _seen
    if world.is_entered() and getattr(error, "generation", None) == world.current().id.number:
        _seen = world.current(), error


def failure() -> RecoverableError | None:
    """Return the error that an operation of a group has raised in the current generation, which is over then.

    None if there is none. backward() of a DistributedDataParallel raises a RuntimeError of another type when a worker
    was lost: this is the original error. It is forgotten when the next generation begins.
    """
    if _seen is None or not world.is_entered() or _seen[0] is not world.current():
        return None
    return _seen[1]
