"""What all chaos runs, jobs of the gallery and soak runs have come to, added up: `make chaos-report`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.soak import RESULTS as SOAKS
from tests.chaos.run import RESULTS as CHAOS
from tests.gallery.plan import parse
from tests.gallery.run import RESULTS as GALLERY


def summary(lines: Iterable[dict[str, Any]]) -> str:
    """Of the lines that run.py wrote. Seeds count once for each number of hosts and of spares."""
    jobs = list(lines)
    minutes = sum(job["seconds"] for job in jobs) / 60
    seeds = {(job["hosts"], job["spares"], job["seed"]) for job in jobs}
    violated = [job for job in jobs if job["violations"]]
    faults: Counter[str] = sum((Counter(job["faults"]) for job in jobs), Counter())
    said = [
        f"{len(jobs)} jobs of {len(seeds)} seeds in {minutes:.0f} minutes; {sum(faults.values())} faults, "
        f"{sum(job['deaths'] for job in jobs)} workers ended, {len(violated)} jobs with violations",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(faults.items(), key=lambda item: (-item[1], item[0]))),
    ]
    for job in violated:
        where = f" on {job['hosts']} hosts" if job["hosts"] else ""
        said += ["", f"{job['date']}, seed {job['seed']}{where}: {job['plan']}"]
        said += [f"- {violation}" for violation in job["violations"]]
    return "\n".join(said)


def gallery(lines: Iterable[dict[str, Any]]) -> str:
    """Of the lines that the gallery's run.py wrote."""
    jobs = list(lines)
    happened = [job for job in jobs if job["happened"]]
    faults = Counter(fault.kind.split()[0] for job in happened for fault in parse(job["plan"]))
    violated = Counter(job["body"] for job in jobs if job["violations"])
    said = [
        f"{len(jobs)} jobs of {len({job['body'] for job in jobs})} loop bodies with {sum(faults.values())} faults at "
        f"their lines, {sum(violated.values())} jobs with violations",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(faults.items(), key=lambda item: (-item[1], item[0]))),
    ]
    if violated:
        said += ["", *(f"- {body}: {count} jobs with violations" for body, count in sorted(violated.items()))]
    return "\n".join(said)


def soaks(lines: Iterable[dict[str, Any]]) -> str:
    """Of the lines that benchmarks/soak.py wrote: those with equal flags and times between kills in one row."""
    alike: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for soak in lines:
        alike.setdefault((soak["every_s"], " ".join(soak["flags"])), []).append(soak)
    said = [
        "| a kill every | flags | soaks | minutes | kills | samples, of those possible | longest stall | violations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (every_s, flags), each in sorted(alike.items(), reverse=True):
        minutes, kills = sum(soak["minutes"] for soak in each), sum(soak["kills"] for soak in each)
        ratios = [100 * soak["ratio"] for soak in each]
        low, high = f"{min(ratios):.0f}", f"{max(ratios):.0f}"
        said.append(
            f"| {every_s:g} s | {flags} | {len(each)} | {minutes:.0f} | {kills} "
            f"| {low if low == high else f'{low} to {high}'} % | {max(s['longest_stall_s'] for s in each):.2f} s "
            f"| {sum(len(soak['violations']) for soak in each)} |"
        )
    return "\n".join(said)


def main() -> None:
    for path, write, target in (
        (CHAOS, summary, "chaos"),
        (GALLERY, gallery, "gallery"),
        (SOAKS, soaks, "soak"),
    ):
        if path.exists():
            print(write(json.loads(line) for line in path.read_text().splitlines()), end="\n\n")
        else:
            print(f"there is no {path}; `make {target}` writes it\n")


if __name__ == "__main__":
    main()
