"""The interface of a transport. One transport belongs to one generation; optim, state and worker use it."""

from __future__ import annotations

import enum
from typing import Protocol

import torch

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""What is reduced where only trailers travel: the same on all ranks, whatever the defaults of a script are."""


class Reduction(enum.IntEnum):
    """The `op` of a reducing collective, numbered as in Horovod.

    Transports know SUM, MIN, MAX and PRODUCT, some of them AVERAGE; the others are composed of them.
    """

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Transport(Protocol):
    """Collectives of one generation. All ranks call the same operations in the same order.

    Every operation may raise PeerLost (a connection failed) or GenerationEnded (abort() was called); after either,
    every later call raises too, and the caller's tensors are not touched any more once the call has returned or raised.
    CollectiveMismatch means that this rank's neighbour is in another operation.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        """Reduce a contiguous tensor over all ranks, in place, with the same bits on every rank.

        CPU tensors always work; tensors on another device where the process has one (device_transport.py).
        Then earlier work of their current stream is included, and the result is ready when the call returns.

        Args:
            tensor: The tensor; it may be empty.
            trailer: Bytes of the same length on all ranks that travel along without a message of their own.
            op: SUM, MIN, MAX or PRODUCT. RingTransport and SharedMemoryTransport know AVERAGE, too, of floating point
                numbers: each part of the sum is divided while it is in the cache.

        Returns:
            The trailers of all ranks, by rank.
        """
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank. Lengths may differ. For small payloads (kilobytes)."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with rank `source`'s (same shape and dtype everywhere)."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def wait_for_peer(self, wake: int) -> bool | None:
        """Wait, between operations, until another rank has begun one.

        Returns True when it has, False when there is something to read from the descriptor `wake` or a neighbour is
        gone, and None after a second without an event.

        A neighbour may leave when no rank needs it any more; a rank that does need it learns from the next operation
        that it is lost. Raises GenerationEnded after an abort.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make the operation in flight, and every later one, raise within 5 ms. Callable from any thread."""
        ...

    def close(self) -> None:
        """Release sockets and memory; no collective may run. Later calls raise GenerationEnded. Idempotent."""
        ...


def refuse_source(source: int, size: int) -> None:
    """Raise ValueError unless the source of a broadcast is one of `size` ranks."""
    if not 0 <= source < size:
        raise ValueError(f"broadcast: source must be a rank from 0 to {size - 1}, got {source}")
