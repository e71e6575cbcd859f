"""The hosts that a job may use, with their slots: those that are offered, and beside them those of agents that have
joined by themselves. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.job.coordinator.inputs import HostsOffered


class HostOffers:
    """`counts_joined`: whether the host of an agent that has joined by itself counts as long as the agent stays.

    Attributes:
        offered: Slots by host.
        joined: Slots of the agents that have joined beside those: an agent on another machine has the name of its host.
    """

    def __init__(self, counts_joined: bool) -> None:
        self._counts_joined = counts_joined
        self.offered: dict[str, int] = {}
        self.joined: dict[str, int] = {}

    def offer(self, slots: Mapping[str, int], may_change: bool) -> HostsOffered:
        """Replace what is offered. Return all hosts."""
        self.offered = dict(slots)
        return self._all(may_change)

    def join(self, agent: str, host: str, slots: int) -> HostsOffered | None:
        """Count the host of an agent that has joined. Return all hosts if there is one more."""
        if not self._counts_joined or host in self.offered:
            return None
        self.joined[agent] = slots
        return self._all(may_change=True)

    def leave(self, agent: str) -> HostsOffered | None:
        """Count the host of this agent no more. Return all hosts if there is one less."""
        return None if self.joined.pop(agent, None) is None else self._all(may_change=True)

    def _all(self, may_change: bool) -> HostsOffered:
        return HostsOffered({**self.offered, **self.joined}, may_change)
