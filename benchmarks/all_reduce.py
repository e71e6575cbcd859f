"""How long one all-reduce takes: our TCP ring and torch's Gloo, interleaved in the same processes.

    python benchmarks/all_reduce.py --ranks 2 4 --sizes 4 4096 102400 1048576 26214400

Each rank is a process with one torch thread. For each size the two take turns, round by round, so that a
noisy moment hits both; a round is a few all-reduces back to back, timed together. Prints the median and the
slowest round of rank 0 in milliseconds per all-reduce. It measures and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from farandole.collectives.listener import DataListener
from farandole.collectives.ring_builder import RingBuilder
from farandole.collectives.transport import Transport
from farandole.membership import Address, GenerationId, Peer, Placement
from farandole.messages import Start

_NOTE = bytes(64)
_CONNECT_TIMEOUT_S = 30.0
_ROUND_BYTES = 4 << 20  # small tensors are reduced several times per round
_MOST_PER_ROUND = 20

Row = dict[str, float | int | str]


def main() -> None:
    arguments = _parse()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        rows += measure(ranks, arguments.sizes, arguments.rounds)
    print_table(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def print_table(rows: list[Row]) -> None:
    print(f"{'ranks':>5} {'bytes':>10} {'ring ms':>9} {'worst':>9} {'gloo ms':>9} {'worst':>9} {'gloo/ring':>9}")
    for row in rows:
        print(
            f"{row['ranks']:>5} {row['bytes']:>10} {row['ring_ms']:>9.3f} {row['ring_worst_ms']:>9.3f} "
            f"{row['gloo_ms']:>9.3f} {row['gloo_worst_ms']:>9.3f} {row['gloo_ms'] / row['ring_ms']:>9.2f}"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the world")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[4, 4096, 102400, 1 << 20, 25 << 20],
        help="bytes of the float32 tensor, multiples of 4",
    )
    parser.add_argument("--rounds", type=int, default=31, help="rounds for each size")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def measure(ranks: int, sizes: list[int], rounds: int) -> list[Row]:
    """Start the ranks, tell each its neighbours, and collect what rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    key = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(ranks)]
        processes = [
            context.Process(
                target=_rank,
                args=(rank, ranks, sizes, rounds, key, f"{folder}/store", theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        addresses: list[Address] = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(addresses)
        rows: list[Row] = pipes[0][0].recv()
        for process in processes:
            process.join()
    return rows


def _rank(rank: int, ranks: int, sizes: list[int], rounds: int, key: bytes, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    listener = DataListener()
    pipe.send(listener.address)
    ring = _ring(listener, pipe.recv(), rank, key)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    rows = [_compare(ring, size, rounds) for size in sizes]
    if rank == 0:
        pipe.send(rows)
    ring.barrier()
    dist.destroy_process_group()
    ring.close()
    listener.close()


def _ring(listener: DataListener, addresses: list[Address], rank: int, key: bytes) -> Transport:
    size = len(addresses)

    def peer(other: int) -> Peer:
        return Peer(f"w{other % size}", other % size, addresses[other % size])

    start = Start(
        GenerationId(1, 1, 1, "benchmark"),
        Placement(rank, size, rank, size, 0, 1),
        peer(rank - 1),
        peer(rank + 1),
        founding=True,
        data_key=key,
    )
    return RingBuilder(listener, start, f"w{rank}", _CONNECT_TIMEOUT_S).build()


def _compare(ring: Transport, size: int, rounds: int) -> Row:
    """Both in turns on one tensor; sums of zeros stay zeros, however often they are taken."""
    tensor = torch.zeros(size // 4)
    repeats = max(1, min(_MOST_PER_ROUND, _ROUND_BYTES // size))
    ring_ms, gloo_ms = [], []
    for _ in range(rounds + 2):
        ring.barrier()
        ring_ms.append(_time_ms(lambda: ring.all_reduce(tensor, _NOTE), repeats))
        ring.barrier()
        gloo_ms.append(_time_ms(lambda: dist.all_reduce(tensor), repeats))
    return {
        "ranks": ring.size,
        "bytes": size,
        "ring_ms": statistics.median(ring_ms[2:]),
        "ring_worst_ms": max(ring_ms[2:]),
        "gloo_ms": statistics.median(gloo_ms[2:]),
        "gloo_worst_ms": max(gloo_ms[2:]),
    }


def _time_ms(operation: Callable[[], object], repeats: int) -> float:
    """Milliseconds per operation."""
    begin_s = time.perf_counter()
    for _ in range(repeats):
        operation()
    return (time.perf_counter() - begin_s) * 1e3 / repeats


if __name__ == "__main__":
    main()
