"""The agreement before the first reduction of a generation: all ranks reduce the same gradients, in the same
buckets."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from farandole.collectives.shared_memory.shared_memory_transport import SharedMemoryTransport
from farandole.collectives.staging import host_transport
from farandole.collectives.worker_cores import own_cores
from farandole.collectives.world import World
from farandole.errors import CollectiveMismatch
from farandole.optim.bucket_size import Surroundings, bucket_sizes

# Digest, bytes, whether tensors go by the network, whether there is a core to spare; the requested bytes of a bucket,
# and the bytes that were fastest in an earlier generation, each -1 if there are none.
_WORD = struct.Struct("<6q")


def agree_on_buckets(
    here: World,
    digest: int,
    described: Sequence[str],
    total_bytes: int,
    pinned_bytes: int | None,
    is_on_device: bool = False,
    tried_bytes: int | None = None,
) -> list[int]:
    """Return the candidates for the least bytes of a bucket, equal on all ranks, which all call it. Rank 0's request
    comes first, then the result of an earlier autotune.

    is_on_device  gradients and computations are on a device
    tried_bytes   the fastest size on this rank, over any connections; None: unknown

    Raises CollectiveMismatch, alike on every rank, naming the first parameter that differs, unless all have the same
    digest. Raises the errors of transports, too.
    """
    around = Surroundings(
        cores=own_cores(),
        local_size=here.placement.local_size,
        threads=torch.get_num_threads(),
        is_by_network=not isinstance(host_transport(here.transport), SharedMemoryTransport),
        is_on_device=is_on_device,
    )
    is_by_network = around.is_by_network or is_on_device
    asked, tried = (-1 if each is None else each for each in (pinned_bytes, tried_bytes))
    word = _WORD.pack(digest, total_bytes, is_by_network, around.has_core_to_spare, asked, tried)
    said = [_WORD.unpack(each) for each in here.transport.all_gather(word)]
    if any(each[0] != digest for each in said):
        texts = here.transport.all_gather("\n".join(described).encode())
        raise CollectiveMismatch(difference([text.decode().split("\n") for text in texts]))
    pinned = None if said[0][4] < 0 else said[0][4]
    sizes = bucket_sizes(total_bytes, len(said), any(each[2] for each in said), all(each[3] for each in said), pinned)
    tried_by_some = [each[5] for each in said if each[5] >= 0]
    return tried_by_some[:1] if tried_by_some and len(sizes) > 1 else sizes


def difference(by_rank: Sequence[Sequence[str]]) -> str:
    """Return a text about the first difference between models, and the ranks. `by_rank`: for each rank, the result of
    describe() for its parameters."""
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
    """Return the text without the name."""
    return text.partition(" ")[2] or text


def _on(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
