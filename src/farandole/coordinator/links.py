"""Reports of failed connections: hints, never verdicts. An exit ends connections too, and so does an abort.

If no exit explains a report, the same members regroup, which makes new connections. If that does not help
twice in a row, a smallest set of workers that covers the reported links is stopped, always the same one for
the same reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from farandole.coordinator import regroup
from farandole.coordinator.draft import Draft
from farandole.coordinator.job import LinkTrouble, Worker
from farandole.events import LinksDistrusted
from farandole.messages import LinkBroken

# Within this time an exit explains a failed connection: the kernel needs up to 150 ms to tear down the memory
# of a worker before its exit is seen.
EXIT_EXPLAINS_S = 0.5
MOST_RETRIES = 2


def link_broken(draft: Draft, reporter: Worker, hint: LinkBroken) -> None:
    """Remember a report about the running generation; an abort, or one of the two being gone, explains it.

    A static script cannot regroup: there the failed collective raises, which ends the reporter soon enough.
    """
    job = draft.job
    is_running = job.is_elastic and not job.is_released and (job.change is None or job.change.is_planned)
    if job.generation is None or hint.number != job.generation.number or not is_running:
        return
    survivors = {worker.name: worker for worker in job.survivors()}
    peer = survivors.get(hint.peer)
    if peer is None or peer.name == reporter.name or reporter.name not in survivors:
        return
    trouble = job.links
    deadline_s = draft.now_s + EXIT_EXPLAINS_S if trouble.deadline_s is None else trouble.deadline_s
    link = (min(reporter.name, peer.name), max(reporter.name, peer.name))
    draft.change(links=replace(trouble, hints=trouble.hints | {link}, deadline_s=deadline_s))


def judge(draft: Draft) -> None:
    """Act on reports that nothing has explained in time."""
    job = draft.job
    if job.links.deadline_s is None or draft.now_s < job.links.deadline_s:
        return
    # A worker whose code raised, or that is being killed, is about to exit: that explains its links.
    ending = {worker.name for worker in job.survivors() if worker.raised or worker.killed_for}
    hints = frozenset(link for link in job.links.hints if ending.isdisjoint(link))
    named = tuple(f"{one}-{other}" for one, other in sorted(hints))
    if not hints:
        draft.change(links=LinkTrouble(retries=job.links.retries))
    elif job.links.retries < MOST_RETRIES:
        draft.change(links=LinkTrouble(retries=job.links.retries + 1))
        regroup.abort(draft, f"connections failed between living workers ({', '.join(named)})")
    else:
        draft.change(links=LinkTrouble())
        by_worth = sorted(job.survivors(), key=lambda worker: worker.synced == 0)
        cover = smallest_cover(hints, [worker.name for worker in by_worth])
        number = job.generation.number if job.generation else 0
        draft.log(LinksDistrusted(number, named, tuple(cover)))
        for name in cover:
            draft.kill(name, 0.0, f"its connections kept failing ({', '.join(named)})")


def smallest_cover(links: Collection[tuple[str, str]], by_worth: Sequence[str]) -> list[str]:
    """A smallest set of workers that touches every link, rather of those that come late in `by_worth`.

    Exact for links of one ring, which form paths or a circle: whoever has one link only is spared and its
    neighbour taken. Where all have more, the one with most links is taken.
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
