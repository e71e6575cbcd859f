"""Execute the decisions of a round: each kind of operation by its function. engine.py calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from farandole.collectives.named import data_movement, reductions
from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import Agreed, Kind
from farandole.collectives.named.timeline import Timeline
from farandole.collectives.transport import Transport

_ONE: dict[Kind, Callable[[Agreed, Operation, Transport], None]] = {
    Kind.ALLGATHER: data_movement.all_gather,
    Kind.BROADCAST: data_movement.broadcast,
    Kind.ALLTOALL: data_movement.all_to_all,
    Kind.REDUCESCATTER: reductions.reduce_scatter,
}


class Execution:
    """Executes operations in one thread, and keeps the flat buffers of one generation."""

    def __init__(self, timeline: Timeline) -> None:
        self._buffers = reductions.FusionBuffers()
        self._timeline = timeline

    def carry_out(self, agreed: tuple[Agreed, ...], mine: list[Operation | None], transport: Transport) -> None:
        """Execute one operation, or several allreduces that share a flat buffer, on the transport of their process set.

        Ends each of them with a result, or with an error of this rank alone. Raises the errors of the transport; then
        some operations have not ended.

        `mine` are this rank's operations, in the same order; None where it contributes zeros because it has joined.
        """
        first, kind = agreed[0], agreed[0].key.kind
        with torch.no_grad(), self._shown(agreed):
            if len(agreed) > 1:
                reductions.all_reduce_fused(agreed, mine, transport, self._buffers)
            elif kind is Kind.ALLREDUCE:
                reductions.all_reduce(first, mine[0], transport)
            elif kind is Kind.BARRIER:
                if mine[0] is not None:  # a barrier needs no more than the requests of all ranks
                    mine[0].finish(None)
            elif mine[0] is None:
                raise AssertionError(f"{first.key} was agreed on without this rank")
            else:
                _ONE[kind](first, mine[0], transport)

    @contextlib.contextmanager
    def _shown(self, agreed: tuple[Agreed, ...]) -> Iterator[None]:
        """Record the operations on the timeline, if there is one."""
        if not self._timeline.is_on:
            yield
            return
        for each in agreed:
            self._timeline.begin(each.key.name, each.key.kind.name)
        try:
            yield
        finally:
            for each in agreed:
                self._timeline.end(each.key.name)
