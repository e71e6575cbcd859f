"""Run c10d's reductions through a transport. c10d_group.py calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from farandole.collectives.reduction import Reduction
from farandole.collectives.transport import Transport
from farandole.process_group.c10d_data_movement import gather_tensors
from farandole.process_group.memory import contiguous, in_place, require_same_size

_BY_TRANSPORT = {
    ReduceOp.SUM: Reduction.SUM,
    ReduceOp.AVG: Reduction.SUM,
    ReduceOp.MIN: Reduction.MIN,
    ReduceOp.MAX: Reduction.MAX,
    ReduceOp.PRODUCT: Reduction.PRODUCT,
}

_BITWISE: dict[ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

# Reductions of truth values, which transports see as bytes of 0 and 1: any of them, or all.
_OF_BOOLS = {
    ReduceOp.SUM: Reduction.MAX,
    ReduceOp.MAX: Reduction.MAX,
    ReduceOp.BOR: Reduction.MAX,
    ReduceOp.MIN: Reduction.MIN,
    ReduceOp.PRODUCT: Reduction.MIN,
    ReduceOp.BAND: Reduction.MIN,
}


def all_reduce(transport: Transport, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Reduce each tensor over all ranks, in place.

    SUM, AVG, MIN, MAX and PRODUCT; BAND, BOR and BXOR of integers and bools. A sum of bools tells whether one is true.
    For complex tensors SUM and AVG. AVG of integers rounds towards zero. Raises ValueError for other operators.
    """
    for tensor in tensors:
        if tensor.is_sparse:
            _reduce_sparse(transport, tensor, op)
        else:
            with in_place(tensor) as dense:
                _reduce(transport, dense, op)


def reduce(transport: Transport, tensors: Sequence[torch.Tensor], op: ReduceOp, root: int) -> None:
    """Reduce as all_reduce() does, at the root; tensors of other ranks are unchanged."""
    if transport.rank == root:
        all_reduce(transport, tensors, op)
    else:
        all_reduce(transport, [tensor.detach().clone() for tensor in tensors], op)


def reduce_scatter(transport: Transport, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Reduce tensor number r of all ranks at rank r. Sizes may differ from one r to the next."""
    if len(inputs) != transport.size:
        raise ValueError(f"reduce_scatter: {len(inputs)} tensors for {transport.size} ranks")
    require_same_size("reduce_scatter", [output], inputs[transport.rank])
    whole = torch.cat([contiguous(each).view(-1) for each in inputs])
    _reduce(transport, whole, op)
    mine = torch.split(whole, [each.numel() for each in inputs])[transport.rank]
    output.detach().copy_(mine.view(output.shape))


def reduce_scatter_single(transport: Transport, output: torch.Tensor, whole: torch.Tensor, op: ReduceOp) -> None:
    """Reduce part number r of all ranks at rank r; parts have the same size."""
    if whole.numel() != output.numel() * transport.size or whole.dtype != output.dtype:
        raise ValueError(
            f"reduce_scatter: an input of shape {tuple(whole.shape)} and dtype {whole.dtype} makes no {transport.size} "
            f"outputs of shape {tuple(output.shape)} and dtype {output.dtype}"
        )
    reduce_scatter(transport, output, contiguous(whole).view(-1).chunk(transport.size) or [whole], op)


def _reduce(transport: Transport, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Reduce a contiguous tensor."""
    kind = _kind(op)
    if tensor.is_complex():
        if kind not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"cannot reduce complex tensors by {_name(op)}; SUM and AVG are possible")
        _reduce(transport, torch.view_as_real(tensor), op)
        return
    if tensor.dtype is torch.bool and kind in _OF_BOOLS:
        transport.all_reduce(tensor.view(torch.uint8), b"", _OF_BOOLS[kind])
        return
    if kind in _BITWISE:
        if tensor.is_floating_point():
            raise ValueError(f"cannot reduce {tensor.dtype} by {_name(op)}: it has no bits to speak of")
        _reduce_bits(transport, tensor, _BITWISE[kind])
        return
    if kind not in _BY_TRANSPORT or tensor.dtype is torch.bool:
        raise ValueError(f'the backend "farandole" cannot reduce {tensor.dtype} by {_name(op)}')
    transport.all_reduce(tensor, b"", _BY_TRANSPORT[kind])
    if kind == ReduceOp.AVG:
        if tensor.is_floating_point():
            tensor.div_(transport.size)
        else:
            torch.div(tensor, transport.size, rounding_mode="trunc", out=tensor)


def _reduce_bits(transport: Transport, tensor: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
    parts = [torch.empty_like(tensor) for _ in range(transport.size)]
    gather_tensors(transport, tensor, parts)
    tensor.copy_(parts[0])
    for part in parts[1:]:
        combine(tensor, part, out=tensor)


def _reduce_sparse(transport: Transport, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Concatenate the indices and values of all ranks, which yields a sum."""
    if _kind(op) not in (ReduceOp.SUM, ReduceOp.AVG) or tensor.device.type != "cpu":
        raise ValueError(f"sparse CPU tensors are reduced by SUM and AVG, got {_name(op)} on {tensor.device}")
    mine = tensor.detach().coalesce()
    counts = [int.from_bytes(each, "big") for each in transport.all_gather(mine._nnz().to_bytes(8, "big"))]
    indices = [mine.indices().new_empty((mine.sparse_dim(), count)) for count in counts]
    values = [mine.values().new_empty((count, *mine.values().shape[1:])) for count in counts]
    gather_tensors(transport, mine.indices().contiguous(), indices)
    gather_tensors(transport, mine.values().contiguous(), values)
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False)
    total = total.coalesce()
    if _kind(op) == ReduceOp.AVG:
        total = total / transport.size
    tensor.copy_(total)  # not of a detached one: that would get the indices, and not `tensor`


def _kind(op: ReduceOp) -> ReduceOp.RedOpType:
    """Return the kind of an operator: c10d passes both ReduceOp.SUM, and a ReduceOp of that kind."""
    either: Any = op
    return getattr(either, "op", either)  # type: ignore[no-any-return]


def _name(op: ReduceOp) -> str:
    return str(getattr(_kind(op), "name", op))
