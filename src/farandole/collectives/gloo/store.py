"""How the ranks of a Gloo group find each other: a store that holds what they told each other around the ring.

Gloo's own stores need a server, reach it without proof of identity, and do not hear of an abort.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class ExchangedStore(dist.Store):  # type: ignore[name-defined, misc]
    """One rank's. A thread that builds a group sets one value and then asks for those of all; another one brings
    them: `said` tells when, and what, it has to carry to the other ranks.

    timeout_s  after which whoever waits for a value raises TimeoutError
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._mine: dict[str, bytes] = {}
        self._all: dict[str, bytes] | None = None
        self._was_abandoned = False
        self._changed = threading.Condition()
        self.has_spoken = threading.Event()

    @property
    def mine(self) -> dict[str, bytes]:
        """What this rank has set; complete once `has_spoken`."""
        return self._mine

    def bring(self, values: Sequence[dict[str, bytes]]) -> None:
        """What the ranks have set, in any order."""
        with self._changed:
            self._all = {key: value for each in values for key, value in each.items()}
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nothing will be brought any more: whoever waits raises."""
        with self._changed:
            self._was_abandoned = True
            self._changed.notify_all()
        self.has_spoken.set()

    # What Gloo calls, in its thread ----------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._mine[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Raises LookupError for what no rank has set."""
        self.has_spoken.set()
        with self._changed:
            self._changed.wait_for(lambda: self._all is not None or self._was_abandoned, self._timeout_s)
            if self._all is None:
                raise TimeoutError("the other ranks did not tell where they listen")
            if key not in self._all:
                raise LookupError(f"no rank has set {key!r}")
            return self._all[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
