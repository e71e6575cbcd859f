"""Build a hierarchical transport from a ring of all ranks, if the ranks of each host can read each other's memory.

transport_choice.py uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from farandole.collectives.hierarchical.hierarchical_transport import HierarchicalTransport
from farandole.collectives.hierarchical.layout import Layout
from farandole.collectives.hierarchical.rings import Rings
from farandole.collectives.ring import RingTransport
from farandole.collectives.shared_memory.shared_memory_builder import ControlBlocks, share_control_blocks

Connect = Callable[[Sequence[int], int], RingTransport]
"""connect(ranks, number): connect a ring of some of the ranks, at least two, this one among them; all call it at once.

`number`, from 0, is larger than that of each ring that was connected before.
"""

RINGS = 2
"""The maximum number of rings that a rank connects."""


def share_memory_within_hosts(
    ring: RingTransport, layout: Layout, connect: Connect, control_blocks: ControlBlocks | None = None
) -> HierarchicalTransport | str:
    """Return the transport, which closes the ring when it is closed; or, on all ranks alike, why there is none.

    All ranks of the ring call it at once, before any other operation. Raises PeerLost and GenerationEnded, and the
    errors of `connect`. `control_blocks` are those of the ranks of this host, if they were shared before.
    """
    shared = control_blocks or share_control_blocks(ring, layout.mates)
    if isinstance(shared, str):
        return shared
    rings: list[RingTransport | None] = []
    with ExitStack() as cleanup:
        for number, ranks in enumerate((layout.mates, layout.across)):
            rings.append(connect(ranks, number) if len(ranks) > 1 else None)
            if (connected := rings[-1]) is not None:
                cleanup.callback(connected.close)
        cleanup.pop_all()
    local, across = rings
    return HierarchicalTransport(Rings(ring, local, across, layout.across), layout, shared)
