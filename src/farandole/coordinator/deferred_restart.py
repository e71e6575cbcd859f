"""The deferred restart. After a fault the survivors train first: the start of a replacement takes processor time and
memory bandwidth from the step for which all members wait. Pure.

The replacement is started as soon as all survivors have applied a step, mostly within milliseconds; or after
`deferred_restart_s`, for long steps and for scripts that commit rarely; or at once if the job cannot continue without
it.
"""

from __future__ import annotations

from farandole.coordinator.job import Job
from farandole.coordinator.transition import Transition


def begin(transition: Transition) -> None:
    """Defer the replacement of lost workers after a fault. Further faults before the survivors train again do not
    extend the time: they may never stop."""
    if transition.job.restart_deferred_until_s is None and transition.job.config.deferred_restart_s:
        transition.change(restart_deferred_until_s=transition.now_s + transition.job.config.deferred_restart_s)


def end(transition: Transition) -> None:
    """End the deferral: the survivors train, or the time is over."""
    transition.change(restart_deferred_until_s=None)


def end_in_time(transition: Transition) -> None:
    """End the deferral when its time is over. Called whenever time may have passed."""
    until_s = transition.job.restart_deferred_until_s
    if until_s is not None and transition.now_s >= until_s:
        end(transition)


def is_on(job: Job) -> bool:
    """Return whether lost workers are not replaced yet."""
    staying = sum(not worker.is_leaving for worker in job.survivors())
    return job.restart_deferred_until_s is not None and staying >= max(1, job.config.min_np)
