"""Run c10d's collectives that only move tensors through a transport, as bytes, so that any dtype will do.

c10d_group.py calls them. Every rank sees all bytes that are gathered, scattered or exchanged: a ring passes most of
them through every rank anyway, and memory of one host is read, not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from farandole.collectives.tensor_bytes import byte_view
from farandole.collectives.transport import Transport
from farandole.errors import CollectiveMismatch
from farandole.process_group.memory import as_bytes, contiguous, in_place, require_same_size

# Up to this size every rank's bytes travel in one exchange; beyond, in one broadcast each.
_TOGETHER_BYTES = 64 * 1024


def broadcast(transport: Transport, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Copy the root's tensors into every rank's."""
    for tensor in tensors:
        with in_place(tensor) as dense:
            transport.broadcast(as_bytes(dense), root)


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
    if transport.rank == root:
        all_gather(transport, outputs, mine)
    else:
        all_gather(transport, [torch.empty_like(mine) for _ in range(transport.size)], mine)


def scatter(transport: Transport, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
    """Send the root's tensor number r to rank r; all have the same size. Other ranks pass no inputs."""
    whole = torch.empty(transport.size * output.numel(), dtype=output.dtype)
    if transport.rank == root:
        if len(inputs) != transport.size:
            raise ValueError(f"scatter: {len(inputs)} tensors for {transport.size} ranks")
        require_same_size("scatter", inputs, output)
        torch.cat([contiguous(each).view(-1) for each in inputs], out=whole)
    transport.broadcast(as_bytes(whole), root)
    mine = whole[transport.rank * output.numel() : (transport.rank + 1) * output.numel()]
    output.detach().copy_(mine.view(output.shape))


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
                    f"all_to_all: rank {source} gives {gives[target]} bytes to rank {target}, which takes "
                    f"{takes[source]}"
                )
    mine = torch.cat(sent)
    for source, (gives, _) in enumerate(everybody):
        # One rank's tensors after the other, so that they are never all in memory at once.
        whole = mine if source == transport.rank else torch.empty(sum(gives), dtype=torch.uint8)
        transport.broadcast(whole, source)
        begin = sum(gives[: transport.rank])
        as_bytes(dense[source]).copy_(whole[begin : begin + gives[transport.rank]])
    _write_back(outputs, dense)


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


def gather_tensors(transport: Transport, mine: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
    """Fill the slots of all ranks, contiguous as `mine`; the same sizes on all ranks."""
    parts = [as_bytes(slot) for slot in slots]
    own, longest = as_bytes(mine), max(part.numel() for part in parts)
    if longest * len(parts) > _TOGETHER_BYTES:
        parts[transport.rank].copy_(own)
        for source, part in enumerate(parts):
            transport.broadcast(part, source)
        return
    trailer = bytes(byte_view(own)).ljust(longest, b"\0")
    for part, arrived in zip(parts, transport.all_reduce(torch.empty(0), trailer), strict=True):
        if part.numel():
            byte_view(part)[:] = arrived[: part.numel()]


def _cut(what: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of rows that go to, or come from, each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all: {rows} rows of the {what} are not the same number for each of {size} ranks")
        return [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {what} splits {list(splits)} do not cut {rows} rows for {size} ranks: they are to be {size} "
            f"numbers whose sum is {rows}"
        )
    return list(splits)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Yield the tensor, or a contiguous one that is copied into it afterwards."""
    return (
        tensor.detach() if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )


def _write_back(outputs: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> None:
    for output, each in zip(outputs, dense, strict=True):
        if output.data_ptr() != each.data_ptr():
            output.detach().copy_(each)
