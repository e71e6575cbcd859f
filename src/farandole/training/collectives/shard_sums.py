"""Add up shards as their tree requires (shard_tree.py): transports that can, the additions, the ring's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from farandole.errors import ConfigError
from farandole.training.collectives.connection_pair import Schedule, byte_view
from farandole.training.collectives.ring_schedules import Chunks, Turn
from farandole.training.collectives.shard_tree import Division, Forest, Merge, merge
from farandole.training.collectives.transport import Transport


class ShardTransport(Protocol):
    """A Transport (transport.py) that adds up shards."""

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        """Add up the shards of all ranks: the same bits for every division of the shards.

        Args:
            rows: The nodes of this rank's forest, in order: contiguous CPU tensors of one length and dtype, at least
                one. The first one receives the sum; the others are undefined afterwards.
            division: The shards of each rank, equal on all ranks.
            trailer: As in all_reduce().
            factor: The sum is multiplied by it, equal on all ranks.

        Returns:
            The trailers of all ranks, by rank.
        """
        ...


def with_shards(transport: Transport) -> ShardTransport:
    """Return the transport that adds up shards in the host's memory. Raises ConfigError where there is none."""
    below: Any = transport
    while not hasattr(below, "all_reduce_shards"):  # isinstance() of a Protocol takes 20 us in Python 3.11
        below = getattr(below, "below", None)
        if below is None:
            raise ConfigError(
                f"strict mode adds up gradients in an order of its own, {type(transport).__name__} in another one: "
                f"leave --transport out, or use shm, tcp or hierarchical"
            )
    found: ShardTransport = below
    return found


class Scratch:
    """Memory for sums that are no operand's, of up to `numel` elements each; kept from one use to the next."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._numel, self._dtype = numel, dtype
        self._places: list[torch.Tensor] = []

    def place(self, number: int, numel: int) -> torch.Tensor:
        """Return uninitialized memory, which is that of an earlier call with this number."""
        while len(self._places) <= number:
            self._places.append(torch.empty(self._numel, dtype=self._dtype, device="cpu"))
        return self._places[number][:numel]


def add_nodes(
    plan: Merge,
    operands: Sequence[torch.Tensor],
    are_own: Sequence[bool],
    scratch: Scratch | None = None,
    result: torch.Tensor | None = None,
    factor: float = 1.0,
) -> list[torch.Tensor]:
    """Carry out the additions of `plan`. Return the sums of its forest.

    Args:
        plan: The plan of the operands' nodes.
        operands: Tensors of equal length, in the order of the plan's nodes.
        are_own: Whether an operand may be overwritten.
        scratch: Memory for sums of two operands that may not.
        result: Receives the sum, where the plan leaves only one node.
        factor: The result is multiplied by it.
    """
    sums, are_free, used = list(operands), list(are_own), 0
    last = len(plan.additions) - 1
    for number, (left, right) in enumerate(plan.additions):
        if number == last and result is not None:
            out = result
        elif are_free[left]:
            out = sums[left]
        elif are_free[right]:
            out = sums[right]
        else:
            assert scratch is not None, "one of the operands is this rank's"
            out, used = scratch.place(used, len(operands[0])), used + 1
        torch.add(sums[left], sums[right], out=out)
        sums.append(out)
        are_free.append(True)
    found = [sums[number] for number in plan.sums]
    if result is not None and found[0] is not result:
        result.copy_(found[0])
    if result is not None and factor != 1.0:
        result.mul_(factor)  # while it is in the cache
    return found


def add_packed(
    result: torch.Tensor,
    packed: Sequence[torch.Tensor],
    forests: Sequence[Forest],
    shards: int,
    factor: float = 1.0,
    may_overwrite: bool = False,
) -> list[torch.Tensor]:
    """Add up the nodes at the front of the bytes of all ranks, as every rank does. Return the sums, in memory of this
    rank: the first one in `result`, times `factor`."""
    numel, nbytes = result.numel(), result.nbytes
    operands = [
        each[place * nbytes : (place + 1) * nbytes].view(result.dtype)
        for each, forest in zip(packed, forests, strict=True)
        for place in range(len(forest))
    ]
    if not operands:
        return [result]
    scratch = None if may_overwrite else Scratch(numel, result.dtype)
    plan = merge(tuple(forests), shards)
    first, *others = add_nodes(plan, operands, [may_overwrite] * len(operands), scratch)
    result.copy_(first)
    if factor != 1.0:
        result.mul_(factor)
    return [result, *(each.clone() for each in others)]


def add_around(
    turn: Turn,
    rows: Sequence[torch.Tensor],
    trailers: list[bytearray],
    forests: Sequence[Forest],
    shards: int,
    factor: float,
) -> Schedule:
    """Add up the nodes of all ranks into `rows[0]`, times `factor`: reduce_around() with the additions of the tree.

    What travels from rank to rank is the forest of the ranks before, as far as its nodes could be added: one tensor or
    a few. The rank that gets the last nodes has the sum, and the sums go around once more.

    Args:
        rows: The nodes of this rank's forest, in order; at least one row, for the result.
        forests: Those of all ranks, by rank.
    """
    size, mine, result, outgoing = len(trailers), forests[turn.rank], rows[0], turn.outgoing
    chunks = Chunks(result, size)
    staging = Scratch(min(chunks.block, result.numel()), result.dtype)
    outgoing.append(memoryview(turn.packed + trailers[turn.rank]))
    for start, stop in chunks.runs(turn.rank):
        outgoing.extend(byte_view(row[start:stop]) for row in rows[: len(mine)])
    yield from turn.agree()
    for step in range(size - 1):
        owner = (turn.rank - step - 1) % size
        trailer = memoryview(trailers[owner])
        yield trailer
        if step < size - 2:
            outgoing.append(trailer)
        before = merge(tuple(forests[(owner + place) % size] for place in range(step + 1)), shards).forest
        plan = merge((before, mine), shards)
        passed = set(plan.sums)  # nodes that only travel on need memory until they are sent
        begin, end = chunks.bounds[owner]
        travelling = [
            torch.empty(end - begin, dtype=result.dtype, device="cpu") if node in passed else None
            for node in range(len(before))
        ]
        for start, stop in chunks.runs(owner):
            arrived = []
            for node, whole in enumerate(travelling):
                block = staging.place(node, stop - start) if whole is None else whole[start - begin : stop - begin]
                yield byte_view(block)
                arrived.append(block)
            own = [row[start:stop] for row in rows[: len(mine)]]
            are_own = [False] * len(arrived) + [True] * len(own)
            if step < size - 2:
                outgoing.extend(map(byte_view, add_nodes(plan, [*arrived, *own], are_own)))
            else:
                add_nodes(plan, [*arrived, *own], are_own, result=result[start:stop], factor=factor)
                outgoing.append(chunks.part(start, stop))
    yield from chunks.pass_on(turn)
