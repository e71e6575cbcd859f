"""All collectives with tensors through torch's Gloo: the reference for our own transports. Words go around the ring.

Ranks agree on each operation around the ring, hand it to Gloo, and tell each other when they have their result. Gloo
reduces a private copy: after an abort it may go on writing for a while, and writes where nobody looks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from farandole.clock import now_s
from farandole.collectives.buffers import combiner, dtype_code, flat_view
from farandole.collectives.duplex import Broken
from farandole.collectives.gloo.group import GlooGroup
from farandole.collectives.reduction import Reduction
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import Header, Operation

_LOOK_EVERY_S = 0.002  # at the ring, which hears of a loss or a mismatch
_RING_KNOWS_S = 0.1  # after a connection of Gloo's has failed, how long the ring may need to tell whose it was

# Types that Gloo does not reduce, in one that it does and that has the same result in its lower bits.
_WIDER = {torch.int16: torch.int32}


class GlooTransport:
    """A Transport (transport.py).

    ring   connects all ranks in the same order; close() closes it
    group  of the same ranks; close() releases it, in the background
    """

    def __init__(self, ring: RingTransport, group: GlooGroup) -> None:
        self._ring, self._group = ring, group
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._wake = threading.Event()

    @property
    def rank(self) -> int:
        return self._ring.rank

    @property
    def size(self) -> int:
        return self._ring.size

    def all_reduce(self, tensor: torch.Tensor, note: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat = flat_view(tensor)
        combiner(op)
        if flat.numel() == 0:
            return self._ring.all_reduce(flat, note, op)
        header = self._header(Operation.ALL_REDUCE, flat, op, len(note))
        notes = self._ring.exchange(header, note)
        copy = self._private(flat, _WIDER.get(flat.dtype, flat.dtype))
        copy.copy_(flat)
        self._run(header, lambda: self._group.all_reduce(copy, op, self._wake.set))
        flat.copy_(copy)
        return notes

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not 0 <= source < self.size:
            raise ValueError(f"broadcast: source must be a rank from 0 to {self.size - 1}, got {source}")
        flat = flat_view(tensor)
        if flat.numel() == 0:
            self._ring.broadcast(flat, source)
            return
        header = self._header(Operation.BROADCAST, flat, source)
        self._ring.exchange(header, b"")
        copy = self._private(flat, torch.uint8)
        if self.rank == source:
            copy.copy_(flat.view(torch.uint8))
        self._run(header, lambda: self._group.broadcast(copy, source, self._wake.set))
        flat.view(torch.uint8).copy_(copy)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._ring.all_gather(payload)

    def barrier(self) -> None:
        self._ring.barrier()

    def wait_until_called(self, wake: int) -> bool | None:
        return self._ring.wait_until_called(wake)

    def abort(self, reason: str) -> None:
        self._ring.abort(reason)
        self._wake.set()
        self._group.shut_down()

    def close(self) -> None:
        """Only while no collective runs. Later calls raise GenerationEnded."""
        self._ring.close()
        self._group.release()

    def _header(self, operation: Operation, flat: torch.Tensor, source: int, note_bytes: int = 0) -> Header:
        nbytes = flat.numel() * flat.element_size()
        return Header(operation, self._ring.next_sequence, dtype_code(flat.dtype), source, nbytes, note_bytes)

    def _private(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the same bytes, or of as many elements of a wider type; the same for every operation."""
        numel = like.numel() * like.element_size() if dtype == torch.uint8 else like.numel()
        nbytes = numel * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype)

    def _run(self, header: Header, begin: Callable[[], dist.Work]) -> None:
        """One operation of Gloo's, on all ranks: when it returns, all have their result."""
        try:
            with self._ring.running(header):
                self._wait(begin(), header)
            self._ring.exchange(header._replace(sequence=self._ring.next_sequence, note_bytes=1), b"\0")
        except BaseException:
            self._group.shut_down()
            raise

    def _wait(self, work: dist.Work, header: Header) -> None:
        """Until the operation has ended. Raises at once what ends it for this rank, whatever Gloo still does."""
        while not work.is_completed():
            if self._wake.wait(_LOOK_EVERY_S):
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
        """A connection of Gloo's has failed; mostly the ring will know soon of whom, otherwise a neighbour is named."""
        deadline_s = now_s() + _RING_KNOWS_S
        while now_s() < deadline_s:
            interruption = self._ring.interruption()
            if isinstance(interruption, Broken):
                return interruption
            self._wake.wait(_LOOK_EVERY_S)
        return Broken("receive", f"Gloo: {detail}")
