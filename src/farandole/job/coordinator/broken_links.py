"""Broken links between living workers: their reports, and the probes that find the side at fault. Pure."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from farandole.base.events.generation_events import LinksDistrusted
from farandole.base.wire.link_messages import LinkBroken, Probe, Probed
from farandole.job.coordinator import regroup
from farandole.job.coordinator.job import Finding, Job, LinkTrouble, Worker
from farandole.job.coordinator.transition import Transition

MOST_RETRIES = 2

# Time in seconds within which an exit explains a failed connection: the kernel needs up to 150 ms to tear down the
# memory of a worker before its exit is seen.
EXIT_EXPLAINS_S = 0.5


def link_broken(transition: Transition, reporter: Worker, hint: LinkBroken) -> None:
    """Remember a report about the running generation; an abort, or the loss of one of the two workers, explains it.

    A static script cannot regroup: there the failed collective raises, which ends the reporter soon enough.
    """
    job = transition.job
    if not _is_about_now(job, hint.number):
        return
    if hint.peer == reporter.name or not (job.is_survivor(hint.peer) and job.is_survivor(reporter.name)):
        return
    trouble = job.links
    deadline_s = transition.now_s + EXIT_EXPLAINS_S if trouble.deadline_s is None else trouble.deadline_s
    link = (min(reporter.name, hint.peer), max(reporter.name, hint.peer))
    left = {**trouble.left, reporter.name: hint.detail} if hint.direction == "left" else trouble.left
    transition.change(links=replace(trouble, hints=trouble.hints | {link}, left=left, deadline_s=deadline_s))


def _is_about_now(job: Job, number: int) -> bool:
    """Return whether generation `number` is the one that trains now."""
    return job.is_elastic and not (job.is_released or job.is_regrouping) and number == job.generation_number > 0


def judge_links(transition: Transition) -> None:
    """Act on links that are proved to be broken, and on reports that no exit has explained in time."""
    verdict_s = transition.job.links.verdict_s
    if verdict_s is not None and transition.now_s >= verdict_s:
        _stop_for_broken(transition)
    if transition.job.links.verdict_s is None:
        _judge_hints(transition)


def next_judgement(job: Job) -> float | None:
    trouble = job.links
    return trouble.deadline_s if trouble.verdict_s is None else trouble.verdict_s


def _stop_for_broken(transition: Transition) -> None:
    job = transition.job
    ending = _ending(job)
    broken = [link for link in broken_links(job, transition.now_s) if ending.isdisjoint(link)]
    links = spread_to_hosts(job, broken, transition.now_s)
    cover = cover_but_one_holder(job, links)
    if cover:
        transition.change(links=LinkTrouble(retries=job.links.retries))  # the exits lead to a regroup for all
        _stop(transition, broken, cover, is_proved=True)
    else:
        # All links work again; but a worker that reported a failed connection waits for an order.
        transition.change(links=replace(job.links, findings={}, asked=frozenset(), verdict_s=None))


def _stop(transition: Transition, links: Collection[tuple[str, str]], cover: Sequence[str], is_proved: bool) -> None:
    named = tuple(f"{one}-{other}" for one, other in sorted(links))
    number = transition.job.generation_number
    between = tuple(where for link in sorted(links) if (where := _between_hosts(transition.job, *link)))
    transition.log(LinksDistrusted(number, named, tuple(cover), is_proved, between))
    how = "were broken" if is_proved else "kept failing"
    for name in cover:
        transition.kill(name, 0.0, f"its connections {how} ({', '.join(named)})")


def _between_hosts(job: Job, one: str, other: str) -> str:
    """Return where the two workers can be reached, if they are on different hosts; otherwise nothing."""
    ends = [job.workers[one], job.workers[other]]
    hosts = [job.host_of(end) for end in ends]
    if hosts[0] == hosts[1]:
        return ""
    return " and ".join(f"{end.name} on {host} at {end.address}" for end, host in zip(ends, hosts, strict=True))


def _ending(job: Job) -> set[str]:
    """Return the workers whose code raised or that are being killed: they are about to exit, which explains their
    links."""
    return {worker.name for worker in job.survivors() if worker.raised or worker.killed_for}


def _judge_hints(transition: Transition) -> None:
    job = transition.job
    if job.links.deadline_s is None or transition.now_s < job.links.deadline_s:
        return
    proof_s = suspected_until(job, transition.now_s)
    if proof_s is not None and transition.now_s < proof_s:
        # The report of the other end is better than a new trial.
        transition.change(links=replace(job.links, deadline_s=proof_s))
        return
    if _ending(job):  # its exit leads to a regroup, and makes all others fail, one after the other
        transition.change(links=replace(job.links, deadline_s=transition.now_s + EXIT_EXPLAINS_S))
        return
    hints = job.links.hints
    named = tuple(f"{one}-{other}" for one, other in sorted(hints))
    if job.links.retries < MOST_RETRIES:
        transition.change(links=LinkTrouble(retries=job.links.retries + 1))
        left = [f"{name}: {why}" for name, why in sorted(job.links.left.items())]
        # The connections of those that have left fail at their neighbours.
        reason = "; ".join(left) or f"connections failed between living workers ({', '.join(named)})"
        regroup.abort(transition, reason)
    else:
        transition.change(links=LinkTrouble())
        _stop(transition, hints, cover_but_one_holder(job, hints), is_proved=False)


def cover_but_one_holder(job: Job, links: Collection[tuple[str, str]]) -> list[str]:
    """Return a smallest set of members that touches every link, preferably members without state and of high rank. One
    holder of the state always stays, at any cost in other members: without it the job would be lost."""
    members = job.survivors()
    by_worth = [worker.name for worker in sorted(members, key=lambda worker: worker.synced == 0)]
    cover = smallest_cover(links, by_worth)
    holders = [name for name in by_worth if job.workers[name].synced and not job.workers[name].killed_for]
    if not holders or not set(cover).issuperset(holders):
        return cover
    emergency_writer = holders[0]
    neighbours = {name for link in links if emergency_writer in link for name in link} - {emergency_writer}
    others = smallest_cover(
        [link for link in links if emergency_writer not in link and neighbours.isdisjoint(link)], by_worth
    )
    return sorted({*neighbours, *others}, key=by_worth.index)


def smallest_cover(links: Collection[tuple[str, str]], by_worth: Sequence[str]) -> list[str]:
    """Return a smallest set of workers that touches every link, preferably those late in `by_worth`.

    Exact for links of one ring, which form paths or a circle: a worker with a single link is spared and its neighbour
    is taken. Where all have more, the worker with the most links is taken.
    """
    worth = {name: place for place, name in enumerate(by_worth)}
    left, cover = set(links), []
    while left:
        degree = Counter(name for link in left for name in link)
        spared = [name for name in degree if degree[name] == 1]
        if spared:
            first = min(spared, key=lambda name: worth[name])
            taken = next(name for link in left if first in link for name in link if name != first)
        else:
            taken = max(degree, key=lambda name: (degree[name], worth[name]))
        cover.append(taken)
        left = {link for link in left if taken not in link}
    return sorted(cover, key=lambda name: worth[name])


# Probes prove which links between living workers are broken -----------------------------------------------------------
#
# A worker whose connection makes no progress, or has failed, tries to connect to its neighbours anew. That takes both
# directions and nothing but the two kernels: a busy peer answers, and so does a slow link. Still, the report of one
# worker proves nothing: the peer, or its host, may have died just now, which its agent handles. A link is broken when
# the workers at both its ends live and neither can reach the other.


_VERDICT_PARTS = 8
"""The part of the detection budget (1 / 8) for which the reports of the other members are awaited after a link is
proved to be broken: all broken links must be known, so that the fewest workers are stopped."""


def note_probe_result(transition: Transition, reporter: Worker, message: Probed) -> None:
    """Remember the probe results of a member of the running generation, and ask the other ends of links that seem
    broken."""
    job = transition.job
    if not (_is_about_now(job, message.number) and job.is_survivor(reporter.name)):
        return

    def living(names: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in names if name != reporter.name and job.is_survivor(name))

    finding = Finding(transition.now_s, living(message.reachable), living(message.unreachable))
    trouble = job.links
    asked = trouble.asked - {reporter.name}
    transition.change(links=replace(trouble, findings={**trouble.findings, reporter.name: finding}, asked=asked))
    if finding.unreachable or trouble.verdict_s is not None:  # else no link is suspected that was not before
        _ask_the_other_ends(transition, finding, message.number)
        _set_verdict(transition)


def broken_links(job: Job, now_s: float) -> list[tuple[str, str]]:
    """Return the links whose ends both live and cannot reach each other, by the ranks of their workers."""
    fresh = _fresh(job, now_s)
    ranks = job.generation.ranks if job.generation is not None else {}
    found = [
        (one, other)
        for one, finding in fresh.items()
        for other in finding.unreachable
        if job.is_survivor(one) and job.is_survivor(other) and ranks[one] < ranks[other]
        if other in fresh and one in fresh[other].unreachable
    ]
    return sorted(found, key=lambda link: (ranks[link[0]], ranks[link[1]]))


def suspected_until(job: Job, now_s: float) -> float | None:
    """Return until when the other end of a link that seems broken may still confirm it; None: no worker is asked."""
    fresh = _fresh(job, now_s)
    times = [found.at_s for found in fresh.values() if found.unreachable - fresh.keys()]
    return max(times) + job.config.detection_budget_s / 2 if times else None


def spread_to_hosts(job: Job, broken: Iterable[tuple[str, str]], now_s: float) -> set[tuple[str, str]]:
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
    members_on: defaultdict[str, list[int]] = defaultdict(list)  # by rank
    for rank, worker in enumerate(members):
        members_on[host[worker.name]].append(rank)
    for one, other in map(tuple, ways):
        for ends in itertools.product(members_on[one], members_on[other]):
            links.add((members[min(ends)].name, members[max(ends)].name))
    return links


def _set_verdict(transition: Transition) -> None:
    """Set the time of the verdict once a link is proved to be broken: now, if all members have reported."""
    job, trouble = transition.job, transition.job.links
    if not broken_links(job, transition.now_s):
        return
    fresh = _fresh(job, transition.now_s)
    have_all_reported = all(worker.name in fresh for worker in job.each_survivor())
    verdict_s = transition.now_s + (0.0 if have_all_reported else job.config.detection_budget_s / _VERDICT_PARTS)
    if trouble.verdict_s is None or verdict_s < trouble.verdict_s:
        transition.change(links=replace(trouble, verdict_s=verdict_s))


def _ask_the_other_ends(transition: Transition, finding: Finding, number: int) -> None:
    """Ask the workers at the other ends to probe. They may be busy and may not have noticed the failure."""
    trouble, fresh = transition.job.links, _fresh(transition.job, transition.now_s)
    silent = sorted(finding.unreachable - fresh.keys() - trouble.asked)
    if silent:
        transition.change(links=replace(trouble, asked=trouble.asked | set(silent)))
        transition.send_to_workers(silent, Probe(number))


def _fresh(job: Job, now_s: float) -> dict[str, Finding]:
    """Return the results that are not older than a detection budget: a link that was broken for a moment is not
    broken."""
    budget_s = job.config.detection_budget_s
    return {name: found for name, found in job.links.findings.items() if now_s - found.at_s <= budget_s}
