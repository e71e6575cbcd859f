"""The results of c10d's collectives: a Work that has completed, a message to come, and the error of a generation."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Protocol

import torch
from torch.distributed import Work
from torch.futures import Future

from farandole.base.membership import Placement
from farandole.errors import CollectiveMismatch, GroupOutdated, RecoverableError, StepError
from farandole.integrations.torchrun.process_group.c10d_collectives import in_place
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.background import of_gradients
from farandole.training.collectives.connection_pair import as_bytes
from farandole.training.collectives.point_to_point import Expected, P2PMessage, PointToPoint
from farandole.training.collectives.subgroup_transport import SubgroupTransport, connect_members
from farandole.training.collectives.torch_versions import FORGETS_WORKS, ended_work
from farandole.training.collectives.transport import Transport


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

    Args:
        worlds: The worlds of the group.
        ranks: The members of the group, by their ranks in `p2p`.
    """

    def __init__(
        self,
        worlds: Worlds,
        p2p: PointToPoint,
        expected: Expected,
        tensor: torch.Tensor,
        ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self._worlds, self._p2p, self._expected, self._tensor, self._ranks = worlds, p2p, expected, tensor, ranks
        self._message: P2PMessage | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait for the message.

        Raises RecoverableError when the sender was lost, CollectiveMismatch for a message of another size, and
        GroupOutdated when there was a regroup since the receive was requested.
        """
        if self._message is not None:
            return True
        here = self._worlds.current()
        if here.p2p is not self._p2p:
            raise GroupOutdated(
                f"recv: a message of generation {self._p2p.generation} cannot arrive any more, this is generation "
                f"{here.id}: call recv again in each generation"
            )
        try:
            with self._worlds.limit("recv", timeout):
                message = self._p2p.wait_for(self._expected)
        except RecoverableError as error:
            LAST_FAILURE.remember(error)
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


class LastFailure:
    """The error that an operation of a group has raised in the current generation."""

    def __init__(self) -> None:
        self._seen: tuple[world.World, RecoverableError] | None = None

    def remember(self, error: RecoverableError) -> None:
        """Store an error."""
        if world.is_entered() and getattr(error, "generation", None) == world.current().id.number:
            self._seen = world.current(), error

    def get(self) -> RecoverableError | None:
        """Return the error; None if there is none."""
        if self._seen is None or not world.is_entered() or self._seen[0] is not world.current():
            return None
        return self._seen[1]

    def forget(self) -> None:
        """Release the error of the last generation: its traceback refers to the memory of the operation that failed."""
        self._seen = None


LAST_FAILURE = LastFailure()


def failure() -> RecoverableError | None:
    """Return the error that an operation of a group has raised in the current generation, which is over then.

    None if there is none. backward() of a DistributedDataParallel raises a RuntimeError of another type when a worker
    was lost: this is the original error. It is forgotten when the next generation begins.

    Examples:
        >>> from farandole import process_group
        >>> process_group.failure()  # nothing has failed
    """
    return LAST_FAILURE.get()


# The worlds of a group, one after the other ---------------------------------------------------------------------------


class Worlds(Protocol):
    """The generations in which the groups of one default group exist.

    Attributes:
        in_operation: Held by the thread that runs an operation of all ranks.
    """

    @property
    def in_operation(self) -> threading.Lock: ...

    def current(self) -> world.World:
        """Return the world of the current generation."""
        ...

    def begin(self, op: str) -> world.World:
        """Return the world for the operation `op`, which is about to begin. Raises the error that prevents it."""
        ...

    def limit(self, op: str, timeout: timedelta | None) -> AbstractContextManager[None]:
        """Enclose an operation that may take `timeout`, or, where that is None or not positive, the group's timeout."""
        ...


class WorldsOfTheJob:
    """The worlds of this worker's job.

    Operations have no time limit: the coordinator decides which workers are alive.
    """

    def __init__(self) -> None:
        self.in_operation = threading.Lock()

    def current(self) -> world.World:
        return world.current()

    def begin(self, op: str) -> world.World:
        world.raise_if_refused(op)
        return world.current()

    def limit(self, op: str, timeout: timedelta | None) -> AbstractContextManager[None]:
        return nullcontext()


JOB = WorldsOfTheJob()


# The members of a group, and the connections between them. c10d_group.py uses them ------------------------------------

_EVERYBODYS = bytes(8)


@contextmanager
def alone_in(transport: Transport, op: str, worlds: Worlds = JOB) -> Iterator[None]:
    """Enclose the execution of an operation.

    Raises StepError where two threads run operations of the transport of all ranks: their order would not be the same
    on all ranks.
    """
    if transport is not worlds.current().transport:
        yield  # a group with messages of its own
        return
    of_gradients.wait()
    if worlds.in_operation.acquire(blocking=False):
        try:
            yield
        finally:
            worlds.in_operation.release()
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

    @property
    def worlds(self) -> Worlds: ...

    def transport(self, op: str) -> Transport:
        """Return the transport for the operation `op`, which is about to begin. Raises the error that prevents it."""
        ...

    def p2p(self, op: str) -> tuple[PointToPoint, Sequence[int], bytes]:
        """Return, as transport() does, the connections for messages.

        Returns the PointToPoint, the members by their ranks in it, and 8 bytes that distinguish this group's messages
        from those of others.
        """
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class OfScripts:
    """What in_place/ replaces for collectives that the script calls itself, so that they are completed after a loss.
    Collectives of a DistributedDataParallel are handled with its step instead.

    transport  returns the transport for a collective, by its name; None: it is the world's
    placement  returns rank and size as scripts see them, in a loop body that has begun in another generation; None,
               also as its result: they are those of the world
    is_plain   the world's transport is used for now
    """

    transport: Callable[[str], Transport] | None = None
    placement: Callable[[], Placement | None] | None = None
    is_plain: bool = False


OF_SCRIPTS = OfScripts()


class Everybody:
    """All workers of the current generation, whichever it is."""

    worlds: Worlds = JOB

    @property
    def rank(self) -> int:
        return self._placement.rank

    @property
    def size(self) -> int:
        return self._placement.size

    @property
    def _placement(self) -> Placement:
        placement = OF_SCRIPTS.placement
        seen = placement() if placement is not None and self.worlds is JOB else None
        return seen or self.worlds.current().placement

    def transport(self, op: str) -> Transport:
        if OF_SCRIPTS.transport is not None and is_completed_after_a_loss(self):
            return OF_SCRIPTS.transport(op)
        return self.worlds.begin(op).transport

    def p2p(self, op: str) -> tuple[PointToPoint, Sequence[int], bytes]:
        return _p2p_of(self.worlds.begin(op), op), range(self.size), _EVERYBODYS

    def abort(self) -> None:
        """Do nothing: operations run in their calls, and the coordinator ends those that cannot complete."""

    def close(self) -> None:
        """Do nothing: only fd.shutdown() leaves the world."""


def is_completed_after_a_loss(members: GroupMembers) -> bool:
    """Return whether the remaining workers complete a collective of this group when one of them is lost."""
    is_replaced = OF_SCRIPTS.transport is not None and not OF_SCRIPTS.is_plain
    return is_replaced and isinstance(members, Everybody) and members.worlds is JOB


@contextmanager
def plain_collectives() -> Iterator[None]:
    """Use the world's transport within this context."""
    before, OF_SCRIPTS.is_plain = OF_SCRIPTS.is_plain, True
    try:
        yield
    finally:
        OF_SCRIPTS.is_plain = before


class Some:
    """Some ranks of one generation, or all in another order. They end with it.

    A group whose first use is in a thread other than the main one is for that thread.

    Args:
        ranks: The members, in the order of the group.
        number: The number of earlier groups of the same members in this generation: alike on all of them.
        worlds: Those of the default group.
    """

    def __init__(self, ranks: Sequence[int], number: int, worlds: Worlds = JOB) -> None:
        self.worlds = worlds
        here = worlds.current()
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

    def abort(self) -> None:
        """Close the group: nothing is in flight between calls."""
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self.forget()

    def forget(self) -> None:
        """Release the transport, so that a group that outlives its generation does not hold memory."""
        transport, self._transport = self._transport, None
        if isinstance(transport, SubgroupTransport):  # others hold nothing of their own, or are those of all ranks
            transport.close()

    def _connect(self, here: world.World, op: str) -> Transport:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._ranks == list(range(here.placement.size)):
            return here.transport  # all ranks make the same calls on both, in the same order
        if len(self._ranks) == 1:
            return AloneTransport(here.id.number)
        return connect_members(_p2p_of(here, op), self._ranks, self._digest)

    def _require_own_world(self, op: str) -> world.World:
        here = self.worlds.begin(op)
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
