"""The part of one rank in one operation: its request, its tensor, and the handle that waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farandole.collectives.named.handles import Handle
from farandole.collectives.named.operation_requests import Key, Request


@dataclass(eq=False)
class Operation:
    """Made by the caller's thread; the collectives' thread does the rest.

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
