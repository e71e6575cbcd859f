"""Sentences of the coordinator for people. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from farandole.base.events.event import MOST_NAMED, named
from farandole.job.coordinator.job import Job, Slot, Worker


def format_exit(exit_code: int) -> str:
    """Return the predicate for a process that has ended ("it ..."). `exit_code`: negative for a signal, as in
    subprocess."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        return f"was killed by signal {-exit_code}"
    return f"was killed by {name} (signal {-exit_code})"


def listed(names: Iterable[str]) -> str:
    """Join names for a sentence: "w0", "w0 and w1", "w0, w1 and w2"; "none" if there are no names. Of many names the
    first ones, and the number of the others."""
    *most, last = [*names] or ["none"]
    if len(most) >= MOST_NAMED:
        return named([*most, last])
    return f"{', '.join(most)} and {last}" if most else last


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def slot_name(job: Job, slot: Slot) -> str:
    """Return the name of the slot, with its host where there is more than one."""
    return f"slot {slot.index}" + (f" on {job.agents[slot.agent].host}" if len(job.agents) > 1 else "")


def worker_name(job: Job, worker: Worker) -> str:
    return f"{worker.name} ({slot_name(job, worker.slot)})"


def why_not_refilled(job: Job) -> str:
    """Return one clause for each reason why the job has fewer workers than it wants."""
    occupied = {worker.slot for worker in job.workers.values()}
    empty = [slot for slot, use in job.slots.items() if use.is_open and slot not in occupied]
    spent = [slot for slot in empty if job.slots[slot].restarts >= job.config.restarts]
    starting = [worker_name(job, worker) for worker in job.newcomers() if not worker.is_elastic]
    clauses = []
    if spent and job.config.on_failure == "slot":
        names = listed(slot_name(job, slot) for slot in spent)
        clauses.append(f"the restart budget of {names} is used up (--restarts {job.config.restarts})")
    if starting:
        clauses.append(f"{listed(starting)} did not enter the elastic function")
    banned = [host for host in job.bans if job.is_banned(host)]
    if banned:
        clauses.append(f"{listed(banned)} {'is' if len(banned) == 1 else 'are'} excluded after failures")
    if job.target < job.config.min_np and not job.config.fills_slots:
        clauses.append("workers that were asked to leave are not replaced")
    open_slots = sum(use.is_open for use in job.slots.values())
    if job.config.max_restarts is not None and job.generation is None:  # no slot is opened before there are enough
        agents = [agent for agent in job.agents.values() if agent.is_connected and not agent.is_draining]
        open_slots = max(open_slots, sum(agent.slots for agent in agents))
    needed = max(job.target, job.config.num_proc if job.generation is None else job.config.min_np)
    if open_slots < needed:
        clauses.append(f"the agents offer only {counted(open_slots, 'slot')} for {needed} workers")
    return "; ".join(clauses) or "no worker has replaced them"
