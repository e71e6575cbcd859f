"""Reports of failed connections, which are hints, never verdicts. An exit ends connections too, and so does an abort.

If no exit explains a report, the same members regroup, which makes new connections. If that does not help twice in a
row, a smallest set of workers that covers the reported links is stopped, always the same set for the same reports. It
is stopped at once when probes have proved the links to be broken (link_probes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from farandole.coordinator import link_probes, regroup
from farandole.coordinator.job import Job, LinkTrouble, Worker
from farandole.coordinator.transition import Transition
from farandole.events import LinksDistrusted
from farandole.messages import LinkBroken

# Time in seconds within which an exit explains a failed connection: the kernel needs up to 150 ms to tear down the
# memory of a worker before its exit is seen.
EXIT_EXPLAINS_S = 0.5
MOST_RETRIES = 2


def link_broken(transition: Transition, reporter: Worker, hint: LinkBroken) -> None:
    """Remember a report about the running generation; an abort, or the loss of one of the two workers, explains it.

    A static script cannot regroup: there the failed collective raises, which ends the reporter soon enough.
    """
    job = transition.job
    is_running = job.is_elastic and not job.is_released and (job.change is None or job.change.is_planned)
    if job.generation is None or hint.number != job.generation.number or not is_running:
        return
    survivors = {worker.name: worker for worker in job.survivors()}
    peer = survivors.get(hint.peer)
    if peer is None or peer.name == reporter.name or reporter.name not in survivors:
        return
    trouble = job.links
    deadline_s = transition.now_s + EXIT_EXPLAINS_S if trouble.deadline_s is None else trouble.deadline_s
    link = (min(reporter.name, peer.name), max(reporter.name, peer.name))
    transition.change(links=replace(trouble, hints=trouble.hints | {link}, deadline_s=deadline_s))


def judge(transition: Transition) -> None:
    """Act on links that are proved to be broken, and on reports that no exit has explained in time."""
    verdict_s = transition.job.links.verdict_s
    if verdict_s is not None and transition.now_s >= verdict_s:
        _stop_for_broken(transition)
    if transition.job.links.verdict_s is None:
        _judge_hints(transition)


def deadline(job: Job) -> float | None:
    """Return when `judge` has to run next."""
    trouble = job.links
    return trouble.deadline_s if trouble.verdict_s is None else trouble.verdict_s


def _stop_for_broken(transition: Transition) -> None:
    job = transition.job
    ending = _ending(job)
    broken = [link for link in link_probes.broken_links(job, transition.now_s) if ending.isdisjoint(link)]
    links = link_probes.spread_to_hosts(job, broken, transition.now_s)
    cover = cover_but_one_holder(job, links)
    if cover:
        transition.change(links=LinkTrouble(retries=job.links.retries))  # the exits lead to a regroup for all
        _stop(transition, broken, cover, is_proved=True)
    else:
        # All links work again; but a worker that reported a failed connection waits for an order.
        transition.change(links=replace(job.links, findings={}, asked=frozenset(), verdict_s=None))


def _stop(transition: Transition, links: Collection[tuple[str, str]], cover: Sequence[str], is_proved: bool) -> None:
    named = tuple(f"{one}-{other}" for one, other in sorted(links))
    number = transition.job.generation.number if transition.job.generation else 0
    transition.log(LinksDistrusted(number, named, tuple(cover), is_proved))
    how = "were broken" if is_proved else "kept failing"
    for name in cover:
        transition.kill(name, 0.0, f"its connections {how} ({', '.join(named)})")


def _ending(job: Job) -> set[str]:
    """Return the workers whose code raised or that are being killed: they are about to exit, which explains their
    links."""
    return {worker.name for worker in job.survivors() if worker.raised or worker.killed_for}


def _judge_hints(transition: Transition) -> None:
    job = transition.job
    if job.links.deadline_s is None or transition.now_s < job.links.deadline_s:
        return
    proof_s = link_probes.suspected_until(job, transition.now_s)
    if proof_s is not None and transition.now_s < proof_s:
        transition.change(
            links=replace(job.links, deadline_s=proof_s)
        )  # the report of the other end is better than a new trial
        return
    if _ending(job):  # its exit leads to a regroup, and makes all others fail, one after the other
        transition.change(links=replace(job.links, deadline_s=transition.now_s + EXIT_EXPLAINS_S))
        return
    hints = job.links.hints
    named = tuple(f"{one}-{other}" for one, other in sorted(hints))
    if job.links.retries < MOST_RETRIES:
        transition.change(links=LinkTrouble(retries=job.links.retries + 1))
        regroup.abort(transition, f"connections failed between living workers ({', '.join(named)})")
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
