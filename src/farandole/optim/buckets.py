"""Flat buffers into which gradients are copied while they are in the cache, and from which they are reduced; and the
agreement of all ranks on their buckets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from farandole.collectives.device_transport import host_transport
from farandole.collectives.shared_memory.shared_memory_transport import SharedMemoryTransport
from farandole.collectives.shared_memory.tensors import reserve_zeros, shareable_zeros
from farandole.collectives.worker_cores import own_cores
from farandole.collectives.world import World
from farandole.errors import CollectiveMismatch
from farandole.optim.bucket_size import Surroundings, bucket_sizes, cut


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced at once. `flat` is a part of a buffer, `parameters` those whose gradients are in
    it."""

    flat: torch.Tensor
    parameters: tuple[torch.Tensor, ...]


class Buckets:
    """Buffers, one for each dtype, on the parameters' device, with their partition into buckets. Their order is that in
    which gradients arrive: the last parameter's first.

    flats    the buffers
    buckets  at least one; empty if there are no parameters
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._order = list(reversed(parameters))
        self.device = self._order[0].device if self._order else torch.device("cpu")
        self.flats = []
        self._view: dict[int, torch.Tensor] = {}
        for dtype, members in _by_dtype(self._order).items():
            sizes = [member.numel() for member in members]
            flat = shareable_zeros(sum(sizes), dtype, self.device)
            self.flats.append(flat)
            for member, piece in zip(members, torch.split(flat, sizes), strict=True):
                self._view[id(member)] = piece.view_as(member)
        wait_for_device(self.device)  # other streams that write gradients here need not know the current one
        self.cut(0)

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the buffer part for the parameter's gradient; same shape and dtype."""
        return self._view[id(parameter)]

    @property
    def total_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    def cut(self, least_bytes: int) -> None:
        """Make buckets of at least this size; with 0 one for each dtype."""
        sizes = [parameter.numel() * parameter.element_size() for parameter in self._order]
        groups = cut(sizes, [str(parameter.dtype) for parameter in self._order], least_bytes)
        self.buckets = [self._bucket([self._order[place] for place in group]) for group in groups]
        if not self.buckets:
            self.buckets = [Bucket(torch.empty(0), ())]

    def _bucket(self, parameters: list[torch.Tensor]) -> Bucket:
        """Make a bucket of parameters that are adjacent in a buffer: they have one dtype, and follow each other."""
        first = self.view(parameters[0])
        flat = next(each for each in self.flats if each.dtype == first.dtype)
        begin = first.storage_offset() - flat.storage_offset()
        count = sum(parameter.numel() for parameter in parameters)
        return Bucket(flat[begin : begin + count], tuple(parameters))


def reserve(parameters: Iterable[torch.Tensor]) -> None:
    """Allocate the memory that Buckets of these parameters will need, if they are on the CPU. A newcomer does so, so
    that no worker waits for it in its first step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.device.type == "cpu"]
    for dtype, members in _by_dtype(trained).items():
        reserve_zeros(sum(member.numel() for member in members), dtype)


def _by_dtype(parameters: Iterable[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return found


# The order of a device's operations in several streams ----------------------------------------------------------------
#
# Gradients are written in the streams of backward(), and a thread reduces them in another stream. On the CPU there is
# nothing to do.

T = TypeVar("T")


def wait_for_device(device: torch.device) -> None:
    """Wait until the operations queued in the current stream have completed."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Arrivals:
    """The streams that have written to a bucket. The writing thread calls record()."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_needed = device, device.type == "cuda"
        self._streams: set[Any] = set()

    def record(self) -> None:
        """Note that the current stream has just received a write."""
        if self._is_needed:
            self._streams.add(torch.cuda.current_stream(self._device))

    def before(self, task: Callable[[], T]) -> Callable[[], T]:
        """Return the task for another thread, ordered after all recorded writes. It is not ordered after later
        operations of these streams, so that backward() continues meanwhile."""
        if not self._is_needed:
            return task
        events = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        return partial(self._run, events, task)

    def _run(self, events: list[Any], task: Callable[[], T]) -> T:
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for event in events:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            return task()


# The agreement before the first reduction of a generation: the same gradients, in the same buckets --------------------

# Digest, bytes, whether tensors go by the network, whether there is a core to spare; the requested bytes of a bucket,
# and the bytes that were fastest in an earlier generation, each -1 if there are none.
_PROPOSAL = struct.Struct("<6q")


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
    proposal = _PROPOSAL.pack(digest, total_bytes, is_by_network, around.has_core_to_spare, asked, tried)
    proposals = [_PROPOSAL.unpack(each) for each in here.transport.all_gather(proposal)]
    if any(each[0] != digest for each in proposals):
        texts = here.transport.all_gather("\n".join(described).encode())
        raise CollectiveMismatch(difference_of_models([text.decode().split("\n") for text in texts]))
    pinned = None if proposals[0][4] < 0 else proposals[0][4]
    sizes = bucket_sizes(
        total_bytes, len(proposals), any(each[2] for each in proposals), all(each[3] for each in proposals), pinned
    )
    tried_by_some = [each[5] for each in proposals if each[5] >= 0]
    return tried_by_some[:1] if tried_by_some and len(sizes) > 1 else sizes


def difference_of_models(by_rank: Sequence[Sequence[str]]) -> str:
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
        f"Every worker must build the same model, and pass its parameters in the same order; nothing was applied"
    )


def _at(described: Sequence[str], place: int) -> str:
    return described[place] if place < len(described) and described[place] else "nothing"


def _kind(text: str) -> str:
    """Return the text without the name."""
    return text.partition(" ")[2] or text


def _on(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
