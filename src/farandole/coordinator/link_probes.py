"""Probes prove which links between living workers are broken; link_failures.py then stops the fewest workers.

A worker whose connection makes no progress, or has failed, tries to connect to its neighbours anew. That takes both
directions and nothing but the two kernels: a busy peer answers, and so does a slow link. Still, the report of one
worker proves nothing: the peer, or its host, may have died just now, which its agent handles. A link is broken when the
workers at both its ends live and neither can reach the other. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from farandole.coordinator.job import Finding, Job, Worker
from farandole.coordinator.transition import Transition
from farandole.messages import Probe, Probed

Link = tuple[str, str]

_VERDICT_PARTS = 8
"""The part of the detection budget (1 / 8) for which the reports of the other members are awaited after a link is
proved to be broken: all broken links must be known, so that the fewest workers are stopped."""


def probed(transition: Transition, reporter: Worker, message: Probed) -> None:
    """Remember the probe results of a member of the running generation, and ask the other ends of links that seem
    broken."""
    job = transition.job
    is_running = job.is_elastic and not job.is_released and (job.change is None or job.change.is_planned)
    if job.generation is None or message.number != job.generation.number or not is_running:
        return
    survivors = {worker.name for worker in job.survivors()}
    if reporter.name not in survivors:
        return
    peers = frozenset(survivors - {reporter.name})
    finding = Finding(transition.now_s, peers.intersection(message.reachable), peers.intersection(message.unreachable))
    trouble = job.links
    asked = trouble.asked - {reporter.name}
    transition.change(links=replace(trouble, findings={**trouble.findings, reporter.name: finding}, asked=asked))
    _ask_the_other_ends(transition, finding, message.number)
    _set_verdict(transition, survivors)


def broken_links(job: Job, now_s: float) -> list[Link]:
    """Return the links whose ends both live and cannot reach each other, by the ranks of their workers."""
    fresh = _fresh(job, now_s)
    names = [worker.name for worker in job.survivors()]
    found = []
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            if _denies(fresh, one, other) and _denies(fresh, other, one):
                found.append((one, other))
    return found


def suspected_until(job: Job, now_s: float) -> float | None:
    """Return until when the other end of a link that seems broken may still confirm it; None: no worker is asked."""
    fresh = _fresh(job, now_s)
    times = [found.at_s for found in fresh.values() if found.unreachable - fresh.keys()]
    return max(times) + job.config.detection_budget_s / 2 if times else None


def spread_to_hosts(job: Job, broken: Iterable[Link], now_s: float) -> set[Link]:
    """Return the broken links, and the untried links between the same pairs of hosts: without them the next generation
    would have the same trouble with other workers."""
    members = job.survivors()
    host = {worker.name: job.host_of(worker) for worker in members}
    works = {
        frozenset((host[name], host[peer]))
        for name, found in _fresh(job, now_s).items()
        for peer in found.reachable
        if name in host and peer in host
    }
    links = set(broken)
    ways = {frozenset((host[one], host[other])) for one, other in links if host[one] != host[other]} - works
    for place, one in enumerate(members):
        for other in members[place + 1 :]:
            if frozenset((host[one.name], host[other.name])) in ways and host[one.name] != host[other.name]:
                links.add((one.name, other.name))
    return links


def _set_verdict(transition: Transition, survivors: set[str]) -> None:
    """Set the time of the verdict once a link is proved to be broken: now, if all members have reported."""
    trouble = transition.job.links
    if survivors <= _fresh(transition.job, transition.now_s).keys():
        wait_s = 0.0
    else:
        wait_s = transition.job.config.detection_budget_s / _VERDICT_PARTS
    verdict_s = transition.now_s + wait_s
    if (trouble.verdict_s is None or verdict_s < trouble.verdict_s) and broken_links(transition.job, transition.now_s):
        transition.change(links=replace(trouble, verdict_s=verdict_s))


def _ask_the_other_ends(transition: Transition, finding: Finding, number: int) -> None:
    """Ask the workers at the other ends to probe. They may be busy and may not have noticed the failure."""
    trouble, fresh = transition.job.links, _fresh(transition.job, transition.now_s)
    silent = sorted(finding.unreachable - fresh.keys() - trouble.asked)
    if silent:
        transition.change(links=replace(trouble, asked=trouble.asked | set(silent)))
        transition.tell(silent, Probe(number))


def _fresh(job: Job, now_s: float) -> dict[str, Finding]:
    """Return the results that are not older than a detection budget: a link that was broken for a moment is not
    broken."""
    budget_s = job.config.detection_budget_s
    return {name: found for name, found in job.links.findings.items() if now_s - found.at_s <= budget_s}


def _denies(found: dict[str, Finding], one: str, other: str) -> bool:
    return one in found and other in found[one].unreachable
