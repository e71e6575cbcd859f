"""What a transport must do. One transport belongs to one generation; optim, state and worker use it."""

from __future__ import annotations

from typing import Protocol

import torch

from farandole.collectives.reduction import Reduction


class Transport(Protocol):
    """Collectives of one generation. All ranks call the same operations in the same order.

    Every operation may raise PeerLost (a connection failed) or GenerationEnded (abort() was called);
    after either, every later call raises too, and nothing touches the caller's tensors any more once the
    call has returned or raised. CollectiveMismatch: this rank's neighbour is in another operation.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        """Reduce a contiguous tensor over all ranks, in place, with the same bits on every rank. CPU tensors always;
        those on another device where the process has one (staging.py, device_transport.py): what their current stream
        was given before counts, and the result is there when the call returns.

        op    SUM, MIN, MAX or PRODUCT
        `trailer` (same length on all ranks) rides along without a message of its own; returns the trailers of
        all ranks, by rank. A tensor may be empty.
        """
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. Lengths may differ. For small things (kilobytes)."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with rank `source`'s (same shape and dtype everywhere)."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def wait_for_peer(self, wake: int) -> bool | None:
        """Wait, between operations, until another rank has begun one (True), or there is something to read from
        the descriptor `wake`, or a neighbour is gone (False); None when nothing of it happened for a second.

        A neighbour may go when nobody needs it any more; whoever does need it learns from the next operation that
        it is lost. Raises GenerationEnded after an abort.
        """
        ...

    def abort(self, reason: str) -> None:
        """From any thread: make the operation in flight, and every later one, raise within 5 ms."""
        ...

    def close(self) -> None:
        """Release sockets and memory. Idempotent."""
        ...
