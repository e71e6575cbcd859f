"""From a ring to a transport through shared memory, if its ranks can read each other's. transport_choice.py uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from farandole.collectives.ring import RingTransport
from farandole.collectives.shared_memory import futex
from farandole.collectives.shared_memory.page import PAGE_BYTES, Page
from farandole.collectives.shared_memory.segment import Place, create_segment, open_segment
from farandole.collectives.shared_memory.transport import SharedMemoryTransport

Pages: TypeAlias = list[Page]
"""One of each rank that shares memory, by rank."""


class Places(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells the others: where its control pages are, one for each transport to come; or a problem."""

    places: tuple[Place, ...] = ()
    problem: str = ""


class OwnPages:
    """A rank's control pages for `count` transports, which are not read by the others yet."""

    def __init__(self, rank: int, count: int) -> None:
        self._pages: list[Page] = []
        self._hide: list[Callable[[], object]] = []
        places: list[Place] = []
        problem = "" if futex.is_supported() else f"rank {rank} is not on Linux for x86-64"
        try:
            for _ in range(0 if problem else count):
                segment = create_segment(PAGE_BYTES)
                self._pages.append(Page(segment.memory))
                self._hide.append(segment.hide)
                places.append(segment.place)
        except OSError as error:
            problem = f"rank {rank} has no shared memory: {error}"
        self.places = Places((), problem) if problem else Places(tuple(places))
        """To be told to the others."""

    def open_those_of(self, ring: RingTransport, mates: Sequence[int], said: Sequence[Places]) -> list[Pages] | str:
        """For each transport the control pages of `mates`, the ranks of this rank's host, itself included; or, on all
        ranks of the ring alike, why there are none.

        said  what all ranks of the ring have told
        All ranks of the ring call it at once. Raises PeerLost and GenerationEnded.
        """
        problem, opened = self.places.problem, list[Pages]()
        if all(said[rank].places for rank in mates):
            try:
                opened = [
                    [page if rank == ring.rank else Page(open_segment(said[rank].places[number])) for rank in mates]
                    for number, page in enumerate(self._pages)
                ]
            except OSError as error:
                problem = f"rank {ring.rank} cannot read the memory of another rank: {error}"
        problems = [each.decode() for each in ring.all_gather(problem.encode()) if each]
        for hide in self._hide:
            hide()  # all ranks have opened the pages, or nobody uses them
        return problems[0] if problems else opened


def share_memory(ring: RingTransport, pages: Pages | None = None) -> SharedMemoryTransport | str:
    """The transport, which closes the ring when it is closed; or, on all ranks alike, why there is none.

    pages  if they were shared before
    All ranks of the ring call it at once, before anything else. Raises PeerLost and GenerationEnded.
    """
    shared = pages or share_pages(ring, range(ring.size))
    return shared if isinstance(shared, str) else SharedMemoryTransport(ring, shared)


def share_pages(ring: RingTransport, mates: Sequence[int]) -> Pages | str:
    """The control pages of `mates` for one transport of all ranks of the ring; as OwnPages.open_those_of()."""
    own = OwnPages(ring.rank, 1)
    said = ring.all_gather(msgspec.msgpack.encode(own.places))
    opened = own.open_those_of(ring, mates, [msgspec.msgpack.decode(each, type=Places) for each in said])
    return opened if isinstance(opened, str) else opened[0]
