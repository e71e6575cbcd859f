"""One process group of Gloo's, its connections, and its end. transport.py uses it."""

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

# Who is alive is the coordinator's business: Gloo is not to give up by itself.
_NO_LIMIT = timedelta(days=30)

_RELEASE_S = 5.0
_REPEAT_S = 0.01

_OPS: dict[Reduction, Any] = {  # torch's stubs have another type for each
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}

logger = logging.getLogger("farandole")


class GlooGroup:
    """own     where this rank listens
    others  where all of its ranks do
    """

    def __init__(self, group: dist.ProcessGroupGloo, own: Listening, others: Collection[Listening]) -> None:
        self._group: Any = group  # torch's stubs know nothing of its operations
        self._own, self._others = own, set(others)
        self._work: dist.Work | None = None

    def all_reduce(self, flat: torch.Tensor, op: Reduction, when_done: Callable[[], None]) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = _OPS[op], _NO_LIMIT
        return self._begun(self._group.allreduce([flat], options), when_done)

    def broadcast(self, flat: torch.Tensor, source: int, when_done: Callable[[], None]) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, _NO_LIMIT
        return self._begun(self._group.broadcast([flat], options), when_done)

    def shut_down(self) -> None:
        """From any thread: end what is under way, on all ranks. It may go on for a moment."""
        if self._group is not None:  # its ports may be somebody else's when it is gone
            shut_down(self._own, self._others)

    def release(self) -> None:
        """Once: end everything in the background, since Gloo takes its time."""
        group, work = self._group, self._work
        self._group = self._work = None
        if group is not None:
            shut_down(self._own, self._others)
            # No daemon, as in builder.py.
            threading.Thread(target=self._release, args=(group, work), name="farandole-gloo-release").start()

    def _begun(self, work: dist.Work, when_done: Callable[[], None]) -> dist.Work:
        """`when_done` is called in a thread of Gloo's."""
        self._work = work
        work.get_future().add_done_callback(lambda _: when_done())
        return work

    def _release(self, group: dist.ProcessGroupGloo, work: dist.Work | None) -> None:
        """Returns when the group is gone. Its destructor waits for the operation under way, so that must end first."""
        deadline_s, pause = now_s() + _RELEASE_S, threading.Event()
        while work is not None and not work.is_completed():
            if now_s() >= deadline_s:
                logger.warning("an operation of Gloo does not end; its memory is not released")
                _stuck.append(group)
                return
            shut_down(self._own, self._others)
            pause.wait(_REPEAT_S)


_stuck: list[dist.ProcessGroupGloo] = []
