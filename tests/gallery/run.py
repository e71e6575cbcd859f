"""Loop bodies as people write them, and a fault at a line of each: `make gallery`, or

    python -m tests.gallery.run --seed 1 --jobs 100 [--body NAME ...]
    python -m tests.gallery.run --body amp-plain --plan "w1 kill at amp.py:37#5" [--workers 3 --transport tcp]
    python -m tests.gallery.run --body amp-plain --every-line w1 [--library]
    python -m tests.gallery.run --seed 1 --jobs 100 --strict            in strict mode: the bits of one worker
    python -m tests.gallery.run --seed 1 --jobs 100 --every 20          longer jobs that lose a worker every 20 steps

Each job appends a line to a file as soon as it has ended. A body and a seed say all that happens to a job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tests.gallery.catalogue import BODIES, Body
from tests.gallery.job import Gallery, Outcome
from tests.gallery.plan import Case, draw, draw_losses, every_line, parse

_SAMPLES_OF_LONG_JOBS = 600
SHARDS = 6  # in strict mode; the global batches have 12 samples
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gallery.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first job; each has the next one")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument(
        "--body", nargs="+", default=[], metavar="NAME", help="only these; a name ending in - is a prefix"
    )
    parser.add_argument("--plan", type=parse, help="this in place of what follows from the seed")
    parser.add_argument("--workers", type=int, default=3, help="with --plan")
    parser.add_argument("--transport", default="tcp", help="with --plan")
    parser.add_argument("--restarts", type=int, default=0, help="with --plan")
    parser.add_argument("--every-line", metavar="WORKER", help="one job for each line, at which this worker is killed")
    parser.add_argument("--every", type=int, metavar="STEPS", help="longer jobs, in which a worker is lost so often")
    parser.add_argument("--library", action="store_true", help="with --every-line: the library's lines")
    parser.add_argument("--strict", action="store_true", help="strict mode: the bits of one worker, in every job")
    parser.add_argument("--lanes", type=int, default=1, help="jobs beside each other")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help="also bodies that compile, or start processes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file that is appended to")
    parser.add_argument("--list", action="store_true", help="the names of the bodies")
    options = parser.parse_args()
    if options.every:
        os.environ["GALLERY_SAMPLES"] = str(_SAMPLES_OF_LONG_JOBS)
    chosen = _chosen(options.body, options.slow)
    if options.strict:
        chosen = [body for body in chosen if body.fits_strict_mode]
    if options.list:
        print("\n".join(body.name for body in chosen))
        return 0
    if options.lanes > 1 and options.lane is None:
        command = [sys.executable, "-m", "tests.gallery.run", *sys.argv[1:], "--lane"]
        lanes = [subprocess.Popen([*command, str(lane)]) for lane in range(options.lanes)]
        return max(lane.wait() for lane in lanes)
    failed: Counter[str] = Counter()
    done = 0
    gallery = Gallery(SHARDS if options.strict else 0)
    for number, (body, seed, case) in enumerate(_cases(options, chosen, gallery)):
        if options.lane is not None and number % options.lanes != options.lane:
            continue
        outcome = gallery.run(body, case() if callable(case) else case)
        done += 1
        failed[body.name] += bool(outcome.violations)
        _tell(body, seed, case() if callable(case) else case, outcome, options)
    bad = {name: count for name, count in failed.items() if count}
    print(f"{done} jobs, {sum(bad.values())} with violations{': ' if bad else ''}{bad or ''}")
    return 1 if bad else 0


def _chosen(names: list[str], slow: bool) -> list[Body]:
    found = []
    for name in names:
        matching = [
            body for key, body in BODIES.items() if key == name or (name.endswith("-") and key.startswith(name))
        ]
        if not matching:
            raise SystemExit(f"no body is called {name!r}; --list shows them")
        found += matching
    return found or [body for body in BODIES.values() if slow or not body.is_slow]


def _cases(
    options: argparse.Namespace, bodies: list[Body], gallery: Gallery
) -> Iterator[tuple[Body, int | None, object]]:
    if options.plan is not None:
        for body in bodies:
            yield body, None, Case(options.workers, options.transport, options.restarts, options.plan)
    elif options.every_line:
        for body in bodies:
            for fault in every_line(gallery.peace(body).hits, options.every_line, options.library):
                yield body, None, Case(options.workers, options.transport, options.restarts, (fault,))
    else:
        if options.every:
            bodies = [body for body in bodies if not body.horovod]  # the commit rule counts no steps
        for seed in range(options.seed, options.seed + options.jobs):
            body = bodies[seed % len(bodies)]
            yield body, seed, lambda body=body, seed=seed: drawn(gallery, body, seed, options.every)


def drawn(gallery: Gallery, body: Body, seed: int, every: int | None = None) -> Case:
    """The job of a body and a seed; one that loses a worker every so many steps."""
    peace = gallery.peace(body)
    if not peace.hits:
        return Case(3, "shm", 0, ())
    if every and peace.record is not None:
        return draw_losses(f"{body.name} {seed}", peace.hits, every, int(peace.record["steps"]))
    return draw(f"{body.name} {seed}", peace.hits)


def _tell(body: Body, seed: int | None, case: Case, outcome: Outcome, options: argparse.Namespace) -> None:
    mark = "VIOLATED" if outcome.violations else "exact"
    print(f"{body.name} {seed if seed is not None else ''} {case}  [{outcome.seconds:.1f} s] {mark}", flush=True)
    for violation in outcome.violations:
        print(f"  - {violation}", flush=True)
    if outcome.folder is not None:
        print(f"    what it wrote is in {outcome.folder}", flush=True)
    line = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "body": body.name,
        "seed": seed,
        "workers": case.workers,
        "transport": case.transport,
        "restarts": case.restarts,
        "spares": case.spares,
        **({"shards": SHARDS} if options.strict else {}),
        "plan": "; ".join(map(str, case.faults)),
        "happened": outcome.happened,
        "generations": outcome.generations,
        "seconds": outcome.seconds,
        "violations": outcome.violations,
    }
    with options.results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=os.path.dirname(__file__)
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
