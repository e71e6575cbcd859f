"""The silence of agents, in a time that stands still while nobody listens. Pure."""

from __future__ import annotations

from collections.abc import Callable


class JobClock:
    """The time of the job, which stands still while the coordinator itself cannot run.

    All deadlines of the job are kept in this time. So no deadline passes, and no agent is found silent, because the
    coordinator's process was stopped or starved and left messages unread.
    """

    def __init__(self, read_s: Callable[[], float], tolerance_s: float) -> None:
        self._read_s, self._tolerance_s = read_s, tolerance_s
        self._stalled_s = 0.0
        self._due_s: float | None = None

    def now_s(self) -> float:
        return self._read_s() - self._stalled_s

    def continue_from(self, now_s: float) -> None:
        """Let it be `now_s` now: where the clock of another coordinator has stopped."""
        self._stalled_s = self._read_s() - now_s

    def expect_look(self, delay_s: float) -> None:
        """Announce that the coordinator will look again in `delay_s`."""
        self._due_s = self._read_s() + delay_s

    def notice_stall(self) -> float:
        """Return the seconds by which the expected look is late, when that is beyond the tolerance; else 0. From then
        on they are not counted. Call it before any judgement."""
        late_s = 0.0 if self._due_s is None else self._read_s() - self._due_s
        if late_s <= self._tolerance_s:
            return 0.0
        self._stalled_s += late_s
        self._due_s = self._read_s()
        return late_s


class Silence:
    """The time of the last message of each agent. A verdict takes two looks: in between, the event loop has read every
    socket, so a message that had arrived but was not read yet still counts."""

    def __init__(self, budget_s: float) -> None:
        self.look_every_s = budget_s / 20
        self._limit_s = budget_s - 2 * self.look_every_s
        self._received_s: dict[str, float] = {}
        self._suspects: set[str] = set()

    def __contains__(self, agent: str) -> bool:
        return agent in self._received_s

    def record(self, agent: str, now_s: float) -> None:
        self._received_s[agent] = now_s
        self._suspects.discard(agent)

    def forget(self, agent: str) -> None:
        self._received_s.pop(agent, None)
        self._suspects.discard(agent)

    def look(self, now_s: float) -> dict[str, float]:
        """Return the agents whose silence has lasted for about the budget (never more, if called as often as
        `look_every_s` says), and for how many seconds."""
        silent = {agent: now_s - received_s for agent, received_s in self._received_s.items()}
        silent = {agent: silent_s for agent, silent_s in silent.items() if silent_s >= self._limit_s}
        lost = {agent: silent_s for agent, silent_s in silent.items() if agent in self._suspects}
        self._suspects.update(silent)
        return lost
