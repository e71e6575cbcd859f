"""The header in front of every operation on a ring, by which neighbours detect a mismatch.

All ranks send the same header for the same call, so one comparison of bytes checks everything: operation, dtype, size,
source, length of the trailer, and the number of earlier operations.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import torch

from farandole.training.collectives.connection_pair import DTYPES, dtype_code
from farandole.training.collectives.transport import Reduction

_LAYOUT = struct.Struct("!4sBBHQQQ")
_MAGIC = b"Frd1"

HEADER_BYTES = _LAYOUT.size


class TransportOperation(enum.IntEnum):
    """The codes on the wire; the names are those of the transport's methods."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    BROADCAST = 3
    BARRIER = 4
    ALL_REDUCE_ON_DEVICE = 5  # all_reduce and broadcast of a tensor that stays on its device
    BROADCAST_ON_DEVICE = 6
    ADD_SHARDS = 7
    EXCHANGE = 8


_REDUCING = (TransportOperation.ALL_REDUCE, TransportOperation.ALL_REDUCE_ON_DEVICE)
_BROADCASTING = (TransportOperation.BROADCAST, TransportOperation.BROADCAST_ON_DEVICE)


class Header(NamedTuple):
    """The description of one operation on a rank.

    Attributes:
        sequence: The number of operations of this generation, including this one.
        dtype_code: That of connection_pair.dtype_code(); 0 where there is no tensor.
        source: The rank whose tensor is broadcast; the Reduction of an all_reduce; the number of shards to be added
            up; 0 elsewhere.
        total_bytes: The size of the tensor, or of all payloads together once their lengths are known.
        trailer_bytes: The size of one rank's trailer.
    """

    operation: TransportOperation
    sequence: int
    dtype_code: int = 0
    source: int = 0
    total_bytes: int = 0
    trailer_bytes: int = 0

    def pack(self) -> bytes:
        operation, sequence, dtype_code, source, total_bytes, trailer_bytes = self
        return _LAYOUT.pack(_MAGIC, operation, dtype_code, source, sequence, total_bytes, trailer_bytes)

    def describe(self) -> str:
        """Describe the operation for an error message: `all_reduce of 4000 bytes of float32 (operation 7)`."""
        text = self.operation.name.lower()
        if self.dtype_code:
            dtype = str(DTYPES[self.dtype_code - 1]).removeprefix("torch.")
            text += f" of {self.total_bytes} bytes of {dtype}"
        elif self.total_bytes:
            text += f" of {self.total_bytes} bytes"
        if self.trailer_bytes:
            text += f" with a trailer of {self.trailer_bytes} bytes"
        if self.operation in _BROADCASTING:
            text += f" from rank {self.source}"
        if self.operation is TransportOperation.ADD_SHARDS:
            text += f" of {self.source} shards"
        if self.operation in _REDUCING and self.source != Reduction.SUM:
            text += f" by {Reduction(self.source).name.lower()}"
        return f"{text} (operation {self.sequence})"


class NumberedOperations:
    """The count of the operations of one transport on this rank, of which each header has the next number."""

    sequence = 0
    """The number of the last operation that has begun."""

    def next_header(
        self, operation: TransportOperation, flat: torch.Tensor | None = None, source: int = 0, trailer_bytes: int = 0
    ) -> Header:
        """Return the header of the next operation, on a flat tensor if there is one."""
        if flat is None:
            return Header(operation, self.sequence + 1, source=source, trailer_bytes=trailer_bytes)
        return Header(operation, self.sequence + 1, dtype_code(flat.dtype), source, flat.nbytes, trailer_bytes)


def sequence_of(packed: bytes) -> int | None:
    """Return the sequence number in a header; None if it is not a header."""
    if len(packed) != HEADER_BYTES:
        return None
    magic, _, _, _, sequence, _, _ = _LAYOUT.unpack(packed)
    return int(sequence) if magic == _MAGIC else None


def describe_packed(packed: bytes) -> str:
    """Describe a neighbour's header, or report that it is not a header."""
    magic, operation, dtype_code, source, sequence, total_bytes, trailer_bytes = _LAYOUT.unpack(packed)
    known = magic == _MAGIC and dtype_code <= len(DTYPES) and operation in list(TransportOperation)
    if not known or (operation in _REDUCING and source not in list(Reduction)):
        return "an operation that this version does not know"
    return Header(TransportOperation(operation), sequence, dtype_code, source, total_bytes, trailer_bytes).describe()
