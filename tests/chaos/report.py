"""What all chaos runs have come to, added up: `make chaos-report`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos.run import RESULTS


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


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    if not path.exists():
        sys.exit(f"there is no {path}; `make chaos` writes it")
    print(summary(json.loads(line) for line in path.read_text().splitlines()))


if __name__ == "__main__":
    main()
