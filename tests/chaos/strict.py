"""Jobs in strict mode under random kills, hangs, joins and restarts at another size: the hash of each must be that of a
process that trains alone.

    python -m tests.chaos.strict --seed 1 --jobs 50
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from farandole.testing.running_job import RunningJob
from tests.integration.test_strict_mode import hashes
from tests.scripts.strict_job import MODELS
from tests.support.jobs import SCRIPTS

SCRIPT = SCRIPTS / "strict_job.py"
_JOB_S = 120.0
_LONGEST_S = 1.5  # between two faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=50)
    options = parser.parse_args()
    failures = 0
    for number in range(options.jobs):
        seed = options.seed * 1000 + number
        said = try_one(random.Random(seed))
        failures += said.startswith("FAILED")
        print(f"{seed}: {said}", flush=True)
    print(f"{options.jobs - failures} of {options.jobs} jobs have the same bits as a process alone")
    return int(failures > 0)


def try_one(draw: random.Random) -> str:
    """Run one job, and again from its checkpoint when no holder of its state was left. Returns what happened, beginning
    with FAILED if it has other bits, or none."""
    model, size = draw.choice(list(MODELS)), draw.randint(2, 4)
    words = ["--model", model, "--shards", str(draw.choice([4, 6, 8, 12])), "--epochs", "12"]
    more = ["--micro", "3"] if draw.random() < 0.3 else []
    where = draw.choice([["--transport", "shm"], ["--transport", "tcp"], ["-H", f"localhost:{size - 1},127.0.0.1:1"]])
    faults = [draw.choice(["kill", "kill", "hang"]) for _ in range(draw.randint(1, 3))]
    is_resumed = draw.random() < 0.4
    how = [*draw.choice([[], ["--ddp"]]), "--audit", draw.choice(["0.01", "1"])]
    with tempfile.TemporaryDirectory() as folder:
        kept = ["--checkpoint", f"{folder}/kept", "--checkpoint-every", "3steps"]
        flags = ["-np", str(size), "--restarts", "10", "--detection-budget", "0.5", *where, *kept]
        story = f"{model} {' '.join([*words[2:4], *more, *how])}, {size} workers, {where[1]}, {', '.join(faults)}"
        found = _run(flags, [*words, *more, *how, "--step-s", "0.1"], Path(folder), draw, faults, is_resumed)
        if is_resumed or "The state of the job is lost" in found:
            other = draw.randint(1, 4)
            story += f", restart with {other}"
            found = _run(["-np", str(other), *kept], [*words, *more, *how], Path(folder), draw, [], False)
        expected = hash_alone(*words, *more)
        outcome = "ok" if found and set(hashes(found)) == {expected} else f"FAILED, not {expected}: {found}\n"
    return f"{outcome}: {story}"


def _run(
    flags: list[str], words: list[str], folder: Path, draw: random.Random, faults: list[str], is_ended: bool
) -> str:
    """Run the job with its faults; `is_ended`: kill the launcher after them. Returns what it has printed."""
    records = Path(tempfile.mkdtemp(dir=folder))
    output = records / "output"
    with RunningJob(flags, SCRIPT, words, records, output) as running:
        running.wait_until(lambda latest: len(latest) > 0, _JOB_S)
        for fault in faults:
            time.sleep(draw.uniform(0.2, _LONGEST_S))
            latest = running.latest()
            if latest and running.process.poll() is None:
                victim = latest[draw.choice(sorted(latest))]["pid"]
                try:
                    running.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                except ProcessLookupError:
                    continue
        if is_ended:
            time.sleep(draw.uniform(0.2, _LONGEST_S))
            running.process.kill()
            running.process.wait()
            time.sleep(1.0)  # the guard ends the workers
        else:
            running.wait(_JOB_S)
    return output.read_text()


@cache
def hash_alone(*words: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=True)
    return hashes(done.stdout)[0]


if __name__ == "__main__":
    sys.exit(main())
