"""All collectives over TCP: a ring that ring_builder.py builds anew for each generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import may_spin, now_s
from farandole.base.membership import Peer
from farandole.base.wire.link_messages import Start
from farandole.errors import CollectiveMismatch, FarandoleError, GenerationEnded, PeerLost
from farandole.training.collectives.connection_pair import (
    Broken,
    ConnectionPair,
    Interruption,
    PeerCalled,
    Schedule,
    byte_view,
    combiners,
    flat_view,
)
from farandole.training.collectives.encrypted_socket import DataSocket
from farandole.training.collectives.ring_header import (
    HEADER_BYTES,
    Header,
    NumberedOperations,
    TransportOperation,
    sequence_of,
)
from farandole.training.collectives.ring_schedules import (
    Combine,
    Turn,
    broadcast_around,
    combine_in_order,
    compare_around,
    gather_around,
    is_gathering_cheaper,
    reduce_around,
)
from farandole.training.collectives.transport import NOTHING, Reduction, refuse_source

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division, Forest

OnBroken = Callable[[str, str, str], None]
"""on_broken(worker of the peer, direction "send" | "receive" | "connect", detail)"""

_CHECK_EVERY_S = 1.0

# The first block of an all_gather: the length, and the payload if it is short.
_SLIP_BYTES = 512
_SHORT_BYTES = _SLIP_BYTES - 8


class RingTransport(NumberedOperations):
    """A Transport (transport.py) over one connection to the next rank and one from the previous one.

    Collectives run in the calling thread, one at a time; abort() may come from any. When one fails, the rank shuts both
    connections down at once, so that the failure goes around the ring and no rank waits for one that has failed.

    Args:
        start: Tells the place of this rank, and its neighbours.
        on_broken: Called once, before PeerLost is raised for the first time.
        check: Called once a second while nothing moves; an error that it raises ends this transport. There is no other
        limit: the coordinator decides which workers are alive.
    """

    def __init__(
        self,
        start: Start,
        to_next: DataSocket,
        from_previous: DataSocket,
        on_broken: OnBroken | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        placement, self._generation = start.placement, start.id.number
        self.rank, self.size = placement.rank, placement.size
        self._names: Sequence[int] = range(self.size)
        self._connections = ConnectionPair(to_next, from_previous, check, may_spin(placement.local_size))
        self._check, self._next_check_s = check, now_s() + _CHECK_EVERY_S
        self._peers = {"send": start.next, "receive": start.previous}
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._is_closed = False
        self._abort_reason: str | None = None
        self._failure: Callable[[str], FarandoleError] | None = None

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers to which this rank is connected."""
        return tuple(self._peers.values())

    @property
    def still_since_s(self) -> float | None:
        """The time since when a running collective has not moved a byte; None otherwise. Callable from any thread."""
        return self._connections.still_since_s

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, (combine, last) = flat_view(tensor), combiners(op, self.size)
        header = self.next_header(TransportOperation.ALL_REDUCE, flat, op, len(trailer))
        return self.reduce_as(header, flat, trailer, combine, last)

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        flats = [flat_view(row) for row in rows]
        header = self.next_header(TransportOperation.ADD_SHARDS, flats[0], division.shards, len(trailer))
        return self.add_shards_as(header, flats, division.forests, trailer, factor)

    def all_gather(self, payload: bytes) -> list[bytes]:
        header = self.next_header(TransportOperation.ALL_GATHER, trailer_bytes=_SLIP_BYTES)
        # Short payloads travel with their lengths: one round for all, since every round has to wake every rank.
        slip = (len(payload).to_bytes(8, "big") + payload[:_SHORT_BYTES]).ljust(_SLIP_BYTES, b"\0")
        slips = self.exchange(header, slip)
        lengths = [int.from_bytes(each[:8], "big") for each in slips]
        if max(lengths) <= _SHORT_BYTES:
            return [each[8 : 8 + length] for each, length in zip(slips, lengths, strict=True)]
        header = self.next_header(TransportOperation.ALL_GATHER)._replace(total_bytes=sum(lengths))
        return [bytes(each) for each in self._gather(header, payload, lengths)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        refuse_source(source, self.size)
        flat = flat_view(tensor)
        self.broadcast_as(self.next_header(TransportOperation.BROADCAST, flat, source), flat, source)

    def barrier(self) -> None:
        self.exchange(self.next_header(TransportOperation.BARRIER, trailer_bytes=1), b"\0")

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
        if is_gathering_cheaper(flat.nbytes, self.size):
            blobs = self._gather(header, bytes(byte_view(flat)) + trailer, [flat.nbytes + len(trailer)] * self.size)
            if flat.numel():
                tensors = (torch.frombuffer(blob, dtype=flat.dtype, count=flat.numel()) for blob in blobs)
                combine_in_order(flat, tensors, combine, last)
            return [bytes(blob[flat.nbytes :]) for blob in blobs]
        return self._run_with(
            header, trailer, lambda turn, trailers: reduce_around(turn, flat, trailers, combine, last or combine)
        )

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
        from farandole.training.collectives.shard_sums import add_around, add_packed  # loaded only in strict mode

        nbytes = rows[0].nbytes
        if is_gathering_cheaper(nbytes * max(map(len, forests)), self.size):
            mine = rows[: len(forests[self.rank])]
            lengths = [len(forest) * nbytes + len(trailer) for forest in forests]
            blobs = self._gather(header, b"".join([*map(byte_view, mine), trailer]), lengths)
            if nbytes:
                packed = [torch.frombuffer(blob, dtype=torch.uint8) if blob else NOTHING for blob in blobs]
                add_packed(rows[0], packed, forests, header.source, factor, may_overwrite=True)
            return [bytes(blob[len(blob) - len(trailer) :]) for blob in blobs]
        return self._run_with(
            header, trailer, lambda turn, trailers: add_around(turn, rows, trailers, forests, header.source, factor)
        )

    def broadcast_as(self, header: Header, flat: torch.Tensor, source: int) -> None:
        """Overwrite a flat tensor with the tensor of the rank at place `source` of this ring, as broadcast() does."""
        turn = self._turn(header)
        # The source receives only a header; its part is done when all bytes are sent.
        schedule = broadcast_around(turn, byte_view(flat), source, self.size)
        self._run(turn, schedule, is_done_when_received=self.rank != source)

    def exchange(self, header: Header, payload: bytes) -> list[bytes]:
        """Gather the bytes of all ranks, by rank, as an operation of this header. All must have the same length."""
        return [bytes(each) for each in self._gather(header, payload, [len(payload)] * self.size)]

    @contextmanager
    def running(self, header: Header) -> Iterator[None]:
        """Enclose an operation that another transport carries out.

        Raises if this transport has ended; any error inside ends it.
        """
        self._raise_if_ended(header.operation.name.lower())
        self.sequence = header.sequence
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
            if len(packed) < HEADER_BYTES or (sequence_of(packed) or 0) > self.sequence:
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
            turn = self._turn(header)
            with WaitingForPeers():
                broken = self._connections.move(turn.outgoing, compare_around(turn), is_done_when_received=False)
            assert broken is not None, "a comparison ends only with an error"
            interruption = broken
        if isinstance(interruption, Broken):
            self._end_by_lost_peer(op, interruption.direction, interruption.detail)
        self._raise_if_ended(op)
        raise AssertionError(f"{op} was interrupted without a cause")

    def _turn(self, header: Header) -> Turn:
        return Turn(header, self.rank, self._names)

    def _gather(self, header: Header, own: bytes, lengths: list[int]) -> list[bytearray]:
        """Return the blobs of all ranks, by rank."""
        blobs = [bytearray(length) for length in lengths]
        blobs[self.rank][:] = own
        turn = self._turn(header)
        self._run(turn, gather_around(turn, blobs))
        return blobs

    def _run_with(
        self, header: Header, trailer: bytes, schedule: Callable[[Turn, list[bytearray]], Schedule]
    ) -> list[bytes]:
        """Run an operation whose schedule fills the trailers of all ranks, which are returned."""
        trailers = [bytearray(len(trailer)) for _ in range(self.size)]
        trailers[self.rank][:] = trailer
        turn = self._turn(header)
        self._run(turn, schedule(turn, trailers))
        return [bytes(each) for each in trailers]

    def _run(self, turn: Turn, schedule: Schedule, *, is_done_when_received: bool = True) -> None:
        """Run one operation, and set the state that its end implies for later ones."""
        op = turn.header.operation.name.lower()
        if self._failure is None and self._connections.cannot_send:
            # The next rank had gone when the last operation ended well here. It may have finished, which is no failure;
            # it is one now that this rank needs it.
            self._end_by_lost_peer(op, "send", self._connections.cannot_send)
        self._raise_if_ended(op)
        self.sequence = turn.header.sequence
        try:
            with WaitingForPeers():
                broken = self._connections.move(turn.outgoing, schedule, is_done_when_received=is_done_when_received)
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
