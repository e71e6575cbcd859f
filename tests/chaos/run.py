"""Chaos by seed: jobs, faults, and what was violated. `make chaos SEED=1 MINUTES=10`; `make chaos-report` sums it up.

Each job's line is appended to a file as soon as it has ended. What a job wrote is kept when it broke a promise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from farandole import __version__
from farandole.testing.faults import parse
from farandole.testing.running_job import RunningJob
from tests.chaos.case import Case, case_of
from tests.chaos.disturbed_job import Outcome, run_case

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first job; each has the next one")
    parser.add_argument("--minutes", type=float, default=5.0, help="no job begins after that; 0: one job")
    parser.add_argument("--hosts", type=int, default=0, help="of a lab; 0: on this machine, 3: three hosts")
    parser.add_argument("--spares", type=int, default=0, help="workers that wait beside those that train")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file that is appended to")
    parser.add_argument("--plan", type=parse, help="this plan instead of the one that follows from the seed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the current job ends, too
    until, failed, seed = time.monotonic() + 60 * options.minutes, [], options.seed
    while True:
        case = case_of(seed, options.hosts, options.spares)
        case = case if options.plan is None else dataclasses.replace(case, plan=options.plan)
        print(case, flush=True)
        outcome = run_one(case, options.results)
        failed += [seed] if outcome.violations else []
        seed += 1
        if time.monotonic() >= until:
            break
    print(f"{seed - options.seed} seeds, {len(failed)} with violations{': ' if failed else ''}{failed or ''}")
    return 1 if failed else 0


def run_one(case: Case, results: Path | None, kind: type[RunningJob] = RunningJob) -> Outcome:
    """Run a case, say what came of it, and write that down. `kind`: as in run_case()."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{case.seed}-"))
    try:
        outcome = run_case(case, folder, kind)
    except BaseException:
        print(f"interrupted; what the job wrote is in {folder}", file=sys.stderr)
        raise
    said = f"{outcome.generations} generations, {outcome.redone} steps done again, {outcome.seconds:.1f} s"
    print(f"  {said}: {'VIOLATED' if outcome.violations else 'exact'}", flush=True)
    for violation in outcome.violations:
        print(f"  - {violation}", flush=True)
    if outcome.violations:
        more = f" --hosts {case.shape.hosts}" * bool(case.shape.hosts)
        more += f" --spares {case.shape.spares}" * bool(case.shape.spares)
        print(f"  what it wrote is in {folder}; the last lines it said:")
        for name in ["output", *(path.name for path in sorted(folder.glob("agent-*")))]:
            lines = (folder / name).read_text(errors="replace").splitlines() if (folder / name).exists() else []
            print("\n".join(f"    {name}: {line}" for line in lines[-40:]))
        print(f"  to repeat it: {sys.executable} -m tests.chaos.run --seed {case.seed} --minutes 0{more}", flush=True)
    else:
        shutil.rmtree(folder)
    if results is not None:
        with results.open("a") as file:
            file.write(json.dumps(as_line(case, outcome)) + "\n")
    return outcome


def as_line(case: Case, outcome: Outcome) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        **case.as_json(),
        "seconds": round(outcome.seconds, 1),
        "generations": outcome.generations,
        "redone": outcome.redone,
        "deaths": outcome.deaths,
        "faults": dict(outcome.happened),
        "violations": outcome.violations,
    }


if __name__ == "__main__":
    sys.exit(main())
