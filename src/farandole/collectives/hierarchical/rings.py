"""The rings of one rank of a hierarchical transport. They end together; hierarchical_transport.py uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from farandole.collectives.connection_pair import Broken, Interruption, PeerCalled
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import Header

_LOOK_AROUND_S = 0.002  # as ranks that wait in shared memory do


class Rings:
    """The rings that this rank is in.

    Args:
        whole: Connects all ranks. It carries operations without a tensor, and reports ranks in another operation.
        local: Connects the ranks of this host, if there are others: when it breaks, one of them is gone. The whole ring
            cannot tell that in the middle of an operation: ranks of another host may have finished, and left.
        across: Connects one rank of each host, whose ranks are `across_names`; None if this rank is in no such ring.
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
        """Enclose an operation on a tensor."""
        with self.together(), self.whole.running(header):
            self._header = header
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enclose any operation: an error that ends one ring ends all, so that waiting ranks learn of it."""
        try:
            yield
        except BaseException as error:
            for ring in self._all:
                ring.end(error)
            raise

    def interruption(self) -> Interruption | None:
        """Return why this rank should stop its operation: a rank of this host is gone, or one is in another operation.

        Raises CollectiveMismatch if one of them reports it.
        """
        broken = self._local.interruption() if self._local is not None else None
        called = self.whole.interruption()
        return broken or (called if isinstance(called, PeerCalled) else None)

    def end_by(self, interruption: Interruption, header: Header) -> NoReturn:
        """Raise the error of the interruption."""
        ring = self._local if isinstance(interruption, Broken) and self._local is not None else self.whole
        ring.end_by(interruption, header)

    def abort(self, reason: str) -> None:
        """Abort all rings. Callable from any thread."""
        for ring in self._all:
            ring.abort(reason)

    def close(self) -> None:
        for ring in self._all:
            ring.close()

    def _look_around(self) -> None:
        """Check the ring of this host while this rank waits for other hosts."""
        interruption = self.interruption()
        if interruption is not None and self._header is not None:
            self.end_by(interruption, self._header)
