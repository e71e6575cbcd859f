"""A process group of Gloo, its connections, and its end: a TorchGroup (torch_groups/group_operations.py)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farandole.clock import now_s
from farandole.collectives.gloo.sockets import Listening, shut_down
from farandole.collectives.reduction import Reduction
from farandole.collectives.torch_groups.group_operations import NO_LIMIT_S, OPS

_NO_LIMIT = timedelta(seconds=NO_LIMIT_S)

_RELEASE_S = 5.0
_REPEAT_S = 0.01

logger = logging.getLogger("farandole")


class GlooGroup:
    """A process group of Gloo.

    Attributes:
        own: The address at which this rank listens.
        others: The addresses of all its ranks.
    """

    name = "Gloo"
    look_every_s = 0.002

    def __init__(self, group: dist.ProcessGroupGloo, own: Listening, others: Collection[Listening]) -> None:
        self._group: Any = group  # torch's stubs lack its operations
        self._own, self._others = own, set(others)
        self._work: dist.Work | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, flat: torch.Tensor, dtype: torch.dtype, is_read: bool) -> torch.Tensor:
        nbytes = flat.numel() * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        copy = self._memory[:nbytes].view(dtype)
        return copy.copy_(flat) if is_read else copy

    def all_reduce(self, copy: torch.Tensor, op: Reduction, when_done: Callable[[], None]) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = OPS[op], _NO_LIMIT  # type: ignore[assignment]
        return self._begun(self._group.allreduce([copy], options), when_done)

    def broadcast(self, copy: torch.Tensor, source: int, when_done: Callable[[], None]) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, _NO_LIMIT
        return self._begun(self._group.broadcast([copy], options), when_done)

    def give(self, copy: torch.Tensor, flat: torch.Tensor) -> None:
        flat.copy_(copy)

    def shut_down(self) -> None:
        if self._group is not None:  # another socket may have its ports once it is gone
            shut_down(self._own, self._others)

    def release(self) -> None:
        """Release the group in the background, since Gloo takes its time."""
        group, work = self._group, self._work
        self._group = self._work = None
        if group is not None:
            shut_down(self._own, self._others)
            # Not a daemon, for the reason given in construction.py.
            threading.Thread(target=self._release, args=(group, work), name="farandole-gloo-release").start()

    def _begun(self, work: dist.Work, when_done: Callable[[], None]) -> dist.Work:
        """Call `when_done` in a thread of Gloo when the operation has ended."""
        self._work = work
        work.get_future().add_done_callback(lambda _: when_done())
        return work

    def _release(self, group: dist.ProcessGroupGloo, work: dist.Work | None) -> None:
        """Return when the group is gone. Its destructor waits for the running operation, so that must end first."""
        deadline_s, pause = now_s() + _RELEASE_S, threading.Event()
        while work is not None and not work.is_completed():
            if now_s() >= deadline_s:
                logger.warning("an operation of Gloo does not end; its memory is not released")
                _stuck.append(group)
                return
            shut_down(self._own, self._others)
            pause.wait(_REPEAT_S)


_stuck: list[dist.ProcessGroupGloo] = []
