"""The response to stalled steps. Without --step-timeout a stall is only reported.

some are in their own code, the others wait   the former hang: they are stopped, with the stacks of their threads
all wait for each other                       a new generation with the same members, twice; then the job ends
all are in their own code                     the job ends, with the stacks of all: no worker is known to be healthy
"""

from __future__ import annotations

from farandole.coordinator import formatting, regroup
from farandole.coordinator.inputs import StepsStalled
from farandole.coordinator.job import Stall
from farandole.coordinator.transition import Transition
from farandole.events import CollectiveStalled, StallNoticed, WorkersHung

MOST_RETRIES = 2


def steps_stalled(transition: Transition, input: StepsStalled) -> None:
    """Respond to steps that have stalled, unless the membership has changed meanwhile."""
    job = transition.job
    if not job.is_elastic or job.is_released or job.generation is None or input.number != job.number:
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
            transition.kill(name, 0.0, f"the others have waited for it for {how_long}", dumps_stacks=True)
    elif hung:
        transition.end(
            1,
            f"No worker has come any further for {how_long}, and none of them waits for another: "
            f"{formatting.listed(hung)} are in their own code. If steps may take that long, allow more.",
            dumps_stacks=True,
        )
    elif job.change is None or job.change.is_planned:
        _all_wait(transition, input, how_long)


def _all_wait(transition: Transition, input: StepsStalled, how_long: str) -> None:
    """Respond to members that all wait: they are in different collectives, or a connection between them is broken."""
    before = transition.job.stall
    times = before.times + 1 if before is not None and before.step == input.step else 1
    transition.change(stall=Stall(input.step, times))
    transition.log(CollectiveStalled(input.step, input.waiting, input.stalled_s))
    if times <= MOST_RETRIES:
        regroup.abort(transition, f"all workers have waited for each other for {how_long}")
        return
    transition.end(
        1,
        f"All workers have waited for each other for {how_long}, {times} times at the same step: do all of them call "
        "the same collectives in the same order?",
        dumps_stacks=True,
    )
