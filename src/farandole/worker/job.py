"""A worker in a job with a coordinator: its link, and the transports of its generations.

Two threads meet here. The main thread builds transports and runs collectives; the link's thread aborts them.
"""

from __future__ import annotations

import threading
from typing import Protocol

from farandole.collectives import world
from farandole.collectives.listener import DataListener
from farandole.collectives.ring_builder import RingBuilder
from farandole.collectives.transport import Transport
from farandole.env import WorkerEnv
from farandole.errors import GenerationEnded
from farandole.messages import LinkBroken, Start
from farandole.worker.link import Link

# From START, when everybody is quiescent, until the data connections stand. A peer that died meanwhile is
# reported by its agent much sooner; this bounds what nobody reports.
CONNECT_TIMEOUT_S = 5.0


class _Abortable(Protocol):
    def abort(self, reason: str) -> None: ...


class Job:
    """From init() to shutdown() under `farandole run`."""

    def __init__(self, env: WorkerEnv) -> None:
        self._worker = env.worker
        self._listener = DataListener()
        self._lock = threading.Lock()
        self._live: dict[int, list[_Abortable]] = {}  # by number of the generation
        self._retired: list[Transport] = []
        self._agreed = 0
        self._neighbour = ""  # the worker of the next rank
        self.has_finished = False  # an elastic function has returned on all workers
        self.link = Link(env, self._abort_below)
        self.link.open(env, self._listener.address)

    def meet(self) -> bool:
        """Wait for the first generation and enter it; False for a newcomer, which is admitted later."""
        start = self.link.wait_for_admission()
        if start is None:
            return False
        self.build(start)
        return True

    def build(self, start: Start) -> Transport:
        """Open the data connections of a generation and enter its world.

        Raises PeerLost or GenerationEnded; the next order from the coordinator then says how to go on.
        """
        number = start.id.number

        def report(peer: str, direction: str, detail: str) -> None:
            self.link.send(LinkBroken(number, peer, direction, detail))

        builder = RingBuilder(self._listener, start, self._worker, CONNECT_TIMEOUT_S, report, self.link.raise_if_over)
        self._watch(number, builder)
        transport = builder.build()
        self._watch(number, transport)
        if world.is_entered():
            self._retired.append(world.current().transport)
        self._neighbour = start.next.worker
        world.enter(world.World(start.id, start.placement, transport))
        self._agreed = 0
        return transport

    def quiesce(self) -> None:
        """End what still runs in the background of the old generation: no collective touches a tensor afterwards."""

    def settle(self) -> None:
        """The new generation works: release what is left of the old ones. Not earlier: a peer may still read."""
        number = world.current().id.number
        with self._lock:
            self._live = {number: self._live[number]}
        self._close_retired()

    def close(self) -> None:
        self.link.close()
        self._close_retired()
        self._listener.close()

    def _close_retired(self) -> None:
        for transport in self._retired:
            transport.close()
        self._retired.clear()

    # Orders ----------------------------------------------------------------------------------------------

    def is_newcomer(self) -> bool:
        """Whether this worker has not been a member yet."""
        return self.link.is_newcomer and world.current().id.number == 0

    def has_to_regroup(self) -> bool:
        """Whether an ABORT waits, or every rank has agreed on a planned change."""
        return self.link.ordered > world.current().id.number or bool(self._agreed)

    def ask_for_regroup(self, reason: str) -> None:
        """The main thread left this generation without a fault that others could see. To the coordinator it is a
        failed connection: if nothing else explains it, it aborts the generation, with unchanged members."""
        self.link.send(LinkBroken(world.current().id.number, self._neighbour, "send", reason))

    def demanded_number(self) -> int:
        """The generation to be READY for; 0 for a newcomer, which is ready for any.

        After a collective that failed before any order came, it waits for the order: what this worker saw is
        only a hint, and the coordinator decides."""
        here = world.current().id.number
        if self.link.ordered > here:
            return self.link.ordered
        if self._agreed:
            return self._agreed
        if self.is_newcomer():
            return 0
        return self.link.wait_for_abort(above=here)

    def agree(self, prepared_by_rank: list[int]) -> None:
        """A planned change is agreed when all ranks hold a PREPARE for the same generation."""
        first = prepared_by_rank[0]
        is_agreed = first > world.current().id.number and all(each == first for each in prepared_by_rank)
        self._agreed = first if is_agreed else 0

    # The link's thread -----------------------------------------------------------------------------------

    def _abort_below(self, number: int, reason: str) -> None:
        """An ABORT came: end whatever the main thread is in that belongs to an older generation."""
        with self._lock:
            for other, abortables in self._live.items():
                if other < number:
                    for each in abortables:
                        each.abort(reason)

    def _watch(self, number: int, abortable: _Abortable) -> None:
        """From now on an ABORT reaches it; one that came before does so here."""
        with self._lock:
            self._live.setdefault(number, []).append(abortable)
        if self.link.ordered > number:
            abortable.abort(self.link.abort_reason)
            raise GenerationEnded("regroup", number, self.link.abort_reason)
