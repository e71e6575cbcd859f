"""Probes of a worker's neighbours when no byte moves; the results go to the coordinator. Created by worker_job.py; the
link's thread calls it, so that it works while the main thread is blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from farandole.clock import now_s
from farandole.collectives.probe import answering
from farandole.membership import Peer
from farandole.messages import Probed

LONGEST_PROBE_S = 0.4
"""Seconds for one attempt. A peer that answers at all answers much sooner, on any network that carries gradients."""


@dataclass(frozen=True)
class Connections:
    """The connections of a worker in one generation: the peers, and since when some collective waits on them without a
    byte moved (None: bytes move, or no collective waits)."""

    number: int
    peers: frozenset[Peer]
    still_since_s: float | None


class LinkProbe:
    """Runs each probe in a thread of its own, one at a time.

    budget_s     the detection budget: after half of it without a byte the neighbours are tried, then after twice as
                 long each time, since they may just be slow
    connections  called often; returns None between generations
    tell         sends to the coordinator
    """

    def __init__(
        self, budget_s: float, connections: Callable[[], Connections | None], tell: Callable[[Probed], None]
    ) -> None:
        self._budget_s, self._connections, self._tell = budget_s, connections, tell
        self.look_every_s = min(1.0, budget_s / 16)
        self._still_since_s: float | None = None
        self._pause_s = self._due_s = 0.0
        self._lock = threading.Lock()
        self._is_probing = False

    def look(self) -> bool:
        """Probe if it is time, and return whether it was. Call it every `look_every_s`."""
        now = self._connections()
        since_s = now.still_since_s if now is not None else None
        if since_s != self._still_since_s:
            self._still_since_s = since_s
            self._pause_s = self._budget_s / 2
            self._due_s = 0.0 if since_s is None else since_s + self._pause_s
        if now is None or since_s is None or now_s() < self._due_s or not self._start(now):
            return False
        self._pause_s *= 2
        self._due_s = now_s() + self._pause_s
        return True

    def probe(self, number: int) -> None:
        """Probe now, if this is the generation: the coordinator asks, or a connection has failed. From any thread."""
        now = self._connections()
        if now is not None and now.number == number:
            self._start(now)

    def _start(self, now: Connections) -> bool:
        with self._lock:
            if self._is_probing or not now.peers:
                return False
            self._is_probing = True
        try:
            threading.Thread(target=self._probe, args=(now,), name="farandole-probe", daemon=True).start()
        except RuntimeError:  # the system's limit of threads is reached; the next look tries again
            with self._lock:
                self._is_probing = False
            return False
        return True

    def _probe(self, now: Connections) -> None:
        try:
            by_address = {peer.address: peer.worker for peer in now.peers}
            found = answering(by_address, min(self._budget_s / 4, LONGEST_PROBE_S))
            names = {by_address[address] for address in found}
            others = set(by_address.values()) - names
        finally:
            with self._lock:
                self._is_probing = False
        self._tell(Probed(now.number, tuple(sorted(names)), tuple(sorted(others))))
