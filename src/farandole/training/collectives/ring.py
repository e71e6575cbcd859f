"""All collectives over TCP: a ring that ring_builder.py builds anew for each generation."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import now_s
from farandole.base.membership import Peer
from farandole.errors import CollectiveMismatch, FarandoleError, GenerationEnded, PeerLost
from farandole.training.collectives.chunks import Algorithm, choose_algorithm
from farandole.training.collectives.connection_pair import (
    Broken,
    ConnectionPair,
    Interruption,
    Outgoing,
    PeerCalled,
    Schedule,
    byte_view,
    combiners,
    dtype_code,
    flat_view,
)
from farandole.training.collectives.encrypted_socket import DataSocket
from farandole.training.collectives.ring_header import (
    HEADER_BYTES,
    Header,
    TransportOperation,
    sequence_of,
)
from farandole.training.collectives.ring_schedules import (
    Agreement,
    Combine,
    broadcast_around,
    compare_around,
    gather_around,
    reduce_around,
)
from farandole.training.collectives.transport import Reduction

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division, Forest

OnBroken = Callable[[str, str, str], None]
"""on_broken(worker of the peer, direction "send" | "receive" | "connect", detail)"""

_CHECK_EVERY_S = 1.0

# The first block of an all_gather: the length, and the payload if it is short.
_SLIP_BYTES = 512
_SHORT_BYTES = _SLIP_BYTES - 8


class RingTransport:
    """A Transport (transport.py) over one connection to the next rank and one from the previous one.

    Collectives run in the calling thread, one at a time; abort() may come from any. When one fails, the rank shuts both
    connections down at once, so that the failure goes around the ring and no rank waits for one that has failed.

    Args:
        on_broken: Called once, before PeerLost is raised for the first time.
        check: Called once a second while nothing moves; an error that it raises ends this transport. There is no other
        limit: the coordinator decides which workers are alive.
        may_spin: There is a core for waiting without sleeping, for a moment (machine.py).
    """

    def __init__(
        self,
        rank: int,
        size: int,
        generation: int,
        to_next: DataSocket,
        from_previous: DataSocket,
        next_peer: Peer,
        previous_peer: Peer,
        on_broken: OnBroken | None = None,
        check: Callable[[], None] | None = None,
        may_spin: bool = False,
    ) -> None:
        self._rank, self._size, self._generation = rank, size, generation
        self._names: Sequence[int] = range(size)
        self._connections = ConnectionPair(to_next, from_previous, check, may_spin)
        self._check, self._next_check_s = check, now_s() + _CHECK_EVERY_S
        self._peers = {"send": next_peer, "receive": previous_peer}
        self._on_broken = on_broken
        self._sequence = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._abort_reason: str | None = None
        self._failure: Callable[[str], FarandoleError] | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers to which this rank is connected."""
        return tuple(self._peers.values())

    @property
    def still_since_s(self) -> float | None:
        """The time since when a running collective has not moved a byte; None otherwise. Callable from any thread."""
        return self._connections.still_since_s

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, (combine, last) = flat_view(tensor), combiners(op, self._size)
        total_bytes = flat.numel() * flat.element_size()
        header = Header(
            TransportOperation.ALL_REDUCE, self._sequence + 1, dtype_code(flat.dtype), op, total_bytes, len(trailer)
        )
        return self.reduce_as(header, flat, trailer, combine, last)

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        flats = [flat_view(row) for row in rows]
        nbytes = flats[0].numel() * flats[0].element_size()
        code, shards = dtype_code(flats[0].dtype), division.shards
        header = Header(TransportOperation.ADD_SHARDS, self._sequence + 1, code, shards, nbytes, len(trailer))
        return self.add_shards_as(header, flats, division.forests, trailer, factor)

    def all_gather(self, payload: bytes) -> list[bytes]:
        header = Header(TransportOperation.ALL_GATHER, self._sequence + 1, trailer_bytes=_SLIP_BYTES)
        # Short payloads travel with their lengths: one round for all, since every round has to wake every rank.
        slip = (len(payload).to_bytes(8, "big") + payload[:_SHORT_BYTES]).ljust(_SLIP_BYTES, b"\0")
        slips = self._gather(header, slip, [_SLIP_BYTES] * self._size)
        lengths = [int.from_bytes(each[:8], "big") for each in slips]
        if max(lengths) <= _SHORT_BYTES:
            return [bytes(each[8 : 8 + length]) for each, length in zip(slips, lengths, strict=True)]
        header = Header(TransportOperation.ALL_GATHER, self._sequence + 1, total_bytes=sum(lengths))
        return [bytes(each) for each in self._gather(header, payload, lengths)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not 0 <= source < self._size:
            raise ValueError(f"broadcast: source must be a rank from 0 to {self._size - 1}, got {source}")
        flat = flat_view(tensor)
        total_bytes = flat.numel() * flat.element_size()
        header = Header(TransportOperation.BROADCAST, self._sequence + 1, dtype_code(flat.dtype), source, total_bytes)
        self.broadcast_as(header, flat, source)

    def barrier(self) -> None:
        header = Header(TransportOperation.BARRIER, self._sequence + 1, trailer_bytes=1)
        self._gather(header, b"\0", [1] * self._size)

    def wait_for_peer(self, wake: int) -> bool | None:
        self._raise_if_ended("wait")
        was_called = self._connections.wait_for_data(wake)
        if self._abort_reason is not None:
            self._raise_if_ended("wait")
        return was_called

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._abort_reason is None:
                self._abort_reason = reason
            if not self._is_closed:
                self._connections.shut_down()

    def close(self) -> None:
        """Close the transport; no collective may run. Later calls raise GenerationEnded."""
        with self._lock:
            if self._abort_reason is None:
                self._abort_reason = "its transport was closed"
            self._is_closed = True
            self._connections.close()

    # For a transport that moves tensors in another way, in turn with the operations above, or that has several rings
    # --------------------------------------------------------------------------------------------------

    def serve(self, names: Sequence[int], look_around: Callable[[], None], every_s: float) -> None:
        """Become a part of another transport, in which the ranks have other `names`.

        While nothing moves, `look_around` is called instead of `check`, and may raise.
        """
        self._names = names
        self._connections.look_around(look_around, every_s)

    def reduce_as(
        self, header: Header, flat: torch.Tensor, trailer: bytes, combine: Combine, last: Combine | None = None
    ) -> list[bytes]:
        """Reduce a flat tensor, possibly a part of the tensor that the header describes, as all_reduce() does.

        The last of the ranks' tensors is combined by `last`, unless that is None.
        """
        last = last or combine
        total_bytes = flat.numel() * flat.element_size()
        if choose_algorithm(total_bytes, self._size) is Algorithm.GATHER:
            blobs = self._gather(header, bytes(byte_view(flat)) + trailer, [total_bytes + len(trailer)] * self._size)
            _combine_into(flat, blobs, combine, last)
            return [bytes(blob[total_bytes:]) for blob in blobs]
        trailers = [bytearray(len(trailer)) for _ in range(self._size)]
        trailers[self._rank][:] = trailer
        outgoing: Outgoing = deque()
        self._run(
            header,
            outgoing,
            reduce_around(outgoing, self._agreement(header), self._rank, flat, trailers, combine, last),
        )
        return [bytes(each) for each in trailers]

    def add_shards_as(
        self,
        header: Header,
        rows: Sequence[torch.Tensor],
        forests: Sequence[Forest],
        trailer: bytes,
        factor: float = 1.0,
    ) -> list[bytes]:
        """Add up the nodes of all ranks, `forests` by rank, as all_reduce_shards() does. The header has the number of
        shards as its source; the rows may be a part of what it describes."""
        from farandole.training.collectives.shard_sums import add_around, add_blobs  # loaded only in strict mode

        nbytes = rows[0].numel() * rows[0].element_size()
        if choose_algorithm(nbytes * max(map(len, forests)), self._size) is Algorithm.GATHER:
            mine = rows[: len(forests[self._rank])]
            lengths = [len(forest) * nbytes + len(trailer) for forest in forests]
            blobs = self._gather(header, b"".join([*map(byte_view, mine), trailer]), lengths)
            add_blobs(rows[0], blobs, forests, header.source, factor)
            return [bytes(blob[len(blob) - len(trailer) :]) for blob in blobs]
        trailers = [bytearray(len(trailer)) for _ in range(self._size)]
        trailers[self._rank][:] = trailer
        outgoing: Outgoing = deque()
        agreement = self._agreement(header)
        schedule = add_around(outgoing, agreement, self._rank, rows, trailers, forests, header.source, factor)
        self._run(header, outgoing, schedule)
        return [bytes(each) for each in trailers]

    def broadcast_as(self, header: Header, flat: torch.Tensor, source: int) -> None:
        """Overwrite a flat tensor with the tensor of the rank at place `source` of this ring, as broadcast() does."""
        outgoing: Outgoing = deque()
        agreement = self._agreement(header)
        schedule = broadcast_around(outgoing, agreement, self._rank, byte_view(flat), source, self._size)
        # The source receives only a header; its part is done when all bytes are sent.
        self._run(header, outgoing, schedule, is_done_when_received=self._rank != source)

    @property
    def host(self) -> str:
        """The address of this host on the route to the next rank."""
        return self._connections.host

    def exchange(self, header: Header, payload: bytes) -> list[bytes]:
        """Gather the bytes of all ranks, by rank, as an operation of this header. All must have the same length."""
        return [bytes(each) for each in self._gather(header, payload, [len(payload)] * self._size)]

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next operation's header."""
        return self._sequence + 1

    @contextmanager
    def running(self, header: Header) -> Iterator[None]:
        """Enclose an operation that another transport carries out.

        Raises if this transport has ended; any error inside ends it.
        """
        self._raise_if_ended(header.operation.name.lower())
        self._sequence = header.sequence
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException) -> None:
        """End the ring with an error that has ended the transport it belongs to. The error is not reported again."""
        if self._failure is not None:
            return
        if isinstance(error, CollectiveMismatch):
            self._end_by_mismatch(str(error))
        elif isinstance(error, GenerationEnded):
            self.abort(error.reason)
        elif isinstance(error, PeerLost):
            self._fail_with(error.rank, error.detail)
            self._connections.shut_down()
        else:
            self._end_by_interruption(error)

    def interruption(self) -> Interruption | None:
        """Return the reason why a thread that waits for all ranks in such an operation should stop waiting.

        Either a connection has failed, or the previous rank is in an operation of the ring that is not a later one.
        Raises the errors of `check`.
        """
        interruption = self._connections.interruption()
        if isinstance(interruption, PeerCalled):
            packed = self._connections.peek(HEADER_BYTES)
            if len(packed) < HEADER_BYTES or (sequence_of(packed) or 0) > self._sequence:
                interruption = None
        if interruption is None and self._check is not None and now_s() >= self._next_check_s:
            self._next_check_s = now_s() + _CHECK_EVERY_S
            self._check()
        return interruption

    def end_by(self, interruption: Interruption, header: Header) -> NoReturn:
        """Raise the error of an interruption.

        PeerLost, GenerationEnded, or CollectiveMismatch if other ranks are in an operation of the ring.
        """
        op = header.operation.name.lower()
        if isinstance(interruption, PeerCalled) and self._abort_reason is None:
            outgoing: Outgoing = deque()
            schedule = compare_around(outgoing, self._agreement(header))
            with WaitingForPeers():
                broken = self._connections.move(outgoing, schedule, is_done_when_received=False)
            assert broken is not None, "a comparison ends only with an error"
            interruption = broken
        if isinstance(interruption, Broken):
            self._end_by_lost_peer(op, interruption.direction, interruption.detail)
        self._raise_if_ended(op)
        raise AssertionError(f"{op} was interrupted without a cause")

    def _agreement(self, header: Header) -> Agreement:
        return Agreement(header, self._rank, self._names)

    def _gather(self, header: Header, own: bytes, lengths: list[int]) -> list[bytearray]:
        """Return the blobs of all ranks, by rank."""
        blobs = [bytearray(length) for length in lengths]
        blobs[self._rank][:] = own
        outgoing: Outgoing = deque()
        self._run(header, outgoing, gather_around(outgoing, self._agreement(header), self._rank, blobs))
        return blobs

    def _run(
        self, header: Header, outgoing: Outgoing, schedule: Schedule, *, is_done_when_received: bool = True
    ) -> None:
        """Run one operation, and set the state that its end implies for later ones."""
        op = header.operation.name.lower()
        if self._failure is None and self._connections.cannot_send:
            # The next rank had gone when the last operation ended well here. It may have finished, which is no failure;
            # it is one now that this rank needs it.
            self._end_by_lost_peer(op, "send", self._connections.cannot_send)
        self._raise_if_ended(op)
        self._sequence = header.sequence
        try:
            with WaitingForPeers():
                broken = self._connections.move(outgoing, schedule, is_done_when_received=is_done_when_received)
        except CollectiveMismatch as error:
            self._end_by_mismatch(str(error))
            raise
        except BaseException as error:
            # The stream is in the middle of a message: the bytes that follow could not be decoded.
            self._end_by_interruption(error)
            raise
        if broken is not None:
            self._end_by_lost_peer(op, broken.direction, broken.detail)
            self._raise_if_ended(op)

    def _raise_if_ended(self, op: str) -> None:
        if self._abort_reason is not None:
            raise GenerationEnded(op, self._generation, self._abort_reason)
        if self._failure is not None:
            raise self._failure(op)

    def _end_by_lost_peer(self, op: str, direction: str, detail: str) -> None:
        """End after a failed connection, and report it unless an abort was the cause."""
        if self._abort_reason is not None:
            return
        peer = self._peers[direction]
        self._fail_with(peer.rank, f"{direction}: {detail}")
        self._connections.shut_down()
        if self._on_broken is not None:
            self._on_broken(peer.worker, direction, f"{op}: {detail}")

    def _fail_with(self, rank: int, detail: str) -> None:
        generation = self._generation  # not self: in a cycle, the sockets would outlive the last reference
        self._failure = lambda later_op: PeerLost(later_op, generation, rank, detail)

    def _end_by_mismatch(self, text: str) -> None:
        """End after a mismatch, without a shutdown.

        The message travels against the ring, from rank to rank, and end-of-file must not overtake it. close() does the
        rest.
        """
        self._failure = lambda _: CollectiveMismatch(text)
        self._connections.send_reason(text)

    def _end_by_interruption(self, error: BaseException) -> None:
        generation, reason = self._generation, f"a collective was interrupted by {type(error).__name__}"
        self._failure = lambda later_op: GenerationEnded(later_op, generation, reason)
        self._connections.shut_down()


def _combine_into(flat: torch.Tensor, blobs: list[bytearray], combine: Combine, last: Combine) -> None:
    """Reduce the tensors at the front of all blobs, in the order of the ranks, as every rank does."""
    if flat.numel() == 0:
        return
    first, *others = (torch.frombuffer(blob, dtype=flat.dtype, count=flat.numel()) for blob in blobs)
    for number, other in enumerate(others, start=1):
        function = last if number == len(others) else combine
        function(flat if number > 1 else first, other, out=flat)
