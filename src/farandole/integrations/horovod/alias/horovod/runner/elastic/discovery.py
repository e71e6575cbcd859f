"""The source of the hosts of an elastic job."""

from __future__ import annotations

import subprocess
from typing import Any

_DEADLINE_S = 60.0


class HostDiscovery:
    """Returns the current hosts."""

    def find_available_hosts_and_slots(self) -> dict[str, Any]:
        """Return the number of slots of each host."""
        raise NotImplementedError


class FixedHosts(HostDiscovery):
    """A constant list of hosts, until others are set."""

    def __init__(self, host_slots: dict[str, int]) -> None:
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return self._host_slots

    def set(self, host_slots: dict[str, int]) -> None:
        self._host_slots = host_slots


class HostDiscoveryScript(HostDiscovery):
    """A script that prints lines `host` or `host:slots`; `slots` are those of a host without a number."""

    def __init__(self, discovery_script: str, slots: Any) -> None:
        self._script, self._slots = discovery_script, slots

    def find_available_hosts_and_slots(self) -> dict[str, Any]:
        """Run the script. Raises RuntimeError when it fails or takes longer than a minute."""
        found: dict[str, Any] = {}
        for line in self._execute_discovery_script().split():
            host, colon, slots = line.partition(":")
            found[host] = int(slots) if colon else self._slots
        return found

    def _execute_discovery_script(self) -> str:
        try:
            done = subprocess.run(self._script, shell=True, stdout=subprocess.PIPE, text=True, timeout=_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self._script} has not ended after {_DEADLINE_S:g} s") from None
        if done.returncode != 0:
            raise RuntimeError(f"{self._script} ended with exit code {done.returncode}")
        return done.stdout
