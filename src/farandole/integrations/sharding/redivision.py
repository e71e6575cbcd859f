"""How workers get the parts that they have after a change of the membership: from the owners of the former parts, and
from their mirrors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from farandole.integrations.sharding.division import Held, Plan, pieces, rows_of, source_for
from farandole.integrations.sharding.parts import Part, fill, joined, room_for
from farandole.integrations.torchrun.process_group import c10d_collectives
from farandole.training.collectives.transport import NOTHING, Transport
from farandole.training.state import packing
from farandole.training.state.sync import receive


class Former(NamedTuple):
    """What this worker holds of the division of a plan; without parts where it holds nothing."""

    own: Sequence[Part] = ()
    mirrored: Sequence[Part] = ()


def redivided(
    row_counts: Sequence[int], former: Former, plan: Plan, held: Sequence[Sequence[Held]], transport: Transport
) -> list[Part]:
    """Return this worker's parts of parameters with so many rows, in new memory. All workers call it. `held`: by rank.
    Raises the errors of transports."""
    outline = _outline(former, plan, transport)
    size, rank = transport.size, transport.rank
    new = [part.with_room(len(rows_of(rows, size, rank))) for part, rows in zip(outline, row_counts, strict=True)]
    given: list[list[torch.Tensor]] = [[] for _ in range(size)]
    taken: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for number, rows in enumerate(row_counts):
        for target in range(size):
            wanted = rows_of(rows, size, target)
            for shard, begin, end in pieces(rows, plan.size, wanted):
                source = source_for(target, shard, plan, held)
                if source.rank == rank:
                    first = rows_of(rows, plan.size, shard).start
                    live = (former.mirrored if source.is_mirror else former.own)[number].rows
                    given[target] += [live[key][begin - first : end - first] for key in outline[number].rows]
                if target == rank:
                    own = new[number].rows
                    taken[source.rank] += [each[begin - wanted.start : end - wanted.start] for each in own.values()]
    outputs = [room_for(each) for each in taken]
    c10d_collectives.all_to_all(transport, outputs, [joined(each) for each in given])
    for tensors, output in zip(taken, outputs, strict=True):
        fill(tensors, output)
    return new


def _outline(former: Former, plan: Plan, transport: Transport) -> Sequence[Part]:
    """Return parts without rows, as those of a worker that has a shard: what is in the state of the optimizer."""
    source = plan.sources[0]
    parts = former.mirrored if source.is_mirror else former.own
    empty = [Part({key: each[:0].clone() for key, each in part.rows.items()}, part.shared) for part in parts]
    mine = packing.pack([tuple(each) for each in empty] if transport.rank == source.rank else [])
    sizes = msgspec.msgpack.encode((len(mine.skeleton), packing.total_bytes(mine.tensors)))
    of_source = msgspec.msgpack.decode(transport.all_gather(sizes)[source.rank], type=tuple[int, int])
    received = receive(transport, source.rank, mine, of_source, needed=True)
    return empty if received is None else [Part(*each) for each in received]


def to_mirror(given: torch.Tensor, room: torch.Tensor, mirrored_by: Sequence[int], transport: Transport) -> None:
    """Send bytes to the worker that mirrors this one, and receive those of the one that is mirrored here."""
    size, rank = transport.size, transport.rank
    inputs, outputs = [NOTHING] * size, [NOTHING] * size
    inputs[mirrored_by[rank]], outputs[mirrored_by.index(rank)] = given, room
    c10d_collectives.all_to_all(transport, outputs, inputs)
