"""From a ring to a transport through shared memory, if all its ranks can read each other's. worker/ uses it."""

from __future__ import annotations

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
    mine, page = _own_page(ring.rank)
    said = _exchange(ring, mine)
    problem, pages = mine.problem, []
    if page is not None and all(each.place for each in said):
        try:
            pages = [_page(each.place) if rank != ring.rank else page for rank, each in enumerate(said) if each.place]
        except OSError as error:
            problem = f"rank {ring.rank} cannot read the memory of another rank: {error}"
    problems = [each.problem for each in _exchange(ring, _Said(problem=problem)) if each.problem]
    return problems[0] if problems else SharedMemoryTransport(ring, pages)


def _own_page(rank: int) -> tuple[_Said, Page | None]:
    if not futex.is_supported():
        return _Said(problem=f"rank {rank} is not on Linux for x86-64"), None
    try:
        memory, place = create_segment(PAGE_BYTES)
    except OSError as error:
        return _Said(problem=f"rank {rank} has no shared memory: {error}"), None
    return _Said(place), Page(memory)


def _page(place: Place) -> Page:
    return Page(open_segment(place))


def _exchange(ring: RingTransport, said: _Said) -> list[_Said]:
    return [msgspec.msgpack.decode(each, type=_Said) for each in ring.all_gather(msgspec.msgpack.encode(said))]
