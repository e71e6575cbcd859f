"""What Farandole adds to `import torch` in every program: torch's search for entry points, and what ours does.

python -m benchmarks.import_time --turns 40

Three processes take turns, in another order each time: `off` has TORCH_DEVICE_BACKEND_AUTOLOAD=0, `search` lets torch
search for entry points and hides Farandole's, and `loaded` loads it. The table has wall time and CPU time of the import
statement, and the differences within each turn. An import takes about a second, and its noise is larger than these
differences: so the parts are also measured by themselves, inside of the import (`the search`, `our entry point`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence

WAYS = ("off", "search", "loaded")

_IMPORT = """
import importlib.metadata, json, sys, time

def now():
    return time.perf_counter(), time.process_time()

def since(begin):
    return [1e3 * (end - start) for start, end in zip(begin, now())]

class Timed:
    def __init__(self, entry):
        self.entry, self.name = entry, entry.name

    def load(self):
        begin = now()
        call = self.entry.load()

        def timed():
            call()
            found["our entry point"] = since(begin)

        return timed

def entry_points(**names):
    begin = now()
    entries = every(**names)
    found["the search"] = since(begin)
    return [Timed(each) if each.name == "farandole" else each for each in entries if each.name != hidden]

every, found = importlib.metadata.entry_points, {}
hidden = "farandole" if sys.argv[1] == "search" else ""
importlib.metadata.entry_points = entry_points
begin = now()
import torch
found["import"] = since(begin)
assert ("farandole" in sys.modules) == (sys.argv[1] == "loaded"), "is Farandole installed in this environment?"
print(json.dumps(found))
"""

Times = dict[str, list[float]]  # wall and CPU time in milliseconds, by what takes it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    measured = measure(options.turns, options.seed)
    print(f"import torch, {options.turns} turns: median ms [quartiles]")
    for number, kind in enumerate(("wall", "cpu")):
        for way in WAYS:
            print(f"{kind:4} {way:21} {_summary([each['import'][number] for each in measured[way]])}")
        for one, other in (("loaded", "search"), ("search", "off"), ("loaded", "off")):
            pairs = zip(measured[one], measured[other], strict=True)
            differences = [a["import"][number] - b["import"][number] for a, b in pairs]
            print(f"{kind:4} {f'{one} - {other}':21} {_summary(differences)}")
        for part in ("the search", "our entry point"):
            print(f"{kind:4} {part:21} {_summary([each[part][number] for each in measured['loaded']])}")


def measure(turns: int, seed: int) -> dict[str, list[Times]]:
    """Return what was measured by way, one entry for each turn."""
    order = random.Random(seed)
    found: dict[str, list[Times]] = {way: [] for way in WAYS}
    for way in WAYS:
        _import_torch(way)  # so that all files are in the page cache, and all modules are compiled
    for _ in range(turns):
        for way in order.sample(WAYS, len(WAYS)):
            found[way].append(_import_torch(way))
    return found


def _import_torch(way: str) -> Times:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0" if way == "off" else "1"}
    command = [sys.executable, "-c", _IMPORT, way]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: Times = json.loads(done.stdout)
    return times


def _summary(values: Sequence[float]) -> str:
    lower, median, upper = statistics.quantiles(values, n=4)
    return f"{median:8.2f} [{lower:.2f}, {upper:.2f}]"


if __name__ == "__main__":
    main()
