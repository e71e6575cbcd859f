"""Before the first reduction of a generation: whether all ranks reduce the same gradients, and in how many buckets."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import torch

from farandole.collectives.shared_memory.transport import SharedMemoryTransport
from farandole.collectives.staging import host_transport
from farandole.collectives.world import World
from farandole.errors import CollectiveMismatch
from farandole.optim.bucket_size import Surroundings, bucket_bytes

_WORD = struct.Struct("<4q")  # digest, bytes, whether there is a core to spare, bytes that were asked for or -1


def agree_on_buckets(
    here: World,
    digest: int,
    described: Sequence[str],
    total_bytes: int,
    pinned_bytes: int | None,
    is_on_device: bool = False,
) -> int:
    """The least bytes of a bucket, the same on all ranks: they all call it. What rank 0 was asked for counts.
    `is_on_device`: gradients are, and so is what computes them.

    Raises CollectiveMismatch, alike on every rank, naming the first parameter that differs, unless all have the same
    digest; and what transports raise.
    """
    around = Surroundings(
        cores=_cores(),
        local_size=here.placement.local_size,
        threads=torch.get_num_threads(),
        is_by_network=not isinstance(host_transport(here.transport), SharedMemoryTransport),
        is_on_device=is_on_device,
    )
    word = _WORD.pack(digest, total_bytes, around.has_core_to_spare, -1 if pinned_bytes is None else pinned_bytes)
    said = [_WORD.unpack(each) for each in here.transport.all_gather(word)]
    if any(each[0] != digest for each in said):
        texts = here.transport.all_gather("\n".join(described).encode())
        raise CollectiveMismatch(difference([text.decode().split("\n") for text in texts]))
    pinned = said[0][3]
    return bucket_bytes(total_bytes, len(said), all(each[2] for each in said), None if pinned < 0 else pinned)


def difference(by_rank: Sequence[Sequence[str]]) -> str:
    """Where models differ first, and on which ranks. `by_rank`: of each rank, its parameters as describe() says."""
    places = range(max(map(len, by_rank)))
    place = next((place for place in places if len({_kind(_at(each, place)) for each in by_rank}) > 1), 0)
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(by_rank):
        ranks.setdefault(_at(each, place), []).append(rank)
    found = "; ".join(f"{text} on {_on(numbers)}" for text, numbers in ranks.items())
    return (
        f"workers have different models. The first parameter of the optimizer that differs is number {place}: {found}. "
        f"Every worker must build the same model, and give its parameters in the same order; nothing was applied"
    )


def _at(described: Sequence[str], place: int) -> str:
    return described[place] if place < len(described) and described[place] else "nothing"


def _kind(text: str) -> str:
    """Without the name."""
    return text.partition(" ")[2] or text


def _on(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
