"""From a ring to a transport through shared memory, if its ranks can read each other's. transport_choice.py uses it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farandole.collectives.ring import RingTransport
from farandole.collectives.shared_memory import futex
from farandole.collectives.shared_memory.page import PAGE_BYTES, Page
from farandole.collectives.shared_memory.segment import Place, create_segment, open_segment
from farandole.collectives.shared_memory.transport import SharedMemoryTransport


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells the others, twice: at first where its control page is, then whether it has all pages."""

    place: Place | None = None
    problem: str = ""


def share_memory(ring: RingTransport) -> SharedMemoryTransport | str:
    """The transport, which closes the ring when it is closed; or, on all ranks alike, why there is none.

    All ranks of the ring call it at once, before anything else. Raises PeerLost and GenerationEnded.
    """
    pages = share_pages(ring, range(ring.size))
    return pages if isinstance(pages, str) else SharedMemoryTransport(ring, pages)


def share_pages(ring: RingTransport, mates: Sequence[int]) -> list[Page] | str:
    """The control pages of `mates`, the ranks of this rank's host, itself included, for a transport of all ranks of the
    ring; or, on all of them alike, why there is none.

    All ranks of the ring call it at once. Raises PeerLost and GenerationEnded.
    """
    mine, page = _own_page(ring.rank)
    said = _exchange(ring, mine)
    problem, pages = mine.problem, []
    if page is not None and all(said[rank].place for rank in mates):
        try:
            pages = [page if rank == ring.rank else _page(said[rank].place) for rank in mates]
        except OSError as error:
            problem = f"rank {ring.rank} cannot read the memory of another rank: {error}"
    problems = [each.problem for each in _exchange(ring, _Said(problem=problem)) if each.problem]
    return problems[0] if problems else pages


def _own_page(rank: int) -> tuple[_Said, Page | None]:
    if not futex.is_supported():
        return _Said(problem=f"rank {rank} is not on Linux for x86-64"), None
    try:
        memory, place = create_segment(PAGE_BYTES)
    except OSError as error:
        return _Said(problem=f"rank {rank} has no shared memory: {error}"), None
    return _Said(place), Page(memory)


def _page(place: Place | None) -> Page:
    assert place is not None
    return Page(open_segment(place))


def _exchange(ring: RingTransport, said: _Said) -> list[_Said]:
    return [msgspec.msgpack.decode(each, type=_Said) for each in ring.all_gather(msgspec.msgpack.encode(said))]
