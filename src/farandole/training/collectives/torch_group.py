"""Process groups of torch, whose ranks agree around the ring: their operations, their construction and its store, for
Gloo and NCCL.

Ranks agree on each operation around the ring, submit it to the group, and tell each other when they have their result.
The group works on a private copy: after an abort it may go on writing for a while, into memory that is not read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import now_s
from farandole.training.collectives.connection_pair import Broken, Wake, as_bytes
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import Header, TransportOperation
from farandole.training.collectives.transport import Reduction

_RING_KNOWS_S = 0.1  # the time that the ring may need, after a connection of the group failed, to name the lost rank

# Types that neither Gloo nor NCCL reduces, with a type that they do reduce and whose lower bits have the same result.
_WIDER = {torch.int16: torch.int32}

NO_LIMIT_S = 30.0 * 24 * 3600
"""The time limit of a group, long enough to have no effect: the coordinator decides which workers are alive."""

OPS: dict[Reduction, dist.ReduceOp.RedOpType] = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}


class PendingWork(Protocol):
    """An operation of a group in progress; torch.distributed.Work is one."""

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without success. Never blocks."""
        ...

    def wait(self) -> object:
        """Raise RuntimeError unless it has succeeded. Called once it is completed."""
        ...


class TorchGroup(Protocol):
    """The interface of a process group for one thread; shut_down() is for any.

    Attributes:
        name: The name in errors.
        look_every_s: The interval, in seconds, at which a waiting rank checks, unless the group calls `when_done`.
    """

    name: str
    look_every_s: float

    def take(self, flat: torch.Tensor, dtype: torch.dtype, is_read: bool) -> torch.Tensor:
        """Return a private copy in as many elements of another type, or, with uint8, of its bytes.

        It is uninitialized unless `is_read`. All operations share the memory.
        """
        ...

    def all_reduce(self, copy: torch.Tensor, op: Reduction, when_done: Callable[[], None]) -> PendingWork:
        """Start an all-reduce of the copy. Raises torch.distributed.DistError when a peer is gone."""
        ...

    def broadcast(self, copy: torch.Tensor, source: int, when_done: Callable[[], None]) -> PendingWork: ...

    def give(self, copy: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy the result into the caller's tensor; it is complete when this returns."""
        ...

    def shut_down(self) -> None:
        """End the running operation at once. Callable from any thread. The operation may go on for a moment."""
        ...

    def release(self) -> None:
        """Release all resources, in the background. Idempotent."""
        ...


class GroupOperations:
    """Runs operations on a group.

    Args:
        ring: Connects all ranks in the same order; carries bytes in turn with its own operations.
        operations: The names of all_reduce and broadcast in headers.
    """

    def __init__(
        self,
        ring: RingTransport,
        group: TorchGroup,
        operations: tuple[TransportOperation, TransportOperation] = (
            TransportOperation.ALL_REDUCE,
            TransportOperation.BROADCAST,
        ),
    ) -> None:
        self._ring, self.group = ring, group
        self._all_reduce, self._broadcast = operations
        self._wake = threading.Event()

    def all_reduce(self, flat: torch.Tensor, trailer: bytes, op: Reduction) -> list[bytes]:
        """Reduce a flat tensor that is not empty, as a transport does."""
        header = self._ring.next_header(self._all_reduce, flat, op, len(trailer))
        trailers = self._ring.exchange(header, trailer)
        copy = self.group.take(flat, _WIDER.get(flat.dtype, flat.dtype), is_read=True)
        self._run(header, lambda: self.group.all_reduce(copy, op, self._wake.set))
        self.group.give(copy, flat)
        return trailers

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Broadcast a flat tensor that is not empty, as a transport does."""
        header = self._ring.next_header(self._broadcast, flat, source)
        self._ring.exchange(header, b"")
        data = as_bytes(flat)
        copy = self.group.take(data, torch.uint8, is_read=self._ring.rank == source)
        self._run(header, lambda: self.group.broadcast(copy, source, self._wake.set))
        self.group.give(copy, data)

    def abort(self) -> None:
        """Abort the group, once the ring is aborted. Callable from any thread."""
        self._wake.set()
        self.group.shut_down()

    def _run(self, header: Header, begin: Callable[[], PendingWork]) -> None:
        """Run one operation of the group on all ranks: when it returns, all have their result."""
        try:
            with self._ring.running(header), WaitingForPeers():
                self._wait(begin, header)
            self._ring.exchange(header._replace(sequence=header.sequence + 1, trailer_bytes=1), b"\0")
        except BaseException:
            self.group.shut_down()
            raise

    def _wait(self, begin: Callable[[], PendingWork], header: Header) -> None:
        """Wait until the operation has ended.

        Raises at once an error that ends it for this rank, even if the group goes on.
        """
        try:
            work = begin()
        except dist.DistError as error:
            self._ring.end_by(self._whose_failure(str(error)), header)
        while not work.is_completed():
            if self._wake.wait(self.group.look_every_s):
                self._wake.clear()
            interruption = self._ring.interruption()
            # A byte from the previous rank is no failure: it has its result, and reports that.
            if isinstance(interruption, Broken) and not work.is_completed():
                self._ring.end_by(interruption, header)
        try:
            work.wait()
        except RuntimeError as error:
            self._ring.end_by(self._whose_failure(str(error)), header)

    def _whose_failure(self, detail: str) -> Broken:
        """Name the rank of a failed connection of the group.

        Mostly the ring soon knows it; otherwise a neighbour is named.
        """
        deadline_s = now_s() + _RING_KNOWS_S
        while now_s() < deadline_s:
            interruption = self._ring.interruption()
            if isinstance(interruption, Broken):
                return interruption
            self._wake.wait(self.group.look_every_s)
        return Broken("receive", f"{self.group.name}: {detail}")


# Construction ---------------------------------------------------------------------------------------------------------
#
# It takes place in a thread of its own: it blocks for as long as a peer does not answer, and cannot be interrupted.

T = TypeVar("T")

# A rank waits for a value that no rank has set yet: the next round must not come at once.
_PAUSE_S = 0.001


class _RoundMessage(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank in a round: values set since the last one, whether it is done, and its problem, if any."""

    values: dict[str, bytes]
    has_ended: bool
    problem: str = ""


class Construction(Generic[T]):
    """Constructs a group; all ranks of the ring do so at once.

    Args:
        make: Returns the group, given the store by which its ranks find each other; runs in the thread.
        connect: Returns when the group can be used; runs in the thread, too. Unlike make() it has to end when `give_up`
            is called.
        give_up: Ends a group that will not be used.
    """

    def __init__(
        self,
        ring: RingTransport,
        make: Callable[[ExchangedStore], T],
        connect: Callable[[T], None],
        give_up: Callable[[T], None],
        timeout_s: float,
        name: str,
    ) -> None:
        self._ring, self.store = ring, ExchangedStore(timeout_s)
        self._make, self._connect, self._give_up = make, connect, give_up
        self._lock = threading.Lock()
        self._group: T | None = None
        self._problem = ""
        self._is_through = self._was_abandoned = False
        # Not a daemon, for the reason given in state/deep_copy.py: a process that ends must wait for it.
        self._thread = threading.Thread(target=self._work, name=f"farandole-{name}")
        self._thread.start()

    def finish(self) -> T | str:
        """Return the group, once it can be used on all ranks; or, on all alike, why there is none.

        Raises PeerLost and GenerationEnded at once, even if the thread still runs.
        """
        try:
            problem = self._exchange_values()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.store.close()
        if problem:
            self._abandon()
            return problem
        self._thread.join()  # the thread has nothing left to do
        assert self._group is not None
        return self._group

    def _exchange_values(self) -> str:
        """Exchange values in rounds around the ring, until all ranks are done, or one has a problem, which is returned.

        A round begins when any rank has a message: its neighbours see that it has begun.
        """
        while True:
            if not self.store.has_to_send and self._ring.wait_for_peer(self.store.descriptor) is None:
                continue
            unsent = self.store.take_unsent()  # first, or an end between the two would never be sent
            mine = _RoundMessage(unsent, self._is_through, self._problem)
            packed = self._ring.all_gather(msgspec.msgpack.encode(mine))
            messages = [msgspec.msgpack.decode(each, type=_RoundMessage) for each in packed]
            self.store.bring([each.values for each in messages])
            for rank, each in enumerate(messages):
                if each.problem:
                    return f"rank {rank}: {each.problem}"
            if all(each.has_ended for each in messages):
                return ""
            if not any(each.values for each in messages):
                threading.Event().wait(_PAUSE_S)

    def _abandon(self) -> None:
        self.store.abandon()
        with self._lock:
            self._was_abandoned, group = True, self._group
        if group is not None:
            self._give_up(group)

    def _work(self) -> None:
        try:
            group = self._make(self.store)
            with self._lock:
                self._group, was_abandoned = group, self._was_abandoned
            if was_abandoned:
                self._give_up(group)
                return
            self._connect(group)
        except Exception as error:  # noqa: BLE001 - finish() returns it
            self._problem = str(error) or type(error).__name__
        finally:
            self._is_through = True  # after the problem, which is read by another thread
            self.store.end()


# The store by which the ranks of a group find each other --------------------------------------------------------------
#
# It holds the values exchanged on the ring, which the Construction carries. Torch's own stores need a server, reach it
# without proof of identity, and do not learn of an abort.


class ExchangedStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store of one rank.

    A thread that builds a group sets values and reads those of others; another thread carries them. A read raises
    TimeoutError after `timeout_s` seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._mine: dict[str, bytes] = {}
        self._unsent: dict[str, bytes] = {}
        self._all: dict[str, bytes] = {}
        self._waiting = 0
        self._has_to_send_end = self._was_abandoned = self._is_closed = False
        self._changed = threading.Condition()
        self._wake = Wake()

    # For the thread that carries values ------------------------------------------------------------------

    @property
    def mine(self) -> dict[str, bytes]:
        """The values that this rank has set."""
        return self._mine

    @property
    def has_to_send(self) -> bool:
        """True when this rank waits for a value, or there is news since take_unsent(): values, or the end."""
        return bool(self._unsent) or self._waiting > 0 or self._has_to_send_end

    @property
    def descriptor(self) -> int:
        """Readable when this rank has to send a message."""
        return self._wake.descriptor

    def take_unsent(self) -> dict[str, bytes]:
        """Return the values that this rank has set since the last call."""
        with self._changed:
            unsent, self._unsent = self._unsent, {}
            self._has_to_send_end = False
            self._update_wake()
            return unsent

    def bring(self, values: Sequence[dict[str, bytes]]) -> None:
        """Add the values that the ranks have set, in any order."""
        with self._changed:
            for each in values:
                self._all.update(each)
            self._changed.notify_all()

    def end(self) -> None:
        """Mark that the group exists, or that there will be none."""
        with self._changed:
            self._has_to_send_end = True
            self._update_wake()

    def abandon(self) -> None:
        """Mark that no more values will come: waiting threads raise."""
        with self._changed:
            self._was_abandoned = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the store, once no thread carries values any more."""
        with self._changed:
            self._is_closed = True
            self._wake.close()

    def _update_wake(self) -> None:
        if self._is_closed:
            return
        if self.has_to_send:
            self._wake.set()
        else:
            self._wake.clear()

    # Called by torch, in the thread that builds a group --------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._mine[key] = self._unsent[key] = self._all[key] = _as_bytes(value)
            self._update_wake()

    def get(self, key: str) -> bytes:
        """Return a value. Raises TimeoutError if no rank has set it in time."""
        with self._changed:
            self._waiting += 1
            try:
                if key not in self._all:
                    self._update_wake()
                self._changed.wait_for(lambda: key in self._all or self._was_abandoned, self._timeout_s)
            finally:
                self._waiting -= 1
                self._update_wake()
            if key not in self._all:
                raise TimeoutError(f"no other rank has set the key {key!r} within {self._timeout_s:g} s")
            return self._all[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._all for key in keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if it is the expected one so far, or if none is there and none is expected. Return the value.

        Not atomic among ranks: for keys that one rank sets.
        """
        with self._changed:
            if self._all.get(key, b"") == _as_bytes(expected):
                self.set(key, desired)
            return self._all.get(key, b"")

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the store has its own timeout."""


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
