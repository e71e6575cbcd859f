"""What a collective of c10d returns: a Work whose result is there. group.py makes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import Work
from torch.futures import Future


class Done(Work):
    """Collectives are carried out in the order in which they are called, and in the calling thread: whoever waits
    for one does not have to. What fails raises where it was called, which C++ sees as well.

    tensors  what the operation wrote
    source   the rank that a message came from
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._tensors, self._source = list(tensors), source

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def synchronize(self) -> None:
        """As wait()."""

    def block_current_stream(self) -> None:
        """There are no streams on a CPU."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Completed, with the tensors."""
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._tensors)
        return future
