"""The collectives of torch.distributed, built on the transports of Farandole: data movement, reductions, memory of
tensors.

Tensors on devices are copied to the memory of the host and back. All-reduces and broadcasts leave that to the transport
where it takes such tensors, since it may have NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.distributed import ReduceOp

from farandole.errors import CollectiveMismatch
from farandole.training.collectives.connection_pair import DTYPES, as_bytes, byte_view
from farandole.training.collectives.device_transport import DeviceTransport, StagedTransport, is_in_host_memory
from farandole.training.collectives.p2p_transport import P2PTransport
from farandole.training.collectives.shared_memory_group import Wanted
from farandole.training.collectives.shared_memory_transport import SharedMemoryTransport
from farandole.training.collectives.subgroup_transport import SubgroupTransport
from farandole.training.collectives.transport import NOTHING, Reduction, Transport
from farandole.training.collectives.transport_choice import host_transport

# Up to this size every rank's bytes travel in one exchange; beyond, in one broadcast each.
_TOGETHER_BYTES = 64 * 1024


def broadcast(transport: Transport, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Copy the root's tensors into every rank's."""
    for tensor in tensors:
        with in_place(tensor, transport) as dense:
            # A dtype that transports do not know travels as bytes; on a device that would be one more view.
            is_known = dense.dtype in DTYPES and not is_in_host_memory(dense)
            transport.broadcast(dense if is_known else as_bytes(dense), root)


def all_gather(transport: Transport, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
    """Gather every rank's tensor, by rank; outputs may differ in shape, alike on all ranks."""
    if len(outputs) != transport.size:
        raise ValueError(f"all_gather: {len(outputs)} tensors to write into, for {transport.size} ranks")
    require_same_size("all_gather", [outputs[transport.rank]], mine)
    dense = [_writable(output) for output in outputs]
    gather_tensors(transport, contiguous(mine), dense)
    _write_back(outputs, dense)


def all_gather_single(transport: Transport, output: torch.Tensor, mine: torch.Tensor) -> None:
    """Gather every rank's tensor into one output, one after the other."""
    if output.numel() != mine.numel() * transport.size or output.dtype != mine.dtype:
        raise ValueError(
            f"all_gather: {transport.size} tensors of shape {tuple(mine.shape)} and dtype {mine.dtype} do not make an "
            f"output of shape {tuple(output.shape)} and dtype {output.dtype}"
        )
    with in_place(output) as dense:
        slots = (
            torch.split(dense.view(-1), [mine.numel()] * transport.size) if mine.numel() else [dense] * transport.size
        )
        gather_tensors(transport, contiguous(mine), slots)


def gather(transport: Transport, outputs: Sequence[torch.Tensor], mine: torch.Tensor, root: int) -> None:
    """Gather every rank's tensor, by rank, at the root; other ranks pass no outputs."""
    size, is_root, shared = transport.size, transport.rank == root, _sharing_memory(transport)
    if shared is None and not isinstance(transport, P2PTransport):
        all_gather(transport, outputs if is_root else [torch.empty_like(mine) for _ in range(size)], mine)
        return
    dense: list[torch.Tensor] = []
    if is_root:
        if len(outputs) != size:
            raise ValueError(f"gather: {len(outputs)} tensors to write into, for {size} ranks")
        require_same_size("gather", outputs, mine)
        dense = [_writable(output) for output in outputs]
    own, parts = as_bytes(contiguous(mine)), [as_bytes(each) for each in dense] or [NOTHING] * size
    if shared is not None:
        shared.exchange(own, [Wanted(0, part) for part in parts])
    elif isinstance(transport, P2PTransport):
        transport.deliver([own if place == root else NOTHING for place in range(size)], parts)
    _write_back(outputs, dense)


def scatter(transport: Transport, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
    """Send the root's tensor number r to rank r; all have the same size. Other ranks pass no inputs."""
    size, is_root, shared = transport.size, transport.rank == root, _sharing_memory(transport)
    if is_root:
        if len(inputs) != size:
            raise ValueError(f"scatter: {len(inputs)} tensors for {size} ranks")
        require_same_size("scatter", inputs, output)
    given = [as_bytes(contiguous(each)) for each in inputs] if is_root else [NOTHING] * size
    with in_place(output) as dense:
        part = as_bytes(dense)
        nbytes = part.numel()
        parts = [part if place == root else NOTHING for place in range(size)]
        if shared is not None:
            begin = transport.rank * nbytes
            shared.exchange(torch.cat(given), [Wanted(begin if each is part else 0, each) for each in parts])
        elif isinstance(transport, P2PTransport):
            transport.deliver(given, parts)
        else:
            whole = torch.cat(given) if is_root else torch.empty(size * nbytes, dtype=torch.uint8, device="cpu")
            transport.broadcast(whole, root)
            part.copy_(whole[transport.rank * nbytes :][:nbytes])


def all_to_all(transport: Transport, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Send tensor number r of each rank to rank r; outputs are ordered by the sender.

    Raises CollectiveMismatch, on all ranks, where the size of an output differs from that of its tensor.
    """
    if len(outputs) != transport.size or len(inputs) != transport.size:
        raise ValueError(f"all_to_all: {len(inputs)} tensors into {len(outputs)}, for {transport.size} ranks")
    sent = [as_bytes(contiguous(each)) for each in inputs]
    dense = [_writable(each) for each in outputs]
    here = [each.numel() for each in sent], [as_bytes(each).numel() for each in dense]
    everybody = [
        msgspec.msgpack.decode(each, type=tuple[list[int], list[int]])
        for each in transport.all_gather(msgspec.msgpack.encode(here))
    ]
    for source, (gives, _) in enumerate(everybody):
        for target, (_, takes) in enumerate(everybody):
            if gives[target] != takes[source]:
                raise CollectiveMismatch(
                    f"all_to_all: rank {source} sends {gives[target]} bytes to rank {target}, which expects "
                    f"{takes[source]}"
                )
    parts, shared = [as_bytes(each) for each in dense], _sharing_memory(transport)
    if shared is not None:
        begins = [sum(gives[: transport.rank]) for gives, _ in everybody]
        shared.exchange(torch.cat(sent), [Wanted(*each) for each in zip(begins, parts, strict=True)])
    elif isinstance(transport, P2PTransport):
        transport.deliver(sent, parts)
    else:
        _broadcast_all(transport, torch.cat(sent), [gives for gives, _ in everybody], parts)
    _write_back(outputs, dense)


def _broadcast_all(
    transport: Transport, mine: torch.Tensor, sizes: Sequence[Sequence[int]], parts: Sequence[torch.Tensor]
) -> None:
    """Broadcast the bytes of each rank, of which this rank keeps its part. `sizes`: by rank, those of its parts."""
    for source, gives in enumerate(sizes):
        # One rank's tensors after the other, so that they are never all in memory at once.
        whole = mine if source == transport.rank else torch.empty(sum(gives), dtype=torch.uint8, device="cpu")
        transport.broadcast(whole, source)
        parts[source].copy_(whole[sum(gives[: transport.rank]) :][: gives[transport.rank]])


def all_to_all_single(
    transport: Transport,
    output: torch.Tensor,
    whole: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> None:
    """Run all_to_all() on one tensor split along its first dimension; without splits into equal parts."""
    taken = _cut("output", output, output_splits, transport.size)
    with in_place(output) as dense:
        all_to_all(
            transport,
            torch.split(dense, taken),
            torch.split(contiguous(whole), _cut("input", whole, input_splits, transport.size)),
        )


def _sharing_memory(transport: Transport) -> SharedMemoryTransport | SubgroupTransport | None:
    """Return the transport if all its ranks share memory: then each reads only what it needs of the others' tensors.

    Other ranks send each other messages in a subgroup; else tensors are broadcast, and each drops what it does not
    need.
    """
    host = host_transport(transport)
    return host if isinstance(host, SharedMemoryTransport | SubgroupTransport) else None


def gather_tensors(transport: Transport, mine: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
    """Fill the slots of all ranks, contiguous as `mine`; the same sizes on all ranks."""
    parts = [as_bytes(slot) for slot in slots]
    own, longest = as_bytes(mine), max(part.numel() for part in parts)
    if longest * len(parts) > _TOGETHER_BYTES:
        shared = _sharing_memory(transport)
        if shared is not None:
            shared.exchange(own, [Wanted(0, part) for part in parts])
            return
        parts[transport.rank].copy_(own)
        for source, part in enumerate(parts):
            transport.broadcast(part, source)
        return
    trailer = bytes(byte_view(own)).ljust(longest, b"\0")
    for part, arrived in zip(parts, transport.all_reduce(NOTHING, trailer), strict=True):
        if part.numel():
            byte_view(part)[:] = arrived[: part.numel()]


def _cut(what: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of rows that go to, or come from, each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all: {rows} rows of the {what} cannot be divided equally among {size} ranks")
        return [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {what} splits {list(splits)} do not divide {rows} rows among {size} ranks: give {size} "
            f"numbers whose sum is {rows}"
        )
    return list(splits)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous one in the memory of the host for _write_back()."""
    require_dense(tensor)
    is_usable = is_in_host_memory(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor.detach() if is_usable else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _write_back(outputs: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> None:
    for output, each in zip(outputs, dense, strict=True):
        if not _is_same_memory(output, each):
            output.detach().copy_(each)


# Reductions -----------------------------------------------------------------------------------------------------------

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
            with in_place(tensor, transport) as dense:
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
            raise ValueError(f"cannot reduce complex tensors by {_name(op)}; use SUM or AVG")
        _reduce(transport, torch.view_as_real(tensor), op)
        return
    if tensor.dtype is torch.bool and kind in _OF_BOOLS:
        transport.all_reduce(tensor.view(torch.uint8), b"", _OF_BOOLS[kind])
        return
    if kind in _BITWISE:
        if tensor.is_floating_point():
            raise ValueError(
                f"cannot reduce {tensor.dtype} by {_name(op)}: bitwise operations need an integer or bool dtype"
            )
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
    with in_place(tensor) as dense:
        parts = [torch.empty_like(dense) for _ in range(transport.size)]
        gather_tensors(transport, dense, parts)
        dense.copy_(parts[0])
        for part in parts[1:]:
            combine(dense, part, out=dense)


def _reduce_sparse(transport: Transport, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Concatenate the indices and values of all ranks, which yields a sum."""
    if _kind(op) not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"sparse tensors are reduced by SUM and AVG, got {_name(op)}")
    mine = tensor.detach().cpu().coalesce()
    counts = [int.from_bytes(each, "big") for each in transport.all_gather(mine._nnz().to_bytes(8, "big"))]
    indices = [mine.indices().new_empty((mine.sparse_dim(), count)) for count in counts]
    values = [mine.values().new_empty((count, *mine.values().shape[1:])) for count in counts]
    gather_tensors(transport, mine.indices().contiguous(), indices)
    gather_tensors(transport, mine.values().contiguous(), values)
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False)
    total = total.coalesce()
    if _kind(op) == ReduceOp.AVG:
        total = total / transport.size
    tensor.copy_(total.to(tensor.device))  # not of a detached one: that would get the indices, and not `tensor`


def _kind(op: ReduceOp) -> ReduceOp.RedOpType:
    """Return the kind of an operator: c10d passes both ReduceOp.SUM, and a ReduceOp of that kind."""
    either: Any = op
    return getattr(either, "op", either)  # type: ignore[no-any-return]


def _name(op: ReduceOp) -> str:
    return str(getattr(_kind(op), "name", op))


# The memory of tensors, as transports need it: contiguous, whatever the dtype -----------------------------------------


@contextmanager
def in_place(tensor: torch.Tensor, transport: Transport | None = None) -> Iterator[torch.Tensor]:
    """Yield a contiguous tensor of the same values, outside autograd; data written into it is in `tensor` afterwards.

    It is in the memory of the host, unless `transport` is given and takes tensors on devices. Raises ValueError as
    require_dense() does.
    """
    require_dense(tensor)
    detached = tensor.detach()
    stays = isinstance(transport, DeviceTransport | StagedTransport)
    dense = _plain(detached if stays else detached.cpu())
    yield dense
    if not _is_same_memory(detached, dense):
        detached.copy_(dense)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it in the memory of the host, outside autograd, for reading."""
    require_dense(tensor)
    return _plain(tensor.detach().cpu())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().resolve_conj().resolve_neg()


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr()


def require_dense(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor without dense memory."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise ValueError(
            f'the backend "farandole" moves dense tensors, got one of layout {tensor.layout} on {tensor.device}; '
            f"use tensor.to_dense()"
        )


def require_same_size(op: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    """Raise ValueError unless all have as many elements, of the same dtype."""
    for place, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{op}: tensor {place} of the list has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected "
                f"{tuple(like.shape)} and {like.dtype}"
            )
