"""The main job of Farandole, to watch: three workers train, one is killed, one joins, nothing is lost.

Starts `farandole run -np 3` on examples/digits/train.py, kills a worker with SIGKILL a third through an epoch,
waits for its replacement to join, and proves from the workers' own records what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from proof import Proof

HERE = Path(__file__).parent
SAMPLES = 1437  # images in the training set; see train.digits()
KILL_IN_EPOCH = 3
WANTED_ACCURACY = 0.97


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes of each worker")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farandole-demo-") as folder:
        return _demo(Path(folder), options.epochs, options.num_workers)


def _demo(folder: Path, epochs: int, num_workers: int) -> int:
    command = [sys.executable, "-m", "farandole", "run", "-np", "3", sys.executable, str(HERE / "train.py")]
    command += ["--epochs", str(epochs), "--num-workers", str(num_workers), "--records", str(folder)]
    say("training on 1,437 handwritten digits with 3 workers; one of them will be killed in a moment")
    job = subprocess.Popen(command)
    killer = Killer(folder)
    thread = threading.Thread(target=killer.run, daemon=True)
    thread.start()
    try:
        exit_code = job.wait(timeout=300)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        job.send_signal(signal.SIGINT)
        job.wait()
        raise
    killer.stop.set()
    thread.join()
    if exit_code != 0 or killer.victim is None:
        say(f"the job ended with exit code {exit_code}; victim: {killer.victim}")
        return exit_code or 1
    return _summary(Proof(folder), epochs, killer)


class Killer:
    """Watches the records, and kills one worker a third through an epoch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.stop = threading.Event()
        self.victim: int | None = None
        self.killed_ns = 0
        self.generation = 0
        self.survivors: set[int] = set()

    def run(self) -> None:
        while not self.stop.wait(0.002):
            latest = self._latest()
            chosen = [r for r in latest if r["rank"] == 1 and "before" in r]
            if len(latest) < 3 or not chosen or chosen[0]["epoch"] < KILL_IN_EPOCH:
                continue
            if chosen[0]["before"] % 60 < 20:  # 60 steps an epoch
                continue
            self.victim, self.generation = chosen[0]["pid"], chosen[0]["generation"]
            self.survivors = {r["pid"] for r in latest} - {self.victim}
            self.killed_ns = time.monotonic_ns()
            os.kill(self.victim, signal.SIGKILL)
            say(f"kill -9 {self.victim} (rank 1), in epoch {chosen[0]['epoch'] + 1}")
            return

    def _latest(self) -> list[dict[str, int]]:
        """The newest complete record of each worker."""
        latest = []
        for path in self._folder.glob("worker-*.jsonl"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                lines = file.read().split(b"\n")
            if len(lines) > 2:
                latest.append(json.loads(lines[-2]))
        return latest


def _summary(proof: Proof, epochs: int, killer: Killer) -> int:
    result = proof.epochs(SAMPLES)
    ends = proof.ends()
    first = proof.first_steps(killer.generation + 1, killer.survivors)
    recovery = sorted((ns - killer.killed_ns) / 1e6 for ns in first.values())
    sizes = proof.generations()
    joined = [g for g, size in sizes.items() if g > killer.generation and size == 3]
    checks = {
        "every sample of every epoch trained exactly once": result.is_exact and result.complete == epochs,
        "the survivors went on, in the same processes": len(recovery) == 2,
        "a worker joined": bool(joined),
        "all workers end with the same parameters": len({end["parameters"] for end in ends}) == 1,
        "scheduler and step counter agree": all(e["scheduler_last_epoch"] == e["end"] for e in ends),
        f"test accuracy >= {WANTED_ACCURACY:.0%}": all(e["accuracy"] >= WANTED_ACCURACY for e in ends),
    }
    print()
    say("what happened, from the workers' own records:")
    say(f"  epochs x samples         {result.complete} x {SAMPLES:,}, {proof.steps():,} steps")
    say(f"  samples lost             {sum(map(len, result.lost.values()))}")
    say(f"  samples repeated         {sum(map(len, result.repeated.values()))}")
    say(f"  steps redone             {proof.redone()}")
    say(f"  median step              {proof.median_step_ms():.1f} ms")
    say(f"  kill -9 -> next step     {', '.join(f'{ms:.0f} ms' for ms in recovery)}")
    if joined:
        pauses = ", ".join(f"{ms:.0f} ms" for ms in proof.pauses_at(joined[0]))
        say(f"  pause when one joined    {pauses}")
    say(f"  workers by generation    {' -> '.join(str(size) for size in sizes.values())}")
    say(f"  test accuracy            {min((e['accuracy'] for e in ends), default=0.0):.2%}")
    for what, holds in checks.items():
        say(f"  {'yes' if holds else 'NO '}  {what}")
    return 0 if all(checks.values()) else 1


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
