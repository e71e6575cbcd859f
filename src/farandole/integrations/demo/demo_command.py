"""`farandole demo`: three workers train, one is killed, one joins, nothing is lost.

Starts `farandole run -np 3` on train_digits.py, kills a worker with SIGKILL a third through an epoch,
lets its replacement join, and proves what happened: from the sample ledger that each sample was trained once, from
the workers' own records how long it took.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.base.command_parser import Parser
from farandole.integrations.demo.digits import TRAINED, has_handwritten
from farandole.integrations.demo.run_picture import draw
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob
from farandole.training.ledger.check import check
from farandole.training.ledger.findings import Findings, format_findings
from farandole.training.ledger.proving import Folder

SCRIPT = Path(__file__).parent / "train_digits.py"
STEPS_PER_EPOCH = 60
WANTED_ACCURACY = 0.97


@dataclass(frozen=True)
class Kill:
    """Who was killed, when (monotonic nanoseconds), in which generation, and who was left."""

    pid: int
    at_ns: int
    generation: int
    survivors: set[int]


def demo_command(arguments: Sequence[str]) -> int:
    """Run the demo. Return 0 if everything that it shows holds, 1 if not, or the exit code of its job. Raises
    SystemExit as argparse does."""
    options = demo_parser().parse_args(arguments)
    words = ["--epochs", str(options.epochs), "--num-workers", str(options.num_workers)]
    kind = "handwritten digits (scikit-learn's)" if has_handwritten() else "digits that torch has drawn"
    say(f"training on {TRAINED:,} {kind} with 3 workers; one of them will be killed soon")
    flags = ["-np", "3", "--progress", "never"]  # the demo itself writes to the same terminal
    with (
        tempfile.TemporaryDirectory(prefix="farandole-demo-") as folder,
        RunningJob([*flags, "--sample-ledger", f"{folder}/ledger"], SCRIPT, words, Path(folder)) as job,
    ):
        try:
            kill = kill_one(job, options.kill_in_epoch)
            exit_code = job.wait(timeout_s=300)
        except KeyboardInterrupt:
            return 130
        if exit_code != 0:
            say(f"the job ended with exit code {exit_code}")
            return exit_code
        proof = Proof(Path(folder))
        if options.picture is not None:
            draw(proof.records, kill.pid, kill.at_ns, options.picture)
        return summary(check(Folder(Path(folder) / "ledger")), proof, options.epochs, kill)


def demo_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole demo",
        description="Three workers train, one of them is killed, and its replacement joins. At the end the records of "
        "the workers prove that each sample was trained exactly once. It takes about half a minute. The data are "
        "scikit-learn's handwritten digits; without scikit-learn, digits that torch draws.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=30, metavar="N", help="epochs to train (default: %(default)s)")
    add(
        "--kill-in-epoch",
        type=int,
        default=3,
        metavar="N",
        help="epoch in which a worker is killed, counted from 0 (default: %(default)s)",
    )
    add("--num-workers", type=int, default=0, metavar="N", help="loader processes of each worker (default: none)")
    add("--picture", type=Path, metavar="FILE", help="write a picture of the run to this SVG file")
    return parser


def kill_one(job: RunningJob, epoch: int) -> Kill:
    """Kill rank 1 a third through an epoch."""

    def is_due(latest: dict[int, dict[str, Any]]) -> bool:
        step = latest[1].get("before", 0) if len(latest) == 3 else 0
        return bool(step // STEPS_PER_EPOCH >= epoch and step % STEPS_PER_EPOCH >= STEPS_PER_EPOCH // 3)

    latest = job.wait_until(is_due, timeout_s=120)
    victim = latest[1]["pid"]
    at_ns = job.kill(victim)
    say(f"kill -9 {victim}, which is rank 1, at step {latest[1]['before']}: a third through an epoch")
    return Kill(victim, at_ns, latest[1]["generation"], {latest[rank]["pid"] for rank in (0, 2)})


def summary(ledger: Findings, proof: Proof, epochs: int, kill: Kill) -> int:
    ends, sizes = proof.ends(), proof.generations()
    first = proof.first_steps(kill.generation + 1, kill.survivors)
    recovery = sorted((ns - kill.at_ns) / 1e6 for ns in first.values())
    joined = [g for g, size in sizes.items() if g > kill.generation and size == 3]
    pauses = proof.pauses_at(joined[0]) if joined else []
    checks = {
        "every sample of every epoch was trained exactly once": ledger.is_exact and ledger.whole_epochs() == epochs,
        "the survivors continued in the same processes": len(recovery) == 2,
        "a worker joined while the others trained": bool(joined),
        "all workers ended with the same parameters": len(ends) == 3 and len({e["parameters"] for e in ends}) == 1,
        "the scheduler took as many steps as the optimizer": all(e["scheduler_last_epoch"] == e["end"] for e in ends),
        f"test accuracy is at least {WANTED_ACCURACY:.0%}": all(e["accuracy"] >= WANTED_ACCURACY for e in ends),
    }
    print()
    say("the proof from the sample ledger:")
    for line in format_findings(ledger):
        say(f"  {line}")
    say("the run, from the records of the workers:")
    say(f"  median step              {proof.median_step_ms():.1f} ms")
    say(f"  kill -9 to next step     {', '.join(f'{ms:.0f} ms' for ms in recovery)} (each survivor)")
    say(f"  pause at the join        {', '.join(f'{ms:.0f} ms' for ms in pauses)} (each survivor)")
    say(f"  workers by generation    {' -> '.join(str(sizes[number]) for number in sorted(sizes))}")
    say(f"  test accuracy            {min((end['accuracy'] for end in ends), default=0.0):.2%}")
    for what, holds in checks.items():
        say(f"  {'yes' if holds else 'NO '}  {what}")
    return 0 if all(checks.values()) else 1


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)
