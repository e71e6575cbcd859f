"""WorkerJob: a worker in a job with a coordinator: its link, and the transports of its generations.

Two threads use it. The main thread builds transports and runs collectives; the link's thread aborts them, by way of
the AbortRegistry (worker_recovery.py).
"""

from __future__ import annotations

from farandole.base.env import WorkerEnv
from farandole.base.machine import now_s
from farandole.base.membership import Progress
from farandole.base.wire.encryption import load_certificates
from farandole.base.wire.link_messages import Connected, LinkBroken, MayPublish, Ready, Remark, Start
from farandole.errors import PeerLost, RecoverableError
from farandole.training.collectives import world
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.extension import extenders
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_builder import RingBuilder
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.world import World
from farandole.training.worker.link import Connections, Link, LinkProbe
from farandole.training.worker.worker_recovery import AbortRegistry, connect
from farandole.training.worker.world_builder import WorldBuilder

# Seconds from START, when all members are quiescent, until the data connections exist. The agent of a peer that died
# meanwhile reports it much sooner; this limit covers unreported losses.
CONNECT_TIMEOUT_S = 5.0

_ANSWER_S = 30.0  # for the coordinator to answer whether a checkpoint counts; it is busy for milliseconds at most

# Seconds for all members to call init() again after a shutdown(): scripts may do much in between.
MEET_TIMEOUT_S = 120.0


class WorkerJob:
    """The worker's membership from init() to shutdown() under `farandole run`."""

    def __init__(self, env: WorkerEnv) -> None:
        self._worker = env.worker
        self._listener = DataListener(*env.data_hosts, tls=load_certificates(env.tls))
        self._aborts = AbortRegistry()
        self._retired: list[World] = []
        self._agreed = 0
        self._start: Start | None = None  # of the generation that this worker is in, or was before shutdown()
        self._has_met = False
        self._session = 0
        self.ready_s = 0.0  # when READY was last sent
        self.has_finished = False  # an elastic function has returned on all workers
        self.link = Link(env, self._aborts)
        self._builder = WorldBuilder(
            self._listener,
            env.worker,
            env.agent_address,  # random, and one on each host
            extenders(),
            on_broken=self._report_broken,
            check=self.link.raise_if_over,
            aborts=self._aborts,
            on_way=lambda number, way: self.link.send(Connected(number, way)),
            slot=env.slot,
            on_remark=lambda topic, text: self.link.send(Remark(topic, text)),
        )
        self._link_probe = LinkProbe(env.detection_budget_s, self._connections, self.link.send, self._listener.address)
        self.link.on_look, self.link.look_every_s = self._look, self._link_probe.look_every_s
        self.link.on_probe = self._link_probe.probe
        self.link.open(env, self._listener.address)

    def meet(self) -> bool:
        """Enter the first generation; after leave() the same one anew, with all its members, or the one that replaces
        it. False for a worker that is not a member yet. Raises PeerLost when a member does not arrive in time."""
        if not self._has_met:
            self._has_met = True
            start = self.link.wait_for_admission()
            if start is not None:
                self.build(start)
            return start is not None
        if self._start is None:
            return False
        while not self.has_orders():
            self._session += 1
            try:
                self._enter(self._start, MEET_TIMEOUT_S)
            except RecoverableError as error:
                if isinstance(error, PeerLost) and error.op == "connect" and not self.has_orders():
                    raise  # the peer lives, and does not arrive
                self.link.wait_for_abort(above=self._start.id.number)
            else:
                return True
        connect(self)
        return True

    def leave(self) -> None:
        """Close the connections to the other workers, for shutdown(). The coordinator still knows this worker; it may
        meet again."""
        self._builder.forget_settings()
        if world.is_entered():
            here = world.current()
            here.close_extensions()
            self._retired.append(here)
            world.enter(None)
        self._close_retired()
        self._aborts.close_all()

    def build(self, start: Start) -> Transport:
        """Open the data connections of a generation and enter its world. Raises PeerLost or GenerationEnded; the
        coordinator's next order then says what to do."""
        self._session = 0
        self._enter(start, CONNECT_TIMEOUT_S)
        return world.current().transport

    def may_publish(self, name: str, progress: Progress, file: str = "") -> str:
        """Ask whether a checkpoint, or a file of the script, counts. Return "", or why not. From any thread."""
        return self.link.may_publish(MayPublish(name, progress, file), _ANSWER_S)

    def quiesce(self) -> None:
        """End the background operations of the old generation: no collective touches a tensor afterwards."""
        if world.is_entered():
            world.current().end_extensions("this worker is regrouping")

    def settle(self) -> None:
        """Release the resources of old generations once the new one works. Not earlier: a peer may still read."""
        self._close_retired()
        self._aborts.close_all_but(world.current().id.number)
        for each in extenders().values():
            each.settled()

    def close(self) -> None:
        self.leave()
        self.link.close()
        self._listener.close()

    def _enter(self, start: Start, timeout_s: float) -> None:
        entered, carries_over = self._builder.build(start, self._session, timeout_s)
        was_newcomer = self.is_newcomer()
        if world.is_entered():
            world.current().end_extensions("its generation is over")
            self._retired.append(world.current())
        world.enter(entered)
        self._aborts.enter(start.id.number)
        self._start, self._agreed = start, 0
        if carries_over:
            for each in extenders().values():
                each.carry_over(was_newcomer)

    def _close_retired(self) -> None:
        for old in self._retired:
            old.close()
        self._retired.clear()

    def _report_broken(self, number: int, peer: str, direction: str, detail: str) -> None:
        self.link.send(LinkBroken(number, peer, direction, detail))
        self._link_probe.probe(number)

    # Orders ----------------------------------------------------------------------------------------------

    def is_newcomer(self) -> bool:
        """Return whether this worker has not been a member yet."""
        return self.link.is_newcomer and self._start is None

    def has_to_regroup(self) -> bool:
        """Return whether an ABORT is pending, or every rank has agreed on a planned change."""
        return self.link.ordered > world.current().id.number or bool(self._agreed)

    def has_orders(self) -> bool:
        """Return whether the coordinator wants another generation than the last one of this worker."""
        number = self._start.id.number if self._start is not None else 0
        return max(self.link.ordered, self.link.prepared) > number

    def wait_for_start(self) -> Start:
        """Send READY for the newest order, and again whenever a further change replaces it, until START."""
        number = self.demanded_number()
        while True:
            if number:
                self.link.send(Ready(number))
            self.ready_s = now_s()
            answer = self.link.wait_for_start(above=number)
            if isinstance(answer, Start):
                return answer
            number = answer

    def ask_for_regroup(self, reason: str) -> None:
        """Report that the main thread left this generation without a fault that others could see. To the coordinator it
        is a failed connection: if it has no other explanation, it aborts the generation, with unchanged members."""
        assert self._start is not None
        self._report_broken(self._start.id.number, self._start.next.worker, "left", reason)

    def demanded_number(self) -> int:
        """Return the generation to be READY for; 0 for a newcomer, which is ready for any. After a collective that
        failed before any order came, wait for the order: the failure is only a hint."""
        here = self._start.id.number if self._start is not None else 0
        if self.link.ordered > here:
            return self.link.ordered
        if self._agreed:
            return self._agreed
        if self.is_newcomer():
            return 0
        if not world.is_entered() and self.link.prepared > here:
            return self.link.prepared  # between shutdown() and init() there is no agreement
        return self.link.wait_for_abort(above=here)

    def agree(self, prepared_by_rank: list[int]) -> None:
        """Agree on a planned change when all ranks hold a PREPARE for the same generation."""
        first = prepared_by_rank[0]
        is_agreed = first > world.current().id.number and all(each == first for each in prepared_by_rank)
        self._agreed = first if is_agreed else 0

    # The link's thread -----------------------------------------------------------------------------------

    def _look(self) -> None:
        self._link_probe.look()
        self._listener.tidy()

    def _connections(self) -> Connections | None:
        """Return the connections of the newest generation, unless an ABORT has ended it."""
        number, abortables = self._aborts.newest()
        rings = [each for each in abortables if isinstance(each, RingTransport | RingBuilder)]
        if not rings or self.link.ordered > number:
            return None
        still = [since_s for ring in rings if (since_s := ring.still_since_s) is not None]
        peers = frozenset(peer for ring in rings for peer in ring.peers if peer.worker != self._worker)
        return Connections(number, peers, min(still, default=None))
