"""The submissions of one rank, in the queue between its callers and the thread that runs the rounds, and their handles.

poll() and synchronize() are public: scripts call them with the handle of an asynchronous operation.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.integrations.horovod.named import adasum
from farandole.integrations.horovod.named.timeline import Timeline
from farandole.training.collectives import world
from farandole.training.collectives.connection_pair import Wake, as_bytes, byte_view, flat_view
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.shared_memory_tensors import shareable_zeros
from farandole.training.collectives.shared_memory_transport import SharedMemoryTransport
from farandole.training.collectives.stages import Key, Kind, MatchedOperation, Request
from farandole.training.collectives.transport import Reduction, Transport
from farandole.training.collectives.transport_choice import host_transport


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
    """

    __slots__ = ("_error", "_is_group", "_is_taken", "_left", "_results", "_run_until_done", "_until_done", "received")

    def __init__(
        self, parts: int = 1, *, is_group: bool = False, run_until_done: Callable[[Handle], None] | None = None
    ) -> None:
        self.received: list[list[int]] = [[]] * parts
        self._results: list[Any] = [None] * parts
        self._left = parts
        self._is_group = is_group
        self._is_taken = False
        self._error: BaseException | None = None
        self._run_until_done = run_until_done
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


class AlltoallHandle(Handle):
    """The handle of an alltoall. Its result is the tensor, and the number of its rows from each member (int32).

    Attributes:
        device: Where these numbers are to be.
    """

    __slots__ = ("device",)

    def __init__(self, run_until_done: Callable[[Handle], None] | None = None) -> None:
        super().__init__(run_until_done=run_until_done)
        self.device = torch.device("cpu")

    def take(self) -> Any:
        tensor = super().take()
        if tensor is None:
            return None
        return tensor, torch.tensor(self.received[0], dtype=torch.int32, device=self.device)


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
        """Complete the operation with a CPU tensor: copy it into the user's tensor, or onto its device.

        `received` are the numbers of its rows from each member, where they may differ.
        """
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
    """The submissions of this rank that have not ended yet. Thread-safe. After end() it accepts no more.

    Callers add them, the thread that runs the rounds takes them. `wake` is set to wake a thread for submissions whose
    requests were not sent yet; None where no thread waits for it.
    """

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
        """Add all of the submissions or none. Unless it `wakes` the thread, the caller runs the next round.

        Raises ValueError for a name that is in flight, the error of end() if it was called, and RuntimeError in a
        forked child.
        """
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


# The execution of decided operations ----------------------------------------------------------------------------------
#
# Execute the operations that a round has decided: each kind by its function, on tensors, through a transport.


class Executor:
    """Executes operations in one thread, and keeps the flat buffers of one generation."""

    def __init__(self, timeline: Timeline) -> None:
        self._buffers = FusionBuffers()
        self._timeline = timeline

    def execute(
        self, operations: tuple[MatchedOperation, ...], submissions: list[Submission | None], transport: Transport
    ) -> None:
        """Execute one operation, or several allreduces that share a flat buffer, on the transport of their process set.

        Ends each of them with a result, or with an error of this rank alone. Raises the errors of the transport; then
        some operations have not ended.

        `submissions` are this rank's parts, in the same order; None where it contributes zeros because it has joined.
        """
        operation, own = operations[0], submissions[0]
        kind = operation.key.kind
        with torch.no_grad(), self._recorded(operations):
            if len(operations) > 1:
                all_reduce_fused(operations, submissions, transport, self._buffers)
            elif kind is Kind.ALLREDUCE:
                all_reduce(operation, own, transport)
            elif kind is Kind.BARRIER:
                if own is not None:  # a barrier needs no more than the requests of all ranks
                    own.finish(None)
            elif own is None:
                raise AssertionError(f"{operation.key} was matched without this rank")
            else:
                _FUNCTIONS[kind](operation, own, transport)

    @contextlib.contextmanager
    def _recorded(self, operations: tuple[MatchedOperation, ...]) -> Iterator[None]:
        """Record the operations on the timeline, if there is one."""
        if not self._timeline.is_on:
            yield
            return
        for operation in operations:
            self._timeline.begin(operation.key.name, operation.key.kind.name)
        try:
            yield
        finally:
            for operation in operations:
                self._timeline.end(operation.key.name)


# Allgather, broadcast and alltoall: bytes, so that any dtype will do --------------------------------------------------
#
# Shapes are known from the requests of all ranks; they are not exchanged again.

# Up to this size every rank's bytes, padded to the longest, travel in one exchange; beyond, in one broadcast each. A
# broadcast is a pipeline, so that all of them together keep every link as busy as a ring all-gather would.
_TOGETHER_BYTES = 64 * 1024


def all_gather(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Gather all ranks' rows, in the order of the ranks. The handle also gets the number of rows from each."""
    requests = _all_requests(operation)
    rows = [request.shape[0] for request in requests]
    whole = torch.empty((sum(rows), *requests[0].shape[1:]), dtype=dtype_named(requests[0].dtype))
    _gather_bytes(own.read(), [as_bytes(slot) for slot in torch.split(whole, rows)], transport)
    own.deliver(whole, rows)


def broadcast(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Copy the root's tensor into a new tensor or in place."""
    root = operation.ranks.index(operation.any_request.root)
    if transport.rank == root or (own.in_place and own.stream is None):
        tensor = own.buffer()
    else:
        tensor = torch.empty(own.request.shape, dtype=dtype_named(own.request.dtype))
    transport.broadcast(as_bytes(tensor), root)
    own.deliver(tensor)


def all_to_all(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Receive from each rank the rows that it split off for this one. The handle also gets their number by rank.

    Every rank sees all bytes: a ring passes most of them through every rank anyway.
    """
    requests, place = _all_requests(operation), transport.rank
    dtype, row_shape = dtype_named(requests[0].dtype), requests[0].shape[1:]
    received = [request.splits[place] for request in requests]
    whole = torch.empty((sum(received), *row_shape), dtype=dtype)
    sent = [sum(request.splits) for request in requests]
    own_rows = own.read()[: sent[place]]
    if _travels_together([rows * _row_bytes(requests[0]) for rows in sent]):
        everything = [torch.empty((rows, *row_shape), dtype=dtype) for rows in sent]
        _gather_bytes(own_rows, [as_bytes(each) for each in everything], transport)
        for slot, tensor, request in zip(torch.split(whole, received), everything, requests, strict=True):
            slot.copy_(_cut(tensor, request, place))
    else:
        for source, (slot, request) in enumerate(zip(torch.split(whole, received), requests, strict=True)):
            # One rank's tensor after the other, so that they are never all in memory at once.
            tensor = own_rows if source == place else torch.empty((sent[source], *row_shape), dtype=dtype)
            transport.broadcast(as_bytes(tensor), source)
            slot.copy_(_cut(tensor, request, place))
    own.deliver(whole, received)


def _gather_bytes(own: torch.Tensor, slots: list[torch.Tensor], transport: Transport) -> None:
    """Fill the slots (as_bytes) of all ranks; `own` is this rank's tensor."""
    lengths = [slot.numel() for slot in slots]
    if not _travels_together(lengths):
        slots[transport.rank].copy_(as_bytes(own))
        for source, slot in enumerate(slots):
            if slot.numel():
                transport.broadcast(slot, source)
        return
    trailer = bytes(byte_view(as_bytes(own))).ljust(max(lengths), b"\0")
    for slot, arrived in zip(slots, transport.all_reduce(torch.empty(0), trailer), strict=True):
        if slot.numel():
            byte_view(slot)[:] = arrived[: slot.numel()]


def _travels_together(lengths: list[int]) -> bool:
    return max(lengths) * len(lengths) <= _TOGETHER_BYTES


def _all_requests(operation: MatchedOperation) -> list[Request]:
    requests = [request for request in operation.requests if request is not None]
    assert len(requests) == len(operation.ranks), f"{operation.key} was matched though a rank had joined"
    return requests


def _row_bytes(request: Request) -> int:
    return torch.Size(request.shape[1:]).numel() * dtype_named(request.dtype).itemsize


def _cut(tensor: torch.Tensor, request: Request, place: int) -> torch.Tensor:
    """Return the rows of one rank's tensor for the member at `place`."""
    start = sum(request.splits[:place])
    return tensor[start : start + request.splits[place]]


# Allreduce and reducescatter: numbers ---------------------------------------------------------------------------------
#
# In an allreduce, this rank's submission `own` is None when this rank has joined: then it contributes zeros.

_SUMMED = {Reduction.AVERAGE: Reduction.SUM}
_AVERAGING = (RingTransport, SharedMemoryTransport)
"""They divide each part of the sum while it is in the cache."""
_WIDE = (torch.float32, torch.float64)
_LOGICAL = {Reduction.SUM: Reduction.MAX, Reduction.PRODUCT: Reduction.MIN}
"""Bools travel as uint8: their sum is `or`, their product is `and`."""


class FusionBuffers:
    """Flat buffers in which many small tensors are reduced together; one for each dtype, kept for reuse."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return an uninitialized buffer; valid until the next call with this dtype."""
        buffer = self._by_dtype.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._by_dtype[dtype] = shareable_zeros(numel, dtype)
        return buffer[:numel]


def all_reduce(operation: MatchedOperation, own: Submission | None, transport: Transport) -> None:
    """Reduce one tensor in its own memory or in a copy of it."""
    request = operation.any_request
    tensor = torch.zeros(request.shape, dtype=dtype_named(request.dtype)) if own is None else own.buffer()
    _reduce(_numbers(tensor), request, transport)
    if own is not None:
        own.deliver(tensor)


def all_reduce_fused(
    operations: tuple[MatchedOperation, ...],
    submissions: list[Submission | None],
    transport: Transport,
    buffers: FusionBuffers,
) -> None:
    """Reduce several tensors of one dtype, op and scale by one reduction of a flat buffer."""
    requests = [operation.any_request for operation in operations]
    sizes = [torch.Size(request.shape).numel() for request in requests]
    dtype = dtype_named(requests[0].dtype)
    flat = buffers.take(dtype, sum(sizes))
    slots = torch.split(flat, sizes)
    for slot, own in zip(slots, submissions, strict=True):
        if own is None:
            slot.zero_()
        else:
            slot.copy_(own.read().view(-1))
    _reduce(_numbers(flat), requests[0], transport)
    for slot, request, own in zip(slots, requests, submissions, strict=True):
        if own is not None:
            # Out of place and on the CPU the slot itself must not be returned: it is used again.
            result = slot.view(request.shape)
            own.deliver(result if own.in_place or own.stream is not None else result.clone())


def reduce_scatter(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Reduce the whole tensor, and keep this rank's rows: the first ranks get one more if they divide unevenly."""
    tensor = own.buffer()
    _reduce(_numbers(tensor), operation.any_request, transport)
    start, stop = rows_of(transport.rank, tensor.shape[0], transport.size)
    own.deliver(tensor[start:stop].clone())


def rows_of(rank: int, rows: int, size: int) -> tuple[int, int]:
    """Return the first row, and the row after the last, of rank `rank` in a reducescatter."""
    share, extra = divmod(rows, size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a request."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory, flat, in a dtype that a transport reduces."""
    return flat_view(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)


def _reduce(flat: torch.Tensor, request: Request, transport: Transport) -> None:
    """Reduce a flat tensor in place as all ranks have requested."""
    op = Reduction(request.op)
    if request.dtype == "bool":
        transport.all_reduce(flat, op=_LOGICAL.get(op, op))
        return
    prescale(flat, request.prescale)
    if op is Reduction.ADASUM:
        adasum.reduce(flat, transport)
    elif op is Reduction.AVERAGE and flat.dtype in _WIDE and isinstance(host_transport(transport), _AVERAGING):
        transport.all_reduce(flat, op=op)
        prescale(flat, request.postscale)
        return
    elif transport.size > 1:
        transport.all_reduce(flat, op=_SUMMED.get(op, op))
    postscale(flat, op, transport.size, request.postscale)


# Scaling of numbers before and after they are summed, in place, by Horovod's rules for each dtype ---------------------

_HALVES = (torch.float16, torch.bfloat16)


def prescale(flat: torch.Tensor, factor: float) -> None:
    """Multiply every element. Integers are multiplied in float64 and truncated toward zero, halves in float32."""
    if factor != 1.0:
        _multiply(flat, factor)


def postscale(flat: torch.Tensor, op: Reduction, size: int, factor: float) -> None:
    """Turn the sum over `size` ranks into the requested result: divide it for an AVERAGE, then multiply it.

    Integers are truncated toward zero, once.
    """
    if op is not Reduction.AVERAGE:
        prescale(flat, factor)
    elif flat.dtype in _HALVES:
        flat.copy_(flat.float().div_(size).mul_(factor))
    elif flat.is_floating_point():
        flat.div_(size)
        prescale(flat, factor)
    elif factor == 1.0:
        torch.div(flat, size, rounding_mode="trunc", out=flat)
    else:
        flat.copy_(flat.double().div_(size).mul_(factor))


def _multiply(flat: torch.Tensor, factor: float) -> None:
    if flat.dtype in _HALVES:
        flat.copy_(flat.float().mul_(factor))
    elif flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor))


# The function of each kind of operation; Executor handles an allreduce and a barrier ----------------------------------

_FUNCTIONS: dict[Kind, Callable[[MatchedOperation, Submission, Transport], None]] = {
    Kind.ALLGATHER: all_gather,
    Kind.BROADCAST: broadcast,
    Kind.ALLTOALL: all_to_all,
    Kind.REDUCESCATTER: reduce_scatter,
}
