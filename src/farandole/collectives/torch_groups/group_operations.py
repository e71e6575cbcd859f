"""Operations on tensors that a process group of torch's carries out, agreed on around the ring: what the transports of
gloo/ and nccl/ are made of.

Ranks agree on each operation around the ring, hand it to the group, and tell each other when they have their result.
The group works on a private copy: after an abort it may go on writing for a while, and writes where nobody looks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from farandole.clock import now_s
from farandole.collectives.connection_pair import Broken
from farandole.collectives.reduction import Reduction
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import Header, Operation
from farandole.collectives.tensor_bytes import dtype_code
from farandole.status_reporting import WaitingForPeers

_RING_KNOWS_S = 0.1  # after a connection of the group's has failed, how long the ring may need to tell whose it was

# Types that neither Gloo nor NCCL reduces, in one that they do and that has the same result in its lower bits.
_WIDER = {torch.int16: torch.int32}

NO_LIMIT_S = 30.0 * 24 * 3600
"""Who is alive is the coordinator's business: a group is not to give up by itself."""

OPS: dict[Reduction, dist.ReduceOp.RedOpType] = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}


class Begun(Protocol):
    """An operation of a group's; torch.distributed.Work is one."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        ...

    def wait(self) -> object:
        """Once it is completed: raises RuntimeError unless it has ended well."""
        ...


class TorchGroup(Protocol):
    """What a process group is asked for, by one thread; shut_down() is for any.

    name          for errors
    look_every_s  how often a rank looks around while it waits, unless the group calls `when_done`
    """

    name: str
    look_every_s: float

    def take(self, flat: torch.Tensor, dtype: torch.dtype, is_read: bool) -> torch.Tensor:
        """A private copy in as many elements of another type, or, with uint8, of its bytes; uninitialized unless
        `is_read`. The memory is the same for every operation."""
        ...

    def all_reduce(self, copy: torch.Tensor, op: Reduction, when_done: Callable[[], None]) -> Begun:
        """Raises torch.distributed.DistError when a peer is gone."""
        ...

    def broadcast(self, copy: torch.Tensor, source: int, when_done: Callable[[], None]) -> Begun: ...

    def give(self, copy: torch.Tensor, flat: torch.Tensor) -> None:
        """The result into the caller's tensor; it is there when this returns."""
        ...

    def shut_down(self) -> None:
        """From any thread, at once: end what is under way. It may go on for a moment."""
        ...

    def release(self) -> None:
        """End everything, in the background. Idempotent."""
        ...


class GroupOperations:
    """
    ring       connects all ranks in the same order; carries words in turn with its own operations
    operations what all_reduce and broadcast are called in headers
    """

    def __init__(
        self,
        ring: RingTransport,
        group: TorchGroup,
        operations: tuple[Operation, Operation] = (Operation.ALL_REDUCE, Operation.BROADCAST),
    ) -> None:
        self._ring, self.group = ring, group
        self._all_reduce, self._broadcast = operations
        self._wake = threading.Event()

    def all_reduce(self, flat: torch.Tensor, trailer: bytes, op: Reduction) -> list[bytes]:
        """As a transport's, of a flat tensor that is not empty."""
        header = self._header(self._all_reduce, flat, op, len(trailer))
        trailers = self._ring.exchange(header, trailer)
        copy = self.group.take(flat, _WIDER.get(flat.dtype, flat.dtype), is_read=True)
        self._run(header, lambda: self.group.all_reduce(copy, op, self._wake.set))
        self.group.give(copy, flat)
        return trailers

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """As a transport's, of a flat tensor that is not empty."""
        header = self._header(self._broadcast, flat, source)
        self._ring.exchange(header, b"")
        data = flat.view(torch.uint8)
        copy = self.group.take(data, torch.uint8, is_read=self._ring.rank == source)
        self._run(header, lambda: self.group.broadcast(copy, source, self._wake.set))
        self.group.give(copy, data)

    def abort(self) -> None:
        """From any thread, once the ring is aborted."""
        self._wake.set()
        self.group.shut_down()

    def _header(self, operation: Operation, flat: torch.Tensor, source: int, trailer_bytes: int = 0) -> Header:
        nbytes = flat.numel() * flat.element_size()
        return Header(operation, self._ring.next_sequence, dtype_code(flat.dtype), source, nbytes, trailer_bytes)

    def _run(self, header: Header, begin: Callable[[], Begun]) -> None:
        """One operation of the group's, on all ranks: when it returns, all have their result."""
        try:
            with self._ring.running(header), WaitingForPeers():
                self._wait(begin, header)
            self._ring.exchange(header._replace(sequence=self._ring.next_sequence, trailer_bytes=1), b"\0")
        except BaseException:
            self.group.shut_down()
            raise

    def _wait(self, begin: Callable[[], Begun], header: Header) -> None:
        """Until the operation has ended. Raises at once what ends it for this rank, whatever the group still does."""
        try:
            work = begin()
        except dist.DistError as error:
            self._ring.end_by(self._whose_failure(str(error)), header)
        while not work.is_completed():
            if self._wake.wait(self.group.look_every_s):
                self._wake.clear()
            interruption = self._ring.interruption()
            # A call is no news: another rank has its result, and says so.
            if isinstance(interruption, Broken) and not work.is_completed():
                self._ring.end_by(interruption, header)
        try:
            work.wait()
        except RuntimeError as error:
            self._ring.end_by(self._whose_failure(str(error)), header)

    def _whose_failure(self, detail: str) -> Broken:
        """A connection of the group's has failed; mostly the ring will know soon of whom, otherwise a neighbour is
        named."""
        deadline_s = now_s() + _RING_KNOWS_S
        while now_s() < deadline_s:
            interruption = self._ring.interruption()
            if isinstance(interruption, Broken):
                return interruption
            self._wake.wait(self.group.look_every_s)
        return Broken("receive", f"{self.group.name}: {detail}")
