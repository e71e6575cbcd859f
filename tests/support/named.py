"""Named collectives without processes: engines whose ranks are threads, and the shortest way to submit to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from farandole.base.env import HorovodSettings
from farandole.base.membership import Placement
from farandole.integrations.horovod.named.engine import NamedCollectives
from farandole.integrations.horovod.named.stages import GLOBAL_SET, Key, Kind, Request
from farandole.integrations.horovod.named.tensor_queue import Handle, Submission
from farandole.training.collectives.transport import Reduction
from tests.support.thread_world import ThreadTransport, ThreadWorld

ResultT = TypeVar("ResultT")


def engine_on(
    transport: ThreadTransport, world: ThreadWorld, settings: HorovodSettings | None = None
) -> NamedCollectives:
    placement = Placement(transport.rank, transport.size, transport.rank, transport.size, 0, 1)
    return NamedCollectives(
        transport, placement=placement, connect=world.connect(transport.rank), settings=settings or HorovodSettings()
    )


def run(
    size: int, function: Callable[[NamedCollectives], ResultT], settings: HorovodSettings | None = None
) -> list[ResultT]:
    """`function(engine)` on each rank; what it returned, by rank. Raises what one of them raised first."""
    world = ThreadWorld(size)

    def on_rank(transport: ThreadTransport) -> ResultT:
        named = engine_on(transport, world, settings)
        try:
            result = function(named)
            submit(named, Kind.BARRIER, "at the end").wait()  # Whoever leaves earlier ends the world of the others.
        finally:
            named.close()
        return result

    results: list[Any] = world.run(on_rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def submit(
    named: NamedCollectives,
    kind: Kind,
    name: str,
    tensor: torch.Tensor | None = None,
    *,
    process_set: int = GLOBAL_SET,
    in_place: bool = False,
    op: Reduction = Reduction.SUM,
    is_awaited: bool = False,
    **said: Any,
) -> Handle:
    """Submit one operation; everything that operations.py would have checked is up to the test."""
    key, handle = Key(process_set, kind, name), Handle(run_until_done=named.run_until_done)
    if tensor is None:
        submission = Submission(Request(key, **said), handle=handle)
    else:
        dtype = str(tensor.dtype).removeprefix("torch.")
        request = Request(key, dtype, tuple(tensor.shape) or (1,) * (kind is Kind.ALLGATHER), op=op, **said)
        submission = Submission(request, tensor, in_place, handle)
    named.submit([submission], is_awaited=is_awaited)
    return handle


def allreduce(named: NamedCollectives, name: str, tensor: torch.Tensor, **said: Any) -> Handle:
    return submit(named, Kind.ALLREDUCE, name, tensor, **said)
