"""The members of a group, and the connections between them. c10d_group.py uses them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Protocol

from farandole.collectives import world
from farandole.collectives.alone import AloneTransport
from farandole.collectives.p2p.p2p_transport import P2PTransport
from farandole.collectives.p2p.point_to_point import PointToPoint
from farandole.collectives.transport import Transport
from farandole.errors import GroupOutdated, StepError

_EVERYBODYS = bytes(8)

_in_everybodys = threading.Lock()


@contextmanager
def alone_in(transport: Transport, op: str) -> Iterator[None]:
    """Enclose the execution of an operation.

    Raises StepError where two threads run operations of the transport of all ranks: their order would not be the same
    on all ranks.
    """
    if transport is not world.current().transport:
        yield  # a group with messages of its own
    elif _in_everybodys.acquire(blocking=False):
        try:
            yield
        finally:
            _in_everybodys.release()
    else:
        raise StepError(
            f"{op}: another thread is in a collective of all ranks. Create a group for this thread with "
            f"torch.distributed.new_group(), and use it in this thread only (dcp.async_save(process_group=...))"
        )


class GroupMembers(Protocol):
    """The members of one group. `rank` and `size` may change with the generation."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def transport(self, op: str) -> Transport:
        """Return the transport for the operation `op`, which is about to begin. Raises the error that prevents it."""
        ...

    def p2p(self, op: str) -> tuple[PointToPoint, Sequence[int], bytes]:
        """Return, as transport() does, the connections for messages.

        Returns the PointToPoint, the members by their ranks in it, and 8 bytes that distinguish this group's messages
        from those of others.
        """
        ...

    def close(self) -> None: ...


class Everybody:
    """All workers of the current generation, whichever it is."""

    @property
    def rank(self) -> int:
        return world.current().placement.rank

    @property
    def size(self) -> int:
        return world.current().placement.size

    def transport(self, op: str) -> Transport:
        world.raise_if_refused(op)
        return world.current().transport

    def p2p(self, op: str) -> tuple[PointToPoint, Sequence[int], bytes]:
        world.raise_if_refused(op)
        return _p2p_of(world.current(), op), range(self.size), _EVERYBODYS

    def close(self) -> None:
        """Do nothing: only fd.shutdown() leaves the world."""


class Some:
    """Some ranks of one generation, or all in another order. They end with it.

    A group whose first use is in a thread other than the main one is for that thread.

    Args:
        ranks: The members, in the order of the group.
        number: The number of earlier groups of the same members in this generation: alike on all of them.
    """

    def __init__(self, ranks: Sequence[int], number: int) -> None:
        here = world.current()
        self._world, self._ranks, self._placement = weakref.ref(here), list(ranks), here.placement
        self._generation = here.id
        self._digest = blake2b(repr((self._ranks, number)).encode(), digest_size=16).digest()
        self._transport: Transport | None = None
        self._is_closed = False

    @property
    def rank(self) -> int:
        return self._ranks.index(self._placement.rank)

    @property
    def size(self) -> int:
        return len(self._ranks)

    def transport(self, op: str) -> Transport:
        here = self._require_own_world(op)
        if self._transport is None:
            self._transport = self._connect(here, op)
        return self._transport

    def p2p(self, op: str) -> tuple[PointToPoint, Sequence[int], bytes]:
        return _p2p_of(self._require_own_world(op), op), self._ranks, self._digest[:8]

    def close(self) -> None:
        self._is_closed = True
        self.forget()

    def forget(self) -> None:
        """Release the transport, so that a group that outlives its generation does not hold memory."""
        self._transport = None

    def _connect(self, here: world.World, op: str) -> Transport:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._ranks == list(range(here.placement.size)):
            return here.transport  # all ranks make the same calls on both, in the same order
        if len(self._ranks) == 1:
            return AloneTransport(here.id.number)
        return P2PTransport(_p2p_of(here, op), self._ranks, self._digest)

    def _require_own_world(self, op: str) -> world.World:
        world.raise_if_refused(op)
        here = world.current()
        if here is not self._world():
            raise GroupOutdated(
                f"{op}: this group was created for ranks {self._ranks} in generation {self._generation}, and this is "
                f"generation {here.id}: these ranks are other workers now, or do not exist. Create groups and device "
                f"meshes again in a callback of state.register_reset_callbacks(), or, without a DataLoader of "
                f"Farandole, in the elastic function, which is called again"
            )
        if self._is_closed:
            raise GroupOutdated(f"{op}: this group of ranks {self._ranks} was destroyed")
        return here


def _p2p_of(here: world.World, op: str) -> PointToPoint:
    if here.p2p is None:
        raise ValueError(f"{op}: this worker is the only one, there is no other rank")
    return here.p2p
