"""Lets processes of several jobs take turns: one job computes while the others wait without a core."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

_DEADLINE = timedelta(seconds=300)


class Gate:
    """All processes call the same methods in the same order. `address`: HOST:PORT of the store that host() has made."""

    def __init__(self, address: str, processes: int) -> None:
        host, _, port = address.rpartition(":")
        self._store = TCPStore(host, int(port), is_master=False, timeout=_DEADLINE)
        self._processes = processes
        self._passed = 0

    def wait_for_all(self) -> None:
        """Return when every process has come here."""
        key = f"gate{self._passed}"
        self._passed += 1
        if self._store.add(key, 1) == self._processes:
            self._store.set(f"{key}/open", "")
        self._store.wait([f"{key}/open"])

    def agree(self, value: int | None) -> int:
        """The value of the one process that has one, on all."""
        key = f"value{self._passed}"
        if value is not None:
            self._store.set(key, str(value))
        agreed = int(self._store.get(key))
        self.wait_for_all()
        return agreed


def host(address: str) -> TCPStore:
    """Where a gate's processes meet, for as long as this is kept: at its `port`."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False)
