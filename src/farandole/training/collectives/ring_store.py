"""The store by which the ranks of a process group of torch find each other: it holds the values exchanged on the ring.

The Construction of a group (torch_group.py) carries its values. Torch's own stores need a server, reach it without
proof of identity, and do not learn of an abort.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farandole.training.collectives.connection_pair import Wake


class ExchangedStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store of one rank.

    A thread that builds a group sets values and reads those of others; another thread carries them. A read raises
    TimeoutError after `timeout_s` seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._mine: dict[str, bytes] = {}
        self._unsent: dict[str, bytes] = {}
        self._all: dict[str, bytes] = {}
        self._waiting = 0
        self._has_to_send_end = self._was_abandoned = self._is_closed = False
        self._changed = threading.Condition()
        self._wake = Wake()

    # For the thread that carries values ------------------------------------------------------------------

    @property
    def mine(self) -> dict[str, bytes]:
        """The values that this rank has set."""
        return self._mine

    @property
    def has_to_send(self) -> bool:
        """True when this rank waits for a value, or there is news since take_unsent(): values, or the end."""
        return bool(self._unsent) or self._waiting > 0 or self._has_to_send_end

    @property
    def descriptor(self) -> int:
        """Readable when this rank has to send a message."""
        return self._wake.descriptor

    def take_unsent(self) -> dict[str, bytes]:
        """Return the values that this rank has set since the last call."""
        with self._changed:
            unsent, self._unsent = self._unsent, {}
            self._has_to_send_end = False
            self._update_wake()
            return unsent

    def bring(self, values: Sequence[dict[str, bytes]]) -> None:
        """Add the values that the ranks have set, in any order."""
        with self._changed:
            for each in values:
                self._all.update(each)
            self._changed.notify_all()

    def end(self) -> None:
        """Mark that the group exists, or that there will be none."""
        with self._changed:
            self._has_to_send_end = True
            self._update_wake()

    def abandon(self) -> None:
        """Mark that no more values will come: waiting threads raise."""
        with self._changed:
            self._was_abandoned = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the store, once no thread carries values any more."""
        with self._changed:
            self._is_closed = True
            self._wake.close()

    def _update_wake(self) -> None:
        if self._is_closed:
            return
        if self.has_to_send:
            self._wake.set()
        else:
            self._wake.clear()

    # Called by torch, in the thread that builds a group --------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._mine[key] = self._unsent[key] = self._all[key] = _as_bytes(value)
            self._update_wake()

    def get(self, key: str) -> bytes:
        """Return a value. Raises TimeoutError if no rank has set it in time."""
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
                raise TimeoutError(f"no other rank has set the key {key!r} within {self._timeout_s:g} s")
            return self._all[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._all for key in keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if it is the expected one so far, or if none is there and none is expected. Return the value.

        Not atomic among ranks: for keys that one rank sets.
        """
        with self._changed:
            if self._all.get(key, b"") == _as_bytes(expected):
                self.set(key, desired)
            return self._all.get(key, b"")

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the store has its own timeout."""


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
