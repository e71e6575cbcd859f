"""After a fault the survivors train first: a replacement that starts takes processor time and memory bandwidth from
the very step that everybody waits for. Pure.

It is started as soon as all survivors have applied a step, which is mostly a matter of milliseconds; or after
`deferred_restart_s`, for steps that take long, and scripts that commit rarely; or at once where the job cannot go on
without it.
"""

from __future__ import annotations

from farandole.coordinator.job import Job
from farandole.coordinator.transition import Transition


def begin(transition: Transition) -> None:
    """A fault. Further ones before the survivors train again make it no longer: they may never stop."""
    if transition.job.restart_deferred_until_s is None and transition.job.config.deferred_restart_s:
        transition.change(restart_deferred_until_s=transition.now_s + transition.job.config.deferred_restart_s)


def end(transition: Transition) -> None:
    """They train, or they have had their time."""
    transition.change(restart_deferred_until_s=None)


def end_in_time(transition: Transition) -> None:
    """Called whenever time may have passed."""
    until_s = transition.job.restart_deferred_until_s
    if until_s is not None and transition.now_s >= until_s:
        end(transition)


def is_on(job: Job) -> bool:
    """Whether lost workers are not replaced yet."""
    staying = sum(not worker.is_leaving for worker in job.survivors())
    return job.restart_deferred_until_s is not None and staying >= max(1, job.config.min_np)
