"""Run all collectives of some ranks that share a host through its memory. Subgroups of torch.distributed use it.

The members exchange references to new control blocks by messages when the group is first used. Then everything moves
through memory, also payloads and barriers: every operation begins with the headers of all members, so members that are
in different operations always find out. Messages between the members remain for one purpose: the end of their
connections shows that a member is gone, and a last message says why one has ended the group.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from farandole.errors import CollectiveMismatch, GenerationEnded, RecoverableError, StepError
from farandole.training.collectives.connection_pair import Interruption, PeerCalled, byte_view
from farandole.training.collectives.control_blocks import DATA_BYTES, ControlBlocks, share_control_blocks
from farandole.training.collectives.p2p_transport import P2PTransport
from farandole.training.collectives.point_to_point import PointToPoint
from farandole.training.collectives.ring_header import HEADER_BYTES, Header, NumberedOperations, TransportOperation
from farandole.training.collectives.shared_memory_group import MAX_PAYLOAD_BYTES, Wanted
from farandole.training.collectives.shared_memory_transport import TensorsInMemory
from farandole.training.collectives.transport import NOTHING, Reduction

logger = logging.getLogger("farandole")

_LENGTH_BYTES = 8

# In place of the number of an operation, which never becomes as large.
_END = b"\xff" * 8


def connect_members(p2p: PointToPoint, ranks: Sequence[int], subject: bytes) -> SubgroupTransport | P2PTransport:
    """Return the transport of some ranks: through memory if all of them can share it, else by messages.

    All members call it at once, and get the same kind of transport. Raises PeerLost and GenerationEnded.

    Args:
        p2p: The messages of the generation.
        ranks: The members, by their ranks in `p2p`.
        subject: The same for all members, and only for this group: 16 bytes.
    """
    messages = P2PTransport(p2p, ranks, subject)
    if not p2p.share_a_host(ranks):
        return messages
    control_blocks = share_control_blocks(messages, range(len(ranks)), p2p.rank)
    if not isinstance(control_blocks, str):
        return SubgroupTransport(p2p, ranks, subject, control_blocks)
    if messages.rank == 0:
        logger.warning(
            "tensors of the group of ranks %s are sent over TCP; shared memory cannot be used: %s",
            list(ranks),
            control_blocks,
        )
    return messages


class SubgroupTransport(TensorsInMemory):
    """A Transport (transport.py) whose ranks are places in `ranks`. There may be many in one generation.

    Args:
        p2p: The messages of the generation. Each member has sent one to each other member.
        ranks: The members, by their ranks in `p2p`.
        subject: The same for all members, and only for this group: 16 bytes.
        control_blocks: Those of the members, new ones for this group.
    """

    def __init__(self, p2p: PointToPoint, ranks: Sequence[int], subject: bytes, control_blocks: ControlBlocks) -> None:
        self._members = _Members(p2p, ranks, subject)
        super().__init__(self._members, list(ranks).index(p2p.rank), ranks, control_blocks)
        self._in_operation = threading.Lock()
        self._is_closed = False

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        if len(trailer) <= MAX_PAYLOAD_BYTES:
            return super().all_reduce(tensor, trailer, op)
        trailers = self.all_gather(trailer)
        super().all_reduce(tensor, op=op)
        return trailers

    def all_gather(self, payload: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else NOTHING
        header = self._members.next_header(TransportOperation.ALL_GATHER)
        with self._running(header):
            length = len(payload).to_bytes(_LENGTH_BYTES, "big")
            message_slots = self._group.post(header, length, mine if len(payload) <= DATA_BYTES else None)
            lengths = [int.from_bytes(each.payload[HEADER_BYTES:][:_LENGTH_BYTES], "big") for each in message_slots]
            if max(lengths) <= DATA_BYTES:
                gathered = [each.data[:length] for each, length in zip(message_slots, lengths, strict=True)]
                return [bytes(byte_view(each)) for each in gathered]
        outputs = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
        self.exchange(mine, [Wanted(0, output) for output in outputs])
        return [bytes(byte_view(output)) for output in outputs]

    def barrier(self) -> None:
        header = self._members.next_header(TransportOperation.BARRIER)
        with self._running(header):
            self._group.post(header, b"")

    def wait_for_peer(self, wake: int) -> bool | None:
        raise NotImplementedError("the ranks of a subgroup do not wait for each other between operations")

    def abort(self, reason: str) -> None:
        """End the `PointToPoint` of the generation: there is no other way to reach the ranks that wait for this one."""
        self._members.p2p.abort(reason)
        self._group.wake()

    def close(self) -> None:
        """Release the memory, now or when the operation of another thread has ended. Later calls raise GenerationEnded.

        The `PointToPoint` stays open. Idempotent.
        """
        self._is_closed = True
        if self._in_operation.acquire(blocking=False):
            self._end_operation()

    @contextmanager
    def _running(self, header: Header) -> Iterator[None]:
        """Enclose an operation. Raises if the group has ended; any error inside ends it, for all members."""
        op = header.operation.name.lower()
        if not self._in_operation.acquire(blocking=False):
            raise StepError(
                f"{op}: another thread is in a collective of this group of ranks {list(self._members.ranks)}. Create a "
                f"group for each thread with torch.distributed.new_group()"
            )
        try:
            self._members.raise_if_ended(op, self._is_closed)
            self._members.sequence = header.sequence
            try:
                yield
            except BaseException as error:
                self._members.end(error)
                raise
        finally:
            self._end_operation()

    def _end_operation(self) -> None:
        self._in_operation.release()
        if self._is_closed:
            self._group.close()


# The connections of the members, which show that one of them is gone --------------------------------------------------


class _Members(NumberedOperations):
    """The members of a group, and what this one learns of the others while it waits for them.

    An error that only one member notices (a part of another size) reaches the others in a message; a member that can
    not go on ends its messages, as any failed operation of messages does.
    """

    def __init__(self, p2p: PointToPoint, ranks: Sequence[int], subject: bytes) -> None:
        self.p2p, self.ranks = p2p, ranks
        self._others = [rank for rank in ranks if rank != p2p.rank]
        self._subject = subject + _END
        self._told = p2p.expect(None, self._subject)
        self._mismatch: str | None = None

    def interruption(self) -> Interruption | None:
        """Return the reason why this member should stop waiting for the others. Raises the errors of p2p's `check`."""
        return PeerCalled() if self._told.message is not None else self.p2p.interruption(self._others)

    def end_by(self, interruption: Interruption, header: Header) -> NoReturn:
        """Raise the error of an interruption: PeerLost, GenerationEnded, or another member's CollectiveMismatch."""
        op = header.operation.name.lower()
        self.raise_if_ended(op)
        self.p2p.end_by_loss(op, self._others)

    def raise_if_ended(self, op: str, is_closed: bool = False) -> None:
        if self._told.message is not None:
            self._mismatch = self._mismatch or self._told.message.content.decode(errors="replace")
        if self._mismatch is not None:
            raise CollectiveMismatch(self._mismatch)
        self.p2p.raise_if_ended(op)
        if is_closed:
            raise GenerationEnded(op, self.p2p.generation, "its transport was closed")

    def end(self, error: BaseException) -> None:
        """End the group after an error in an operation, so that no other member waits for this one."""
        if isinstance(error, CollectiveMismatch):
            if self._mismatch is None:
                self._mismatch = str(error)
                for rank in self._others:
                    with contextlib.suppress(RecoverableError):  # this one has an error already
                        self.p2p.send(rank, self._subject, self._mismatch.encode())
        elif not isinstance(error, RecoverableError):
            self.p2p.abort(f"a collective was interrupted by {type(error).__name__}")
