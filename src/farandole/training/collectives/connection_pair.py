"""Move bytes to the next rank and from the previous one at the same time, in the calling thread. ring.py uses it.

Each of the two sockets carries data in one direction only. That makes shutdown simple: all data that a rank has sent
arrives, however the rank ends, because the kernel discards data only on a socket whose owner left bytes unread. The
other direction carries at most one message: the reason why the next rank stopped (`send_reason`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from ctypes import c_int, c_ssize_t, c_void_p, py_object, pythonapi
from itertools import islice
from typing import NamedTuple, TypeAlias

import torch

from farandole.base.liveness.status_reporting import report_progress
from farandole.base.machine import close_at_fork, now_s
from farandole.errors import CollectiveMismatch
from farandole.training.collectives.encrypted_socket import DataSocket, EncryptedSocket, has_input
from farandole.training.collectives.transport import Reduction

Outgoing: TypeAlias = deque[memoryview]  # the data for the next rank
Schedule: TypeAlias = Iterator[memoryview]  # buffers to be filled with the next bytes from the previous rank

_SLICE_MS = 1000
_BUFFERS_PER_SEND = 16
_REASON_BYTES = 1024
_SPINS = 100  # checks of both sockets, of 1 or 2 us each, before a wait sleeps
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class Broken(NamedTuple):
    """A connection failed before this rank had received all that it needs."""

    direction: str  # "send": to the next rank; "receive": from the previous one
    detail: str


class PeerCalled(NamedTuple):
    """The previous rank has sent data."""


Interruption: TypeAlias = Broken | PeerCalled


class ConnectionPair:
    """Owns two connected sockets. `move` is for one thread, `shut_down` for any.

    Args:
        check: Called at least once a second while nothing moves; an error that it raises ends the operation.
        may_spin: `move` may poll for a moment before it sleeps. It does so in the main thread only: any other thread
            would keep the interpreter from the main thread.
    """

    def __init__(
        self,
        to_next: DataSocket,
        from_previous: DataSocket,
        check: Callable[[], None] | None,
        may_spin: bool = False,
    ) -> None:
        self._to_next, self._from_previous = to_next, from_previous
        self._next_fd, self._previous_fd = to_next.fileno(), from_previous.fileno()
        self._check, self._slice_ms = check, _SLICE_MS
        self._may_spin = may_spin
        self._poll = select.poll()
        self.cannot_send: str | None = None
        """The reason why the next rank cannot be reached any more; None while it can."""
        self._has_lost_previous = False
        self.still_since_s: float | None = None
        """The time since when `move` has waited without progress; None while data moves. Other threads read it."""
        to_next.setblocking(False)
        from_previous.setblocking(False)

    def look_around(self, check: Callable[[], None], every_s: float) -> None:
        """Replace `check` by the given function, and call it every `every_s` seconds."""
        self._check, self._slice_ms = check, max(1, int(every_s * 1000))

    def peek(self, nbytes: int) -> bytes:
        """Return bytes from the previous rank that have not been read yet, without consuming them.

        At most `nbytes`, possibly fewer.
        """
        with contextlib.suppress(OSError):
            return self._peek(nbytes)
        return b""

    def _peek(self, nbytes: int) -> bytes:
        """Return received bytes without consuming them; b"": the previous rank has ended. Raises as recv()."""
        previous = self._from_previous
        return (
            previous.peek(nbytes) if isinstance(previous, EncryptedSocket) else previous.recv(nbytes, socket.MSG_PEEK)
        )

    def move(self, outgoing: Outgoing, schedule: Schedule, *, is_done_when_received: bool) -> Broken | None:
        """Run a schedule to its end. Return None, or the connection that failed.

        With `is_done_when_received` a rank that has received everything has its result, even if the next rank was lost:
        completion takes precedence over failure, and the next operation will notice. Raises the errors of the schedule
        and of `check`, and CollectiveMismatch when the next rank reports one.
        """
        try:
            return self._move(outgoing, schedule, is_done_when_received)
        finally:
            self.still_since_s = None

    def _move(self, outgoing: Outgoing, schedule: Schedule, is_done_when_received: bool) -> Broken | None:
        wanted = _next_buffer(schedule)
        spins = left = _SPINS if self._may_spin and threading.current_thread() is threading.main_thread() else 0
        while True:
            moved = bool(outgoing) and self._send(outgoing)
            if wanted is not None:
                received = self._receive(wanted)
                if isinstance(received, str):
                    self._receive_reason()
                    return Broken("receive", received)
                moved = moved or received > 0
                wanted = wanted[received:] or _next_buffer(schedule)
            if wanted is None and (not outgoing or (is_done_when_received and self.cannot_send)):
                return None
            if moved:
                self.still_since_s, left = None, spins
            elif outgoing and self.cannot_send:
                return Broken("send", self.cannot_send)
            elif left:
                left -= 1
            else:
                if self.still_since_s is None:
                    self.still_since_s = now_s()
                self._wait(wants_to_send=bool(outgoing), wants_to_receive=wanted is not None)

    def wait_for_data(self, wake: int) -> bool | None:
        """Wait, between operations, for bytes from the previous rank.

        Returns True for such bytes, False for data on `wake` or for a neighbour that has gone, and None after a second.
        Once a neighbour has gone, only `wake` counts. Raises the errors of `check`, and CollectiveMismatch when the
        next rank reports one.
        """
        if has_input(self._from_previous) and not self._has_lost_previous and (arrived := self._has_data()) is not None:
            return arrived
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if not (self._has_lost_previous or self.cannot_send):
            poll.register(self._previous_fd, select.POLLIN)
            poll.register(self._next_fd, select.POLLIN)
        events = dict(poll.poll(_SLICE_MS))
        if not events:
            if self._check is not None:
                self._check()
            return None
        if self._next_fd in events:
            self._receive_reason()
        has_data = self._previous_fd in events and self._has_data()
        return False if wake in events and not has_data else has_data

    def interruption(self) -> Interruption | None:
        """Return, without waiting, a reason to stop waiting for something else. Raises as wait_for_data()."""
        if self.cannot_send:
            return Broken("send", self.cannot_send)
        poll = select.poll()
        poll.register(self._previous_fd, select.POLLIN)
        poll.register(self._next_fd, select.POLLIN)
        events = dict(poll.poll(0))
        if self._next_fd in events:
            self._receive_reason()
        if self.cannot_send:
            return Broken("send", self.cannot_send)
        if self._previous_fd in events or has_input(self._from_previous):
            has_data = self._has_data()
            if has_data is not None:
                return PeerCalled() if has_data else Broken("receive", "end of file")
        return None

    def _has_data(self) -> bool | None:
        """Return whether the previous rank has sent data; False: it has gone; None: a part of a TLS record has come."""
        try:
            if self._peek(1):
                return True
        except BlockingIOError:
            return None
        except OSError:
            pass
        self._has_lost_previous = True
        return False

    def send_reason(self, text: str) -> None:
        """Tell the previous rank, best effort, why this one stops; that rank raises CollectiveMismatch with it."""
        with contextlib.suppress(OSError):
            self._from_previous.send(text.encode()[:_REASON_BYTES])

    def shut_down(self) -> None:
        """End the transfer in flight at both ends, and every later one. Callable from any thread."""
        for sock in (self._to_next, self._from_previous):
            with contextlib.suppress(OSError):  # not connected any more, or closed
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release both sockets. Data on its way to the next rank is still delivered."""
        self._to_next.close()
        self._from_previous.close()

    def _send(self, outgoing: Outgoing) -> bool:
        """Return whether any bytes were sent."""
        if self.cannot_send:
            return False
        try:
            sent = self._to_next.sendmsg(islice(outgoing, _BUFFERS_PER_SEND))
        except BlockingIOError:
            return False
        except OSError as error:
            self._receive_reason()
            self.cannot_send = self.cannot_send or str(error)
            return False
        while outgoing and sent >= len(outgoing[0]):
            sent -= len(outgoing.popleft())
        if sent:
            outgoing[0] = outgoing[0][sent:]
        return True

    def _receive(self, wanted: memoryview) -> int | str:
        """Return the number of received bytes, 0 for none yet, or the reason why none will come."""
        try:
            return self._from_previous.recv_into(wanted) or "end of file"
        except BlockingIOError:
            return 0
        except OSError as error:
            return str(error)

    def _wait(self, *, wants_to_send: bool, wants_to_receive: bool) -> None:
        """Wait until bytes can move, or the next rank reports why it stopped."""
        if wants_to_receive:
            self._poll.register(self._previous_fd, select.POLLIN)
        else:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._previous_fd)
        if self.cannot_send:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._next_fd)
        else:
            self._poll.register(self._next_fd, select.POLLIN | (select.POLLOUT if wants_to_send else 0))
        events = self._poll.poll(self._slice_ms)
        if events:
            report_progress()  # even if it is slow
        elif self._check is not None:
            self._check()
        for descriptor, event in events:
            if descriptor == self._next_fd and event & _READABLE:
                self._receive_reason()

    def _receive_reason(self) -> None:
        """Handle the end of the next rank: end-of-file is a failure, a message is a mismatch."""
        try:
            reason = self._to_next.recv(_REASON_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.cannot_send = str(error)
            return
        if reason:
            raise CollectiveMismatch(reason.decode(errors="replace"))
        self.cannot_send = "end of file"


def _next_buffer(schedule: Iterator[memoryview]) -> memoryview | None:
    """Return the next buffer with room; a schedule may yield empty ones."""
    return next((buffer for buffer in schedule if len(buffer)), None)


class Wake:
    """A flag that a thread can wait for together with sockets, as in wait_for_data(). Not thread-safe by itself.

    set() and clear() are called under one lock, so that a set flag and a readable descriptor are always the same thing.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        close_at_fork(self._receiver)
        close_at_fork(self._sender)
        self.is_set = False

    @property
    def descriptor(self) -> int:
        return self._receiver.fileno()

    @property
    def is_open(self) -> bool:
        """False after close(), and in a forked child: the thread to be woken stayed with the parent."""
        return self._sender.fileno() >= 0

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, and return whether it is."""
        poll = select.poll()
        poll.register(self._receiver, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def set(self) -> None:
        """Set the flag, while it is open."""
        if not self.is_set:
            self.is_set = True  # first: a thread that finds the descriptor readable reads this without the lock
            self._sender.send(b"\0")

    def clear(self) -> None:
        if self.is_set:
            self._receiver.recv(1)
            self.is_set = False

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


# The bytes of a tensor, sent and received without a copy. All transports use it ---------------------------------------

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
"""The dtypes that can be reduced and broadcast. A dtype's code on the wire is its place here, plus 1."""

_CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype on the wire, from 1. Raises ValueError for a dtype that cannot be sent."""
    code = _CODES.get(dtype)
    if code is None:
        names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise ValueError(f"cannot reduce or broadcast {dtype}; convert it to one of {names}")
    return code


_COMBINERS: dict[Reduction, Callable[..., torch.Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.PRODUCT: torch.mul,
}


def combiner(op: Reduction) -> Callable[..., torch.Tensor]:
    """Return f(a, b, out=...) for a reduction that transports know. Raises ValueError for the others."""
    combine = _COMBINERS.get(op)
    if combine is None:
        names = ", ".join(each.name for each in _COMBINERS)
        raise ValueError(f"a transport reduces by {names}, got {op!r}")
    return combine


def combiners(op: Reduction, ranks: int) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Return combiner(op), and the function by which the last of the tensors of `ranks` ranks is combined: for AVERAGE
    another one, which divides the sum while it is in the cache. Raises ValueError as combiner()."""
    if op is not Reduction.AVERAGE:
        return combiner(op), combiner(op)

    def average(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return torch.add(a, b, out=out).div_(ranks)

    return torch.add, average


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's own memory as one dimension, outside autograd; of complex numbers, as real and imaginary
    parts.

    Raises ValueError unless it is a contiguous CPU tensor of a dtype that can be sent.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"this transport takes CPU tensors, got shape {tuple(tensor.shape)} on {tensor.device}")
    return flat_on_its_device(tensor)


def flat_on_its_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same as flat_view() for a tensor on any device that has memory."""
    if tensor.is_complex() and not tensor.is_conj():
        tensor = torch.view_as_real(tensor)
    dtype_code(tensor.dtype)
    if tensor.device.type == "meta" or not tensor.is_contiguous():
        raise ValueError(
            f"a transport takes contiguous tensors, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}"
        )
    return _in_one_row(tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as flat uint8, outside autograd; writing into it writes into the tensor.

    Raises RuntimeError for a tensor that is not contiguous, ValueError for one that torch conjugates or negates only
    when it is read.
    """
    flat = _in_one_row(tensor)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values in their logical order as flat uint8, for reading: its memory, or a
    copy."""
    return as_bytes(tensor.detach().contiguous().resolve_conj().resolve_neg())


def _in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is a lazy conjugate or negative: its memory has other values; "
            f"call resolve_conj().resolve_neg()"
        )
    flat = tensor.detach().view(-1)
    # torch calls one element contiguous whatever its stride, e.g. a column of a matrix with one row, and view() to
    # another dtype does not.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def memory_at(tensor: torch.Tensor, start: int, stop: int) -> memoryview:
    """Return bytes [start, stop) of a contiguous CPU tensor, shared with it, in a tenth of the time of torch's views.
    They must not be used after the tensor is freed."""
    view: memoryview = _memory_view(tensor.data_ptr() + start, stop - start, _READ_ONLY)
    return view


# https://docs.python.org/3/c-api/memoryview.html
_memory_view = pythonapi.PyMemoryView_FromMemory
_memory_view.restype, _memory_view.argtypes = py_object, (c_void_p, c_ssize_t, c_int)
_READ_ONLY = 0x100  # PyBUF_READ


def byte_view(flat: torch.Tensor) -> memoryview:
    """Return the memory of a one-dimensional tensor as bytes; writing into it writes into the tensor."""
    view: memoryview = as_bytes(flat).numpy().data
    return view
