"""The regular look of a coordinator: for agents that have become silent and for steps that have stalled. It also sends
the heartbeats.
"""

from __future__ import annotations

import asyncio

from farandole.base.liveness.heartbeats import heartbeat_period_s
from farandole.job.coordinator.agents import Agents
from farandole.job.coordinator.decision_loop import DecisionLoop
from farandole.job.coordinator.hang_detection import HangDetector
from farandole.job.coordinator.inputs import Tick
from farandole.job.coordinator.reception import Reception


class Watch:
    """Used on one event loop: `start`, then `close`. `budget_s`: of the detection."""

    def __init__(
        self,
        budget_s: float,
        agents: Agents,
        decisions: DecisionLoop,
        hang_detector: HangDetector,
        reception: Reception,
    ) -> None:
        self._budget_s, self._agents, self._decisions = budget_s, agents, decisions
        self._hang_detector, self._reception = hang_detector, reception
        self._next_heartbeat_s = self._next_hang_look_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now, and from now on."""
        self._look()
        self._decisions.clock.expect_look(self._agents.look_every_s)
        self._timer = asyncio.get_running_loop().call_later(self._agents.look_every_s, self.start)

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._reception.refused.flush()
        self._decisions.notice_stall()
        for agent, silent_s in self._agents.silent().items():
            reason = f"nothing was received from it for {silent_s:.2f} s (--detection-budget {self._budget_s:g})"
            self._agents.lose(agent, reason, self._agents.lease_end_s(agent), silent_s)
        if self._decisions.retelling.reason and self._decisions.may_rebuild():
            self._decisions.decide(Tick())
        now_s = self._decisions.clock.now_s()
        if now_s >= self._next_hang_look_s:
            self._next_hang_look_s = now_s + self._hang_detector.look_every_s
            if (stalled := self._hang_detector.look(self._decisions.job, now_s)) is not None:
                self._decisions.decide(stalled)
        if now_s >= self._next_heartbeat_s:
            every_s = heartbeat_period_s(self._budget_s, len(self._agents.channels))
            self._hang_detector.heartbeat_s = every_s
            self._next_heartbeat_s = now_s + every_s - self._agents.look_every_s / 2
            self._agents.send_heartbeats(every_s)
