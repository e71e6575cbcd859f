"""Hang detection from the worker statuses that agents report, and the response to stalled steps. Pure.

A step needs all members: while one of them hangs, each of the others comes to wait for it. So it is enough to detect
the moment after which no member makes progress.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.base.events.worker_events import CollectiveStalled, StallNoticed, WorkersHung
from farandole.base.membership import LONGEST_BETWEEN_S, Phase, WorkerStatus
from farandole.job.coordinator.job import Job, StepStall
from farandole.job.coordinator.sentences import listed
from farandole.job.coordinator.transition import StepsStalled, Transition

NOTICE_S = 60.0
"""Seconds after which, without a step timeout, the workers that block the others are named, once in a generation."""


class HangDetector:
    """`step_timeout_s`: the longest time without progress of any member; None: unlimited, but a stall is reported.

    Attributes:
        look_every_s: How often to look: the start of a stall is known so exactly.
        heartbeat_s: The time between two heartbeats of an agent, which contain the statuses.
    """

    def __init__(self, step_timeout_s: float | None) -> None:
        self._timeout_s = step_timeout_s
        self._limit_s = NOTICE_S if step_timeout_s is None else step_timeout_s
        self.look_every_s = self._limit_s / 20
        self.heartbeat_s = 0.0
        self._noticed: object = None  # the generation in which a stall was reported
        self._seen: dict[str, tuple[float, Mapping[str, WorkerStatus]]] = {}  # by agent, and when
        self._state: object = None
        self._since_s = 0.0

    def record(self, agent: str, workers: Mapping[str, WorkerStatus], now_s: float) -> None:
        """Record the statuses that an agent reports of all its workers."""
        self._seen[agent] = now_s, workers

    def forget(self, agent: str) -> None:
        self._seen.pop(agent, None)

    def steps(self) -> dict[str, int]:
        """Return, by worker, how many steps it had decided when it was last seen."""
        return {name: each.step for _, workers in self._seen.values() for name, each in workers.items()}

    def look(self, job: Job, now_s: float) -> StepsStalled | None:
        """Return a StepsStalled input if no member has made progress for too long, and again after the same time. Call
        it regularly.

        Nothing is known, and so no stall is reported, while a member has not entered its elastic function yet, or has
        not been seen lately.
        """
        members = job.survivors()
        if not members or job.is_released or job.ending is not None:
            self._state = None
            return None
        statuses: dict[str, WorkerStatus] = {}
        fresh_s = 1.25 * LONGEST_BETWEEN_S + self.heartbeat_s
        for member in members:
            seen_s, workers = self._seen.get(member.slot.agent, (now_s, {}))
            status = workers.get(member.name)
            if status is None or not member.is_elastic or now_s - seen_s > fresh_s:
                self._state = None
                return None
            statuses[member.name] = status
        state = (job.number, job.generation, statuses)
        if state != self._state:
            self._state, self._since_s = state, now_s
        stalled_s = now_s - self._since_s
        if stalled_s < self._limit_s:
            return None
        own_code = (Phase.USER, Phase.OUTSIDE)
        waiting = tuple(name for name, status in statuses.items() if status.phase not in own_code)
        if self._timeout_s is None:
            if not waiting or self._noticed == job.number:  # long steps are not a stall
                return None
            self._noticed = job.number
        self._since_s = now_s
        return StepsStalled(
            number=job.number,
            stalled_s=stalled_s,
            step=max(status.step for status in statuses.values()),
            in_own_code=tuple(name for name, status in statuses.items() if status.phase in own_code),
            waiting=waiting,
        )


# The response to stalled steps; without --step-timeout a stall is only reported ---------------------------------------
#
# some are in their own code, the others wait   the former hang: they are stopped, with the stacks of their threads
# all wait for each other                       a new generation with the same members, twice; then the job ends
# all are in their own code                     the job ends, with the stacks of all: no worker is known to be healthy

MOST_RETRIES = 2


def steps_stalled(transition: Transition, input: StepsStalled) -> None:
    """Respond to steps that have stalled, unless the membership has changed meanwhile."""
    job = transition.job
    if not job.is_elastic or job.is_released or job.generation is None or input.number != job.number:
        return
    if transition.faults:
        return
    members = {worker.name: worker for worker in job.survivors()}
    hung = [name for name in input.in_own_code if name in members]
    if members.keys() != {*input.in_own_code, *input.waiting}:
        return
    if job.config.step_timeout_s is None:
        transition.log(StallNoticed(input.step, input.in_own_code, input.waiting, input.stalled_s))
        return
    how_long = f"{input.stalled_s:.0f} s (--step-timeout {job.config.step_timeout_s:g})"
    if hung and input.waiting:
        hung = [name for name in hung if not members[name].killed_for]
        if hung:
            transition.log(WorkersHung(input.step, tuple(hung), input.stalled_s))
        for name in hung:
            transition.kill(name, 0.0, f"the other workers have waited for it for {how_long}", dumps_stacks=True)
    elif hung:
        transition.end(
            1,
            f"No worker has made progress for {how_long}, and none of them waits for another one: "
            f"{listed(hung)} are in their own code. If a step may take that long, increase --step-timeout.",
            dumps_stacks=True,
        )
    elif not job.is_regrouping:
        _all_wait(transition, input, how_long)


def _all_wait(transition: Transition, input: StepsStalled, how_long: str) -> None:
    """Respond to members that all wait: they are in different collectives, or a connection between them is broken."""
    before = transition.job.stall
    times = before.times + 1 if before is not None and before.step == input.step else 1
    transition.change(stall=StepStall(input.step, times))
    transition.log(CollectiveStalled(input.step, input.waiting, input.stalled_s))
    if times <= MOST_RETRIES:
        transition.faults.append(f"all workers have waited for each other for {how_long}")
        return
    transition.end(
        1,
        f"All workers have waited for each other for {how_long}, {times} times at the same step: check that all of "
        "them call the same collectives in the same order.",
        dumps_stacks=True,
    )
