"""How the ranks of a process group of torch's find each other: a store that holds what they told each other around
the ring. construction.py carries its words.

Torch's own stores need a server, reach it without proof of identity, and do not hear of an abort.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farandole.collectives.named.wake import Wake


class ExchangedStore(dist.Store):  # type: ignore[name-defined, misc]
    """One rank's. A thread that builds a group sets values and asks for those of others; another one carries them.

    timeout_s  after which whoever waits for a value raises TimeoutError
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._mine: dict[str, bytes] = {}
        self._untold: dict[str, bytes] = {}
        self._all: dict[str, bytes] = {}
        self._waiting = 0
        self._has_to_tell_end = self._was_abandoned = self._is_closed = False
        self._changed = threading.Condition()
        self._wake = Wake()

    # For the thread that carries words -------------------------------------------------------------------

    @property
    def mine(self) -> dict[str, bytes]:
        """What this rank has set."""
        return self._mine

    @property
    def has_to_speak(self) -> bool:
        """Whether this rank waits for a value, or there is news since take_untold(): values, or the end."""
        return bool(self._untold) or self._waiting > 0 or self._has_to_tell_end

    @property
    def descriptor(self) -> int:
        """Readable when this rank has to speak."""
        return self._wake.descriptor

    def take_untold(self) -> dict[str, bytes]:
        """What this rank has set since the last call."""
        with self._changed:
            untold, self._untold = self._untold, {}
            self._has_to_tell_end = False
            self._update_wake()
            return untold

    def bring(self, values: Sequence[dict[str, bytes]]) -> None:
        """What the ranks have set, in any order."""
        with self._changed:
            for each in values:
                self._all.update(each)
            self._changed.notify_all()

    def end(self) -> None:
        """The group is there, or it is clear that there will be none."""
        with self._changed:
            self._has_to_tell_end = True
            self._update_wake()

    def abandon(self) -> None:
        """Nothing will be brought any more: whoever waits raises."""
        with self._changed:
            self._was_abandoned = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody carries words any more."""
        with self._changed:
            self._is_closed = True
            self._wake.close()

    def _update_wake(self) -> None:
        if self._is_closed:
            return
        if self.has_to_speak:
            self._wake.set()
        else:
            self._wake.clear()

    # What torch calls, in the thread that builds a group -------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._mine[key] = self._untold[key] = self._all[key] = _as_bytes(value)
            self._update_wake()

    def get(self, key: str) -> bytes:
        """Raises TimeoutError for what nobody has brought in time."""
        with self._changed:
            self._waiting += 1
            try:
                if key not in self._all:
                    self._update_wake()
                self._changed.wait_for(lambda: key in self._all or self._was_abandoned, self._timeout_s)
            finally:
                self._waiting -= 1
                self._update_wake()
            if key not in self._all:
                raise TimeoutError(f"the other ranks did not tell {key!r}")
            return self._all[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._all for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """The store has its own."""


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
