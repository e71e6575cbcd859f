"""The handle of an asynchronous operation: poll() tests whether it has ended, synchronize() returns its result.

A handle belongs to one call: to one operation, or to all operations of a group.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch

from farandole.collectives import world
from farandole.liveness.status_reporting import WaitingForPeers


class Handle:
    """Filled by the collectives' thread, one part at a time; its result is taken once, by any thread.

    Attributes:
        parts: The number of operations.
        is_group: Whether the result is a tuple of one value for each part, instead of the one value.
        received: For each part of an allgather or alltoall, the number of rows from each member.
    """

    __slots__ = ("_error", "_is_group", "_is_taken", "_left", "_results", "_until_done", "received")

    def __init__(self, parts: int = 1, *, is_group: bool = False) -> None:
        self.received: list[list[int]] = [[]] * parts
        self._results: list[Any] = [None] * parts
        self._left = parts
        self._is_group = is_group
        self._is_taken = False
        self._error: BaseException | None = None
        self._until_done = threading.Lock()  # an Event costs 3 us more, on each of two threads
        if parts:
            self._until_done.acquire()

    @property
    def is_done(self) -> bool:
        """True when wait() returns at once."""
        return self._left == 0

    @property
    def is_taken(self) -> bool:
        """True when take() was called; the result is gone."""
        return self._is_taken

    def finish(self, part: int, result: Any) -> None:
        """Complete one part. Only the collectives' thread calls it."""
        self._results[part] = result
        self._end_one()

    def fail(self, error: BaseException) -> None:
        """Complete one part with an error. The whole handle raises the first error."""
        if self._error is None:
            self._error = error
        self._end_one()

    def wait(self) -> None:
        """Wait until all parts have ended. There is no deadline: a lost rank ends them with an error."""
        if self._until_done.acquire(blocking=False):
            self._until_done.release()
            return
        with WaitingForPeers(), self._until_done:
            pass

    def take(self) -> Any:
        """Wait, then return the result, once: later calls return None. Raises the error of the operation."""
        if self._is_taken:
            return None
        self.wait()
        self._is_taken = True
        results, self._results = self._results, []
        if self._error is not None:
            # A copy: the traceback of this raise must not keep this caller's tensors alive in an error that other
            # handles share.
            raise copy.copy(self._error) from self._error.__cause__
        return tuple(results) if self._is_group else results[0]

    def _end_one(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._until_done.release()


class ExchangeHandle(Handle):
    """The handle of an alltoall. Its result is the tensor, and the number of its rows from each member (int32)."""

    __slots__ = ()

    def take(self) -> Any:
        tensor = super().take()
        return None if tensor is None else (tensor, torch.tensor(self.received[0], dtype=torch.int32))


def poll(handle: object) -> bool:
    """Return whether synchronize() would return at once.

    Raises:
        ValueError: The argument is not a handle, or its result was taken already.
    """
    if not isinstance(handle, Handle):
        raise ValueError(f"poll: expected what an asynchronous operation returned, got {handle!r}")
    if handle.is_taken:
        raise ValueError("poll: this handle was synchronized already; a handle is good for one synchronize()")
    return handle.is_done


def synchronize(handle: object) -> Any:
    """Wait for an asynchronous operation.

    Returns:
        The result: a tensor, or a tuple of tensors. None for a handle that was synchronized before, or for an argument
        that is not a handle (as in Horovod).

    Raises:
        HorovodInternalError: The operation failed: a CollectiveMismatch when ranks disagree on it, PeerLost or
            GenerationEnded when the world to which it was submitted is over.
        StepError: Collectives are refused here (world.py).
    """
    if not isinstance(handle, Handle):
        return None
    if not handle.is_taken:
        world.raise_if_refused("synchronize")  # a failure of another rank would be raised here
    return handle.take()
