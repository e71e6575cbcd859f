"""Memory of a worker: with DDP, started by torchrun, and with Farandole, started by `farandole run`.

What counts is what a worker has of its own and its part of what is shared between processes: anonymous memory and
shared memory, proportionally (PSS). The code of libraries does not: whose part that is depends on who else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import TRANSPORTS, run_processes, run_worker

_WORKERS, _STEPS, _MODEL = 2, 4, "deep"


def table(transports: Sequence[str]) -> list[dict[str, Any]]:
    print(f"\nmemory of a worker, 25 M parameters with Adam, {_WORKERS} workers; mean over the workers")
    ddp = _ddp_mb()
    rows = [{"way": "ddp", "mb": ddp}]
    print(f"{'DDP':>15} {ddp:8.1f} MB", flush=True)
    for transport in transports:
        if transport != "hierarchical":  # for several hosts
            mb = run_worker("memory", _WORKERS, transport, ["--way", "farandole"])["mb"]
            rows.append({"way": "farandole", "transport": transport, "mb": mb, "over_ddp": mb / ddp})
            print(f"{TRANSPORTS[transport]:>15} {mb:8.1f} MB {100 * (mb / ddp - 1):+6.1f} %", flush=True)
    return rows


def _ddp_mb() -> float:
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_WORKERS}"]
        arguments = ["-m", "benchmarks.memory", "--way", "ddp", "--folder", folder]
        return float(run_processes(command, arguments, Path(folder))["mb"])


def main() -> None:
    """One worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["ddp", "farandole"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()

    import torch

    from benchmarks import ways
    from benchmarks.models import TASKS

    torch.set_num_threads(1)
    task = TASKS[_MODEL]
    if options.way == "farandole":
        import farandole as fd

        fd.init()
        rank, size = fd.rank(), fd.size()
        step, state = ways.farandole(task)
        fd.elastic.run(lambda state: _take(step, options.folder, rank, size))(state)
    else:
        torch.distributed.init_process_group("gloo")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        _take(ways.ddp(task), options.folder, rank, size)
        torch.distributed.destroy_process_group()


def _take(step: Any, folder: Path, rank: int, size: int) -> None:
    """Rank 0 writes the mean. After each worker's last step it waits for the others by stepping with them."""
    for _ in range(_STEPS):
        step()
    (folder / f"{rank}.part").write_text(json.dumps(own_mb()))
    os.rename(folder / f"{rank}.part", folder / f"{rank}.json")
    step()  # it ends when all have written: they take part in it afterwards
    if rank == 0:
        parts = [json.loads((folder / f"{each}.json").read_text()) for each in range(size)]
        (folder / "result.json").write_text(json.dumps({"mb": sum(parts) / size}))


def own_mb() -> float:
    """Megabytes of this process: proportional set size without files."""
    sizes = {
        name.rstrip(":"): int(rest[0])
        for name, *rest in map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    }
    return (sizes["Pss_Anon"] + sizes["Pss_Shmem"]) * 1024 / 1e6


if __name__ == "__main__":
    main()
