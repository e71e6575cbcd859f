"""Collectives of some ranks, made of messages between them. Subgroups of torch.distributed use it where their members
cannot share memory (subgroup_transport.py)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from farandole.errors import CollectiveMismatch
from farandole.training.collectives.connection_pair import byte_view, combiner, dtype_code, flat_view
from farandole.training.collectives.point_to_point import PointToPoint
from farandole.training.collectives.ring_schedules import chunk_bounds, combine_in_order
from farandole.training.collectives.transport import Reduction, refuse_source

# Up to this size every rank gets every rank's tensor; beyond, each rank reduces a part of it for all.
_WHOLE_BYTES = 16 * 1024

_HEADER = struct.Struct("!8sBBQ6x")  # operation, dtype, reduction or source, bytes; the elements behind it are aligned

_ALL_REDUCE, _ALL_GATHER, _BROADCAST, _BARRIER, _DELIVER = b"reduce", b"gather", b"bcast", b"barrier", b"deliver"


class P2PTransport:
    """A Transport (transport.py) whose ranks are places in `ranks`. There may be many in one generation.

    Args:
        ranks: The members, by their ranks in `p2p`.
        subject: The same for all members, and only for this group: 16 bytes.
    """

    def __init__(self, p2p: PointToPoint, ranks: Sequence[int], subject: bytes) -> None:
        self._p2p, self._ranks, self._subject = p2p, ranks, subject
        self.rank, self.size = list(ranks).index(p2p.rank), len(ranks)
        self._others = [place for place in range(self.size) if place != self.rank]
        self._sequence = 0

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, combine = flat_view(tensor), combiner(op)
        header = _HEADER.pack(_ALL_REDUCE, dtype_code(flat.dtype), op, flat.nbytes)
        if flat.nbytes <= _WHOLE_BYTES:
            arrived = self._exchange(header, trailer + bytes(byte_view(flat)))
            if flat.numel():
                tensors = [torch.frombuffer(bytearray(each[len(trailer) :]), dtype=flat.dtype) for each in arrived]
                combine_in_order(flat, tensors, combine)
            return [bytes(each[: len(trailer)]) for each in arrived]
        trailers = [bytes(each) for each in self._exchange(header, trailer)]
        parts = [flat[slice(*bounds)] for bounds in chunk_bounds(flat.numel(), self.size)]
        mine = parts[self.rank]
        arrived = self._swap(header, [byte_view(part) for part in parts])
        tensors = [
            mine.clone() if place == self.rank else torch.frombuffer(each, dtype=flat.dtype)
            for place, each in enumerate(arrived)
        ]
        combine_in_order(mine, tensors, combine)
        for part, content in zip(parts, self._swap(header, [byte_view(mine)] * self.size), strict=True):
            if part is not mine:
                byte_view(part)[:] = content
        return trailers

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [bytes(each) for each in self._exchange(_HEADER.pack(_ALL_GATHER, 0, 0, 0), payload)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        refuse_source(source, self.size)
        flat = flat_view(tensor)
        header = _HEADER.pack(_BROADCAST, dtype_code(flat.dtype), source, flat.nbytes)
        subject = self._next_subject()
        if source == self.rank:
            for place in self._others:
                self._p2p.send(self._ranks[place], subject, header, byte_view(flat))
        else:
            content = self._open(header, self._receive(source, subject), source)
            byte_view(flat)[:] = content

    def deliver(self, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Send part number r of `given` to rank r, and fill output number r with the part from there: a gather, a
        scatter or an all-to-all. All are flat, contiguous and of uint8.

        Empty parts are neither sent nor waited for. Raises CollectiveMismatch for a part of another size than its
        output's.
        """
        header, subject = _HEADER.pack(_DELIVER, 0, 0, 0), self._next_subject()
        for place in self._others:
            if given[place].numel():
                self._p2p.send(self._ranks[place], subject, header, byte_view(given[place]))
        if outputs[self.rank].numel():
            outputs[self.rank].copy_(given[self.rank])
        for place in self._others:
            expected = outputs[place].numel()
            if not expected:
                continue
            content = self._open(header, self._receive(place, subject), place)
            if len(content) != expected:
                raise CollectiveMismatch(
                    f"rank {self._ranks[place]} has sent {len(content)} bytes to rank {self._ranks[self.rank]}, which "
                    f"expects {expected}"
                )
            byte_view(outputs[place])[:] = content

    def barrier(self) -> None:
        self._exchange(_HEADER.pack(_BARRIER, 0, 0, 0), b"")

    def wait_for_peer(self, wake: int) -> bool | None:
        raise NotImplementedError("the ranks of a subgroup do not wait for each other between operations")

    def abort(self, reason: str) -> None:
        """End the `PointToPoint` of the generation: there is no other way to reach the ranks that wait for this one."""
        self._p2p.abort(reason)

    def close(self) -> None:
        """Close the transport. The `PointToPoint` stays open."""

    def _exchange(self, header: bytes, payload: bytes) -> list[memoryview]:
        """Return the payloads of all ranks, by rank. Raises CollectiveMismatch if others run another operation."""
        return self._swap(header, [memoryview(payload)] * self.size)

    def _swap(self, header: bytes, given: Sequence[memoryview]) -> list[memoryview]:
        """Send each rank its part of `given`. Return what all ranks have sent here, by rank; raises as _exchange()."""
        subject = self._next_subject()
        for place in self._others:
            self._p2p.send(self._ranks[place], subject, header, given[place])
        return [
            given[place] if place == self.rank else self._open(header, self._receive(place, subject), place)
            for place in range(self.size)
        ]

    def _receive(self, place: int, subject: bytes) -> bytearray:
        return self._p2p.receive(self._ranks[place], subject)

    def _open(self, header: bytes, content: bytearray, place: int) -> memoryview:
        theirs = bytes(content[: _HEADER.size])
        if theirs != header:
            raise CollectiveMismatch(
                f"rank {self._ranks[self.rank]} is in {_describe(header)}, but rank {self._ranks[place]} is in "
                f"{_describe(theirs)}; all ranks of a group must make the same calls"
            )
        return memoryview(content)[_HEADER.size :]

    def _next_subject(self) -> bytes:
        self._sequence += 1
        return self._subject + self._sequence.to_bytes(8, "big")


def _describe(header: bytes) -> str:
    if len(header) < _HEADER.size:
        return "an unknown operation"
    operation, dtype, which, nbytes = _HEADER.unpack(header)
    return f"{operation.rstrip(bytes(1)).decode(errors='replace')}({nbytes} bytes, dtype {dtype}, {which})"
