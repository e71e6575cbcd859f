"""The rings that one rank of a hierarchical transport is in. They end together; hierarchical_transport.py uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from farandole.collectives.connection_pair import Broken, Interruption, PeerCalled
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import Header

_LOOK_AROUND_S = 0.002  # as whoever waits in shared memory


class Rings:
    """`whole` connects all ranks. It carries what has no tensor, and tells who is in another operation.

    local   connects the ranks of this host, if there are others: what breaks it is a rank that is gone. The whole
            ring cannot tell that in the middle of an operation: ranks of another host may have finished, and gone
    across  connects one rank of each host, whose ranks are `across_names`; None if this rank is in no such ring
    """

    def __init__(
        self,
        whole: RingTransport,
        local: RingTransport | None,
        across: RingTransport | None,
        across_names: Sequence[int],
    ) -> None:
        self.whole, self.across, self._local = whole, across, local
        self._all = [each for each in (whole, local, across) if each is not None]
        self._header: Header | None = None
        if across is not None:
            across.serve(across_names, self._look_around, _LOOK_AROUND_S)

    @contextmanager
    def running(self, header: Header) -> Iterator[None]:
        """Around an operation on a tensor."""
        with self.together(), self.whole.running(header):
            self._header = header
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around any operation: what ends one ring ends all, so that whoever waits for this rank learns of it."""
        try:
            yield
        except BaseException as error:
            for ring in self._all:
                ring.end(error)
            raise

    def interruption(self) -> Interruption | None:
        """Why this rank should not go on with its operation: a rank of this host is gone, or another one is in another
        operation. Raises CollectiveMismatch if one of them says so."""
        broken = self._local.interruption() if self._local is not None else None
        called = self.whole.interruption()
        return broken or (called if isinstance(called, PeerCalled) else None)

    def end_by(self, interruption: Interruption, header: Header) -> NoReturn:
        """Raises what follows from it."""
        ring = self._local if isinstance(interruption, Broken) and self._local is not None else self.whole
        ring.end_by(interruption, header)

    def abort(self, reason: str) -> None:
        """From any thread."""
        for ring in self._all:
            ring.abort(reason)

    def close(self) -> None:
        for ring in self._all:
            ring.close()

    def _look_around(self) -> None:
        """While this rank waits for other hosts."""
        interruption = self.interruption()
        if interruption is not None and self._header is not None:
            self.end_by(interruption, self._header)
