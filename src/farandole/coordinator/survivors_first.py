"""After a fault the survivors train first: a replacement that starts takes processor time and memory bandwidth from
the very step that everybody waits for. Pure.

It is started as soon as all survivors have applied a step, which is mostly a matter of milliseconds; or after
`survivors_first_s`, for steps that take long, and scripts that commit rarely; or at once where the job cannot go on
without it.
"""

from __future__ import annotations

from farandole.coordinator.draft import Draft
from farandole.coordinator.job import Job


def begin(draft: Draft) -> None:
    """A fault. Further ones before the survivors train again make it no longer: they may never stop."""
    if draft.job.survivors_first_until_s is None and draft.job.config.survivors_first_s:
        draft.change(survivors_first_until_s=draft.now_s + draft.job.config.survivors_first_s)


def end(draft: Draft) -> None:
    """They train, or they have had their time."""
    draft.change(survivors_first_until_s=None)


def end_in_time(draft: Draft) -> None:
    """Called whenever time may have passed."""
    until_s = draft.job.survivors_first_until_s
    if until_s is not None and draft.now_s >= until_s:
        end(draft)


def is_on(job: Job) -> bool:
    """Whether lost workers are not replaced yet."""
    staying = sum(not worker.is_leaving for worker in job.survivors())
    return job.survivors_first_until_s is not None and staying >= max(1, job.config.min_np)
