"""The submissions of one rank, in the queue between its callers and the thread that runs the rounds, and their handles.

poll() and synchronize() are public: scripts call them with the handle of an asynchronous operation.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.integrations.horovod.named.stages import Key, Request
from farandole.training.collectives import world
from farandole.training.collectives.connection_pair import Wake


def poll(handle: object) -> bool:
    """Return whether synchronize() would return at once.

    Args:
        handle: A handle of an asynchronous operation.

    Raises:
        ValueError: The argument is not a handle, or its result was taken already.

    Examples:
        >>> handle = fd.allreduce_async(torch.ones(2), name="polled")
        >>> while not fd.poll(handle):
        ...     pass  # other work
        >>> result = fd.synchronize(handle)
    """
    if not isinstance(handle, Handle):
        raise ValueError(f"poll: expected the handle of an asynchronous operation, got {handle!r}")
    if handle.is_taken:
        raise ValueError("poll: this handle was synchronized already, so its result is gone")
    return handle.is_done


def synchronize(handle: object) -> Any:
    """Wait for an asynchronous operation.

    Args:
        handle: A handle of an asynchronous operation.

    Returns:
        The result: a tensor, or a tuple of tensors. None for a handle that was synchronized before, or for an argument
        that is not a handle (as in Horovod).

    Raises:
        HorovodInternalError: The operation failed: a CollectiveMismatch when ranks disagree on it, PeerLost or
            GenerationEnded when the world to which it was submitted is over.
        StepError: Collectives are refused here (world.py).

    Examples:
        >>> handle = fd.allreduce_async(torch.ones(2), name="ones")
        >>> fd.synchronize(handle)
        tensor([1., 1.])
    """
    if not isinstance(handle, Handle):
        return None
    if not handle.is_taken:
        world.raise_if_refused("synchronize")  # a failure of another rank would be raised here
    return handle.take()


class Handle:
    """The result of one call of a public function: of one operation, or of all operations of a group, its parts.

    The thread that runs the rounds fills it, one part at a time; its result is taken once, by any thread.

    Args:
        parts: The number of operations.
        is_group: The result is a tuple of one value for each part, instead of the one value.
        run_until_done: Called with the handle by a thread that waits for it; may run the rounds.

    Attributes:
        received: For each part of an allgather or alltoall, the number of rows from each member.
        counts_on: Where an alltoall's result has these numbers, beside the tensor (int32); None for other operations.
        is_taken: Whether take() was called; the result is gone.
    """

    def __init__(
        self, parts: int = 1, *, is_group: bool = False, run_until_done: Callable[[Handle], None] | None = None
    ) -> None:
        self.received: list[list[int]] = [[]] * parts
        self._results: list[Any] = [None] * parts
        self._left = parts
        self._is_group = is_group
        self.counts_on: torch.device | None = None
        self.is_taken = False
        self._error: BaseException | None = None
        self._run_until_done = run_until_done
        self._until_done = threading.Lock()  # an Event costs 3 us more, on each of two threads
        if parts:
            self._until_done.acquire()

    @property
    def is_done(self) -> bool:
        """True when wait() returns at once."""
        return self._left == 0

    def finish(self, part: int, result: Any) -> None:
        """Complete one part. Only the thread that runs the rounds calls it."""
        self._results[part] = result
        self._end_one()

    def fail(self, error: BaseException) -> None:
        """Complete one part with an error. The whole handle raises the first error."""
        if self._error is None:
            self._error = error
        self._end_one()

    def wait(self) -> None:
        """Wait until all parts have ended. There is no deadline: a lost rank ends them with an error."""
        if self._left and self._run_until_done is not None:
            self._run_until_done(self)
        if self._until_done.acquire(blocking=False):
            self._until_done.release()
            return
        with WaitingForPeers(), self._until_done:
            pass

    def take(self) -> Any:
        """Wait, then return the result, once: later calls return None. Raises the error of the operation."""
        if self.is_taken:
            return None
        self.wait()
        self.is_taken = True
        results, self._results = self._results, []
        if self._error is not None:
            # A copy: the traceback of this raise must not keep this caller's tensors alive in an error that other
            # handles share.
            raise copy.copy(self._error) from self._error.__cause__
        if self.counts_on is not None:
            return results[0], torch.tensor(self.received[0], dtype=torch.int32, device=self.counts_on)
        return tuple(results) if self._is_group else results[0]

    def _end_one(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._until_done.release()


@dataclass(eq=False)
class Submission:
    """The part of one rank in one operation: its request, its tensor, and the handle that waits for it.

    The caller's thread creates it; the thread that runs the rounds does the rest.

    Attributes:
        tensor: The user's tensor, on any device, contiguous or not; None where there is none.
        in_place: Whether the result goes into `tensor`.
        handle: Receives the result, as its part number `part`.
        was_sent: Whether the other ranks have received the request.
    """

    request: Request
    tensor: torch.Tensor | None = None
    in_place: bool = False
    handle: Handle = field(default_factory=Handle)
    part: int = 0
    was_sent: bool = field(init=False, default=False)
    has_ended: bool = field(init=False, default=False)
    stream: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.tensor is not None and self.tensor.is_cuda:
            # Copies are queued behind the caller's earlier work, in its own stream.
            self.stream = torch.cuda.current_stream(self.tensor.device)

    @property
    def key(self) -> Key:
        return self.request.key

    def read(self) -> torch.Tensor:
        """Return the tensor on the CPU, contiguous, outside autograd: its own memory where that is possible."""
        assert self.tensor is not None
        with self._on_stream():
            return self.tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()

    def buffer(self) -> torch.Tensor:
        """Return memory as read() does, for overwriting: the tensor's own only if the operation is in place."""
        assert self.tensor is not None
        here = self.read()
        is_own = here.data_ptr() == self.tensor.data_ptr() and here.numel() > 0
        return here.clone() if is_own and not self.in_place else here

    def deliver(self, result: torch.Tensor, received: Sequence[int] = ()) -> None:
        """Complete the operation with a CPU tensor: copy it into the user's tensor, or onto its device. `received` are
        the numbers of its rows from each member, where they may differ."""
        assert self.tensor is not None
        self.handle.received[self.part] = list(received)
        try:
            with self._on_stream():
                if not self.in_place:
                    value = result.to(self.tensor.device)
                else:
                    value = self.tensor
                    if result.data_ptr() != value.data_ptr():
                        value.detach().copy_(result.view(value.shape))
                if self.stream is not None:
                    self.stream.synchronize()
        except Exception as error:  # noqa: BLE001 - the caller's own: memory that overlaps itself, or a full device
            self.fail(error)
            return
        self.finish(value)

    def finish(self, value: Any) -> None:
        """Complete the operation. From here on the name is free for the next operation."""
        self.has_ended = True
        self.handle.finish(self.part, value)

    def fail(self, error: BaseException) -> None:
        """Complete the operation with an error, which the waiting caller gets."""
        self.has_ended = True
        self.handle.fail(error)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class TensorQueue:
    """The submissions of this rank that have not ended yet. Thread-safe. After end() it accepts no more. Callers add
    them, the thread that runs the rounds takes them. `wake` is set to wake a thread for submissions whose requests were
    not sent yet; None where no thread waits for it."""

    def __init__(self, wake: Wake | None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._unsent: list[Submission] = []
        self._in_flight: dict[Key, Submission] = {}
        self._error: BaseException | None = None

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_empty(self) -> bool:
        """True when no submission is waiting for its end."""
        return not self._in_flight

    def add(self, submissions: Sequence[Submission], *, wakes: bool = True) -> None:
        """Add all of the submissions or none. Unless it `wakes` the thread, the caller runs the next round. Raises
        ValueError for a name that is in flight, the error of end() if it was called, and RuntimeError in a forked
        child."""
        with self._lock:
            if self._error is not None:
                raise copy.copy(self._error) from self._error.__cause__
            by_key = {submission.key: submission for submission in submissions}
            twice = [key for key in by_key if key in self._in_flight and not self._in_flight[key].has_ended]
            if twice or len(by_key) < len(submissions):
                name = twice[0].name if twice else "a name of this group"
                raise ValueError(
                    f"{name} was submitted twice: an operation of this name is in flight. Call synchronize() on its "
                    f"handle first, or give this one another name"
                )
            if self._wake is not None and not self._wake.is_open:
                raise RuntimeError(
                    "collectives work only in the process that called init(), not in one forked from it (a loader "
                    "worker?)"
                )
            if wakes:
                self._set_wake()
            self._unsent += submissions
            self._in_flight |= by_key

    def wake(self) -> None:
        """Wake the collectives' thread for a check."""
        with self._lock:
            self._set_wake()

    def clear_wake(self) -> None:
        """Let the thread sleep again, unless there are submissions whose requests were not sent."""
        with self._lock:
            if self._wake is not None and not self._unsent:
                self._wake.clear()

    def _set_wake(self) -> None:
        if self._wake is not None and self._wake.is_open:
            self._wake.set()

    def take_unsent(self) -> list[Submission]:
        """Take the submissions whose requests have not been sent to the other ranks. They are sent next."""
        with self._lock:
            if self._wake is not None:
                self._wake.clear()
            unsent, self._unsent = self._unsent, []
        for submission in unsent:
            submission.was_sent = True
        return unsent

    def find(self, key: Key) -> Submission | None:
        """Return the submission with this key, if its request was sent to the other ranks."""
        submission = self._in_flight.get(key)
        return submission if submission is not None and submission.was_sent else None

    def in_flight(self) -> list[Submission]:
        with self._lock:
            return list(self._in_flight.values())

    def forget(self, ended: Iterable[Submission | None]) -> None:
        """Remove ended submissions; a new one of the same name may have been added already."""
        with self._lock:
            for submission in ended:
                if submission is not None and self._in_flight.get(submission.key) is submission:
                    del self._in_flight[submission.key]

    def end(self, error: BaseException) -> None:
        """End all submissions: waiting ones fail, and so do later ones."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiting = [submission for submission in self._in_flight.values() if not submission.has_ended]
            self._in_flight.clear()
            self._unsent.clear()
        for submission in waiting:
            submission.fail(error)
