"""Submit many allreduces at once, so that the other ranks learn of all in one round. DistributedOptimizer uses it.

Unlike in a group they need not be the same on all ranks: each is executed when all ranks have submitted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farandole.collectives.named.building import Call, check_reduction, check_same_device, check_tensor
from farandole.collectives.named.handles import Handle
from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import Kind
from farandole.collectives.named.process_sets import ProcessSet, engine, global_process_set
from farandole.collectives.transport import Reduction


@dataclass(frozen=True)
class Reduced:
    """Tensors to be reduced in place under one name.

    With `is_group` as by grouped_allreduce_async_(); else there is one tensor, as by allreduce_async_().
    """

    name: str
    tensors: Sequence[torch.Tensor]
    is_group: bool = False


def allreduce_together_(
    all_reduced: Sequence[Reduced],
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Return one handle for all: it is done when all have ended, and raises the first error of any.

    All are submitted or none; raises the errors of allreduce_async_().
    """
    operations: list[Operation] = []
    for each in all_reduced:
        call = Call(Kind.ALLREDUCE, each.name, process_set, each.tensors if each.is_group else None)
        check_same_device(call, each.tensors)
        for tensor in each.tensors:
            check_tensor(call, tensor)
            check_reduction(call, tensor, Reduction(op), (prescale_factor, postscale_factor))
            call.add(tensor, in_place=True, op=Reduction(op), prescale=prescale_factor, postscale=postscale_factor)
        operations += call.operations
    handle = Handle(len(operations), is_group=True)
    for part, operation in enumerate(operations):
        operation.handle, operation.part = handle, part  # the waiting thread is woken once, not for each
    if operations:
        engine().submit(operations)
    return handle
