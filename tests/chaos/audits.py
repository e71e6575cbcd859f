"""Audits of strict mode in real jobs: each flipped bit of an audited shard is found, and its worker is named; and none
is ever accused without one.

    python -m tests.chaos.audits --seed 1 --jobs 50 --quiet 100000
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time

from tests.chaos.strict import hash_alone
from tests.integration.test_shard_audits import NAMED, SCRIPT, hashes
from tests.scripts.strict_job import GLOBAL_BATCH, MODELS, SAMPLES

STEPS_OF_EPOCH = -(-SAMPLES // GLOBAL_BATCH)
_WORKERS = 3  # of a quiet job, each of which audits one shard in each step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=50, help="jobs with a flipped bit")
    parser.add_argument("--quiet", type=int, default=0, help="shards that are audited in jobs without one")
    options = parser.parse_args()
    failures = 0
    for number in range(options.jobs):
        seed = options.seed * 1000 + number
        said = flip_one(random.Random(seed))
        failures += said.startswith("FAILED")
        print(f"{seed}: {said}", flush=True)
    if options.jobs:
        print(f"{options.jobs - failures} of {options.jobs} flips were found, and their workers named", flush=True)
    for model in MODELS if options.quiet else ():
        said = train_quietly(model, options.quiet // len(MODELS) + 1)
        failures += said.startswith("FAILED")
        print(said, flush=True)
    return int(failures > 0)


def flip_one(draw: random.Random) -> str:
    """Run a job in which one bit flips. Returns what happened, beginning with FAILED if that was not found out."""
    model, size = draw.choice(list(MODELS)), draw.randint(2, 4)
    words = ["--model", model, "--shards", str(size), *draw.choice([[], ["--micro", "6"]])]
    where = draw.choice([["--transport", "shm"], ["--transport", "tcp"], ["-H", f"localhost:{size - 1},127.0.0.1:1"]])
    # With micro-batches each worker has several shards, of which the audit may miss the one with the flip.
    kind = draw.choice(["once", "always", "random"]) if size > 2 else draw.choice(["once", "random"])
    if "--micro" in words and kind == "once":
        kind = "random"
    # The second step of a job is rehearsed: a difference there is found by the worker itself.
    culprit, step = draw.randrange(size), draw.choice([0, *range(2, 12)])
    flip = f"w{culprit}:{step}:{kind}:{draw.choice(['own', 'again'])}"
    found = _run(["-np", str(size), *where], [*words, "--audit", "1", "--flip", flip])
    expected, named = {hash_alone(*words)}, {worker for worker, *_ in re.findall(NAMED, found)}
    story = f"{' '.join(words)}, {size} workers, {where[1]}, {flip}"
    if "flipped" not in found or named != {f"w{culprit}"} or hashes(found) != expected:
        return f"FAILED: {story}: {found}"
    return f"ok: {story}"


def train_quietly(model: str, shards: int) -> str:
    """Run a job in which so many shards are audited."""
    epochs = -(-shards // (_WORKERS * STEPS_OF_EPOCH))
    began_s = time.monotonic()
    words = ["--model", model, "--shards", str(_WORKERS), "--epochs", str(epochs), "--audit", "1"]
    found = _run(["-np", str(_WORKERS)], words)
    count, took_s = epochs * STEPS_OF_EPOCH * _WORKERS, time.monotonic() - began_s
    is_quiet = "1 generation, 0 workers lost" in found and "strict mode" not in found
    if f"after {epochs * STEPS_OF_EPOCH} steps" not in found or not is_quiet:
        return f"FAILED: {model}: {found}"
    return f"{model}: {count:,} shards audited in {took_s:.0f} s, no false alarm"


def _run(flags: list[str], words: list[str]) -> str:
    command = [sys.executable, "-m", "farandole", "run", *flags, "--restarts", "3"]
    done = subprocess.run([*command, sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
