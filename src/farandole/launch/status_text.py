"""The status of a job, in words for a terminal. Pure; control_commands.py prints it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farandole.control import HostStatus, Status, WorkerStatus

_EVENTS_SHOWN = 8


def in_words(status: Status) -> list[str]:
    """Return the status as lines of text."""
    lines = [f"job {status.job}: {_headline(status)}"]
    if status.members or status.newcomers:
        lines += ["", *_workers((*status.members, *status.newcomers))]
    if status.hosts:
        lines += ["", *_hosts(status.hosts)]
    there = sum(each.slots for each in status.hosts if not (each.is_drained or each.out_for_s))
    if there < status.wanted:
        missing = status.wanted - there
        lines.append(
            f"waiting for {missing} more slot{'' if missing == 1 else 's'} ({there} of {status.wanted} are there)"
        )
    lines += [
        f"slot {each.slot} on {each.host} is in backoff for {each.for_s:.1f} s more, "
        f"after {each.failures} failures in a row"
        for each in status.backoffs
    ]
    if status.events:
        lines += ["", "last events"]
        lines += [f"  {_ago(event.ago_s):>7} ago  {event.line}" for event in status.events[-_EVENTS_SHOWN:]]
    return lines


def _headline(status: Status) -> str:
    parts = [status.state]
    if status.generation:
        parts.append(f"generation {status.generation}")
    if status.change:
        parts.append(f"change to generation {status.change} under way")
    if status.step is not None:
        parts.append(f"step {status.step}")
    most = "" if status.max_np is None else f", at most {status.max_np}"
    parts.append(f"{len(status.members)} of {status.wanted} workers (at least {status.min_np}{most})")
    if status.spares:
        waiting = sum(each.state == "waits" for each in status.newcomers)
        parts.append(f"{waiting} of {status.spares} spares wait")
    parts.append(f"{status.regroups} regroups" if status.regroups != 1 else "1 regroup")
    return ", ".join(parts)


def _workers(workers: Sequence[WorkerStatus]) -> list[str]:
    rows = [("rank", "worker", "host", "slot", "pid", "state", "step", "restarts left")]
    for each in workers:
        rank = "-" if each.rank is None else str(each.rank)
        pid = str(each.pid) if each.pid else "-"
        step = "-" if each.step is None else str(each.step)
        rows.append((rank, each.worker, each.host, str(each.slot), pid, each.state, step, str(each.restarts_left)))
    return _table(rows)


def _hosts(hosts: Iterable[HostStatus]) -> list[str]:
    rows = [("host", "slots", "workers", "state")]
    rows += [(each.host, str(each.slots), str(each.workers), _host_state(each)) for each in hosts]
    return _table(rows)


def _host_state(host: HostStatus) -> str:
    if host.is_drained:
        return "drained" if host.workers == 0 else "is being drained"
    if host.out_for_s:
        how_long = "for ever" if host.out_for_s < 0 else f"for {host.out_for_s:.0f} s more"
        return f"out {how_long}, after {host.failures} failure{'' if host.failures == 1 else 's'}"
    return "in use" if host.is_connected else "no agent"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ago(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
