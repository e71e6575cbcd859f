"""One worker of the all-reduce benchmark: the transport of its job and Gloo, in turns. all_reduce.py starts it."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import farandole as fd
from benchmarks.turns import slowest, time_ms, turns
from farandole.training.collectives import world

_NOTE = bytes(64)  # what a step's header needs
_ROUND_BYTES = 4 << 20  # small tensors are reduced several times per round
_MOST_PER_ROUND = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes, multiples of 4")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="for each size, after which no turn begins")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    dist.init_process_group(
        "gloo", init_method=f"file://{options.folder}/store", rank=fd.rank(), world_size=fd.size()
    )  # fmt: skip
    rows = [{"bytes": size, **compare(size, options.turns, options.seconds)} for size in options.sizes]
    if fd.rank() == 0:
        used = type(world.current().transport).__name__
        (options.folder / "result.json").write_text(json.dumps({"transport_class": used, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()
    fd.shutdown()


def compare(size: int, most_turns: int, seconds: float) -> dict[str, float]:
    """Milliseconds of one all-reduce on the slowest rank, median of the turns.

    ours, gloo              back to back
    ours_apart, gloo_apart  each after a barrier of our transport, which is not timed
    copy                    of a tensor of the same size, on all ranks at once: what the memory allows
    """
    transport = world.current().transport
    # Sums of zeros stay zeros, however often they are taken; filled, because torch.zeros() has no memory yet.
    tensor, other = torch.empty(size // 4).fill_(0.0), torch.empty(size // 4).fill_(0.0)
    repeats = max(1, min(_MOST_PER_ROUND, _ROUND_BYTES // size))

    def ours() -> None:
        transport.all_reduce(tensor, _NOTE)

    def gloo() -> None:
        dist.all_reduce(tensor)

    def apart(operation: Callable[[], object]) -> float:
        each = []
        for _ in range(repeats):
            transport.barrier()
            each.append(time_ms(operation, 1))
        return statistics.median(each)

    def together(operation: Callable[[], object]) -> float:
        transport.barrier()
        return time_ms(operation, repeats)

    measured: dict[str, Callable[[], float]] = {
        "ours": lambda: together(ours),
        "gloo": lambda: together(gloo),
        "ours_apart": lambda: apart(ours),
        "gloo_apart": lambda: apart(gloo),
        "copy": lambda: together(lambda: other.copy_(tensor)),
    }
    for measure in measured.values():
        measure()
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in turns(most_turns, seconds):
        for name, measure in measured.items():
            times[name].append(measure())
    return {name: statistics.median(slowest(each)) for name, each in times.items()}


if __name__ == "__main__":
    main()
