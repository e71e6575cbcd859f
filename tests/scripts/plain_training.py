"""A plain script, which knows nothing of Farandole: it writes what torchrun tells it, and ends as its arguments say.

    plain_training.py FOLDER [ACTION:RANK:ATTEMPT ...]

A worker of this rank and attempt (`*`: any) carries the action out; all others exit with code 0, or wait until they are
stopped where some worker of their attempt does not.

    exit7    exit with code 7             kill     die by SIGKILL
    raise    raise ValueError             record   raise it in a function with torch's @record
    late     exit with code 0 at once, without waiting
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

_LONGEST_S = 60.0


def main(folder: Path, plans: list[str]) -> None:
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    seen = {"rank": rank, "size": size, "attempt": attempt, "pid": os.getpid(), "arguments": sys.argv[1:]}
    seen["threads"] = os.environ.get("OMP_NUM_THREADS")
    seen["error_file"] = os.environ["TORCHELASTIC_ERROR_FILE"]
    unfinished = folder / f".{attempt}.{rank}"
    unfinished.write_text(json.dumps(seen))
    unfinished.rename(folder / f"attempt{attempt}.rank{rank}")
    print(f"rank {rank} of {size}, attempt {attempt}\n", end="", flush=True)  # in one write
    _wait_for(folder, [f"attempt{attempt}.rank{each}" for each in range(size)])
    now = [plan.split(":") for plan in plans]
    now = [(action, of) for action, of, when in now if when in ("*", str(attempt))]
    for action, of in now:
        if of in ("*", str(rank)):
            act(action)
            return
    if any(action != "late" for action, _ in now):
        time.sleep(_LONGEST_S)


def act(action: str) -> None:
    if action == "exit7":
        sys.exit(7)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise ValueError("bad batch")
    if action == "record":
        from torch.distributed.elastic.multiprocessing.errors import record

        record(fail)()


def fail() -> None:
    raise ValueError("bad batch")


def _wait_for(folder: Path, names: list[str]) -> None:
    deadline_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline_s and not all((folder / name).exists() for name in names):
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [argument for argument in sys.argv[2:] if ":" in argument])
