"""A worker without torch that writes to its terminal as people do: lines in pieces, lines that are redrawn, colours.
It ends when it is asked to, or when the file that it was given is there, with the exit code that is in it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    stop, number = Path(sys.argv[1]), 0
    while not stop.exists():
        rank = os.environ["RANK"]
        for piece in (f"line {number} ", "of rank ", f"{rank}\n"):
            sys.stdout.write(piece)
            sys.stdout.flush()
        for percent in range(0, 101, 20):
            sys.stderr.write(f"\r{percent}%|{'#' * (percent // 10)}")
            sys.stderr.flush()
        sys.stderr.write("\n")
        sys.stdout.write(f"\x1b[31mred {number}\nstill red\x1b[0m\n")
        number += 1
        time.sleep(0.05)
    print("the last line")
    sys.exit(int(stop.read_text() or 0))


if __name__ == "__main__":
    main()
