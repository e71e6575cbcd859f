"""What the order of the samples costs: `python -m benchmarks.data_order`. One process; loader processes in one part.

per index       from the loader's cursor to the list of indices that is fetched next; processor time
begin           a new loader or sampler and one reset, beside a plain sampler that keeps its order in lists
far             a reset at 10^12 samples, and the bytes of what is saved
next batch      from the end of a regroup to the first batch for the new world, with two loader processes
"""

from __future__ import annotations

import json
import pickle
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

import farandole as fd
from farandole.training.data.augmentation import KeyedSampler
from farandole.training.data.index_stream import IndexStream
from farandole.training.data.partition import BatchLayout
from farandole.training.data.sample_order import Shuffled

GLOBAL_BATCH = 256
SIZES = [1_280_000, 10**9, 10**12]
Row = dict[str, Any]


def main() -> None:
    print(json.dumps(measure(), indent=1))


def measure(regroups: int = 50) -> Row:
    """All parts, printed as they come."""
    results: Row = {"per_index": []}
    print("\norder of the samples: ns per index, global batches of 256, up to the list of indices")
    print(f"{'samples':>17} {'workers':>7} {'ns per index':>12} {'median':>7}")
    for samples in SIZES:
        for workers in (1, 2, 4):
            row = per_index(samples, workers)
            results["per_index"].append(row)
            print(f"{samples:17,d} {workers:7d} {row['best_ns']:12.1f} {row['median_ns']:7.1f}", flush=True)
    fd.init()  # for ElasticSampler, which asks for the number of workers
    results["begin"] = begin(10**7)
    print("\nconstruct and reset, 10,000,000 samples: " + _said(results["begin"]), flush=True)
    results["far"] = far(10**12)
    print("\n1,000,000,000,000 samples: " + _said(results["far"]), flush=True)
    results["next_batch"] = [next_batch(name, items, regroups) for name, items in ITEMS.items()]
    for row in results["next_batch"]:
        print(f"\nnext batch after a regroup: {_said(row)}", flush=True)
    fd.shutdown()
    return results


# The parts ----------------------------------------------------------------------------------------------------


def per_index(samples: int, workers: int, indices: int = 300_000, rounds: int = 15) -> Row:
    """What rank 0 of so many workers spends on one index, as its loader takes them: looking it up, dividing it into
    batches, making global batches and lists. The best and the median of the rounds, the first one with the warming
    up."""
    layout = BatchLayout(samples, GLOBAL_BATCH)
    index_stream = IndexStream(layout, Shuffled().bind(layout, 1))
    index_stream.restart(layout, 0, 0, 0, workers)
    sampler, take = iter(KeyedSampler(index_stream, 1)), index_stream.on_way.popleft
    batches = indices * workers // GLOBAL_BATCH
    spent_ns = []
    for _ in range(rounds):
        indexed, before_ns = 0, time.process_time_ns()
        for _ in range(batches):
            next(sampler)
            indexed += len(take().indices)
        spent_ns.append((time.process_time_ns() - before_ns) / indexed)
    row: Row = {"samples": samples, "workers": workers}
    return row | {"best_ns": round(min(spent_ns), 1), "median_ns": round(statistics.median(spent_ns), 1)}


def begin(samples: int) -> Row:
    """Milliseconds; ours the median of several, the lists' once."""
    loader_ms = _median_ms(lambda: _reset(fd.elastic.DataLoader(Numbers(samples), GLOBAL_BATCH)))
    sampler_ms = _median_ms(lambda: fd.elastic.ElasticSampler(Numbers(samples)).reset())
    lists_ms = _time_ms(lambda: ListSampler(samples, rank=0, workers=2).reset())
    return {
        "lists_ms": round(lists_ms),
        "loader_ms": round(loader_ms, 3),
        "sampler_ms": round(sampler_ms, 3),
        "lists / loader": round(lists_ms / loader_ms),
        "lists / sampler": round(lists_ms / sampler_ms),
    }


def far(samples: int) -> Row:
    """A reset in the middle of an epoch, until the indices of the next batch are there; and bytes of the state,
    as a checkpoint in msgpack has them, and pickled."""
    loader = fd.elastic.DataLoader(Numbers(samples), GLOBAL_BATCH)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "cursor": samples // 2})
    sampler = fd.elastic.ElasticSampler(Numbers(samples))
    sampler.processed_num = samples // 2

    def reset_sampler() -> None:
        sampler.reset()
        sampler.get_indices(0, GLOBAL_BATCH // 2)

    row: Row = {
        "loader_reset_ms": round(_median_ms(lambda: _reset(loader)), 3),
        "sampler_reset_ms": round(_median_ms(reset_sampler), 3),
    }
    for name, state in (("loader", loader.state_dict()), ("sampler", sampler.state_dict())):
        row[f"{name}_msgpack_bytes"] = len(msgspec.msgpack.encode(state))
        row[f"{name}_pickle_bytes"] = len(pickle.dumps(state))
    return row


def next_batch(name: str, items: torch.utils.data.Dataset[Any], regroups: int, regroup_s: float = 0.02) -> Row:
    """A world of two becomes one of three, or three two, when the loader processes have made all that they may
    make ahead: until the next batch, collated, is there. What is on its way for the old world comes first and is
    dropped."""
    loader = fd.elastic.DataLoader(items, GLOBAL_BATCH, num_workers=2)
    loader.set_world(0, 2)
    batches, times_ms = iter(loader), []
    for number in range(regroups):
        for _ in range(4):
            next(batches)
            loader.commit(loader.global_batch)
        next(batches)  # the batch that comes again
        time.sleep(regroup_s)

        def go_on(world: int = 2 + number % 2) -> None:
            loader.set_world(0, world)
            next(batches)

        times_ms.append(_time_ms(go_on))
        loader.commit(loader.global_batch)
    loader.close()
    row: Row = {"items": name, "regroups": regroups}
    return row | {"median_ms": round(statistics.median(times_ms), 1), "worst_ms": round(max(times_ms), 1)}


# What is measured ---------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[int]):
    """As many samples as it is told, each its own number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Rows(Numbers):
    """Each sample 64 numbers and a label."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return torch.zeros(64), index


ITEMS = {"numbers": Numbers(SIZES[0]), "64 floats and a label": Rows(SIZES[0])}


class ListSampler:
    """An elastic sampler as one writes it without thinking of large data sets: all indices in a list, shuffled anew at
    each reset, what was processed cut off, filled up with the first ones to the same number for each worker."""

    def __init__(self, samples: int, rank: int, workers: int) -> None:
        self.samples, self.rank, self.workers = samples, rank, workers
        self.epoch = self.processed = 0
        self.reset()

    def reset(self) -> None:
        indices = list(range(self.samples))
        random.Random(self.epoch).shuffle(indices)
        self.remaining = indices[self.processed :]
        self.remaining += self.remaining[: -len(self.remaining) % self.workers]

    def __iter__(self) -> Iterator[int]:
        return iter(self.remaining[self.rank :: self.workers])


def _reset(loader: fd.elastic.DataLoader) -> None:
    """As a regroup does it, and on to the indices of the next batch."""
    loader.set_world(1, 2)
    next(iter(loader._index_stream))
    loader._index_stream.on_way.clear()


def _median_ms(function: Callable[[], object], times: int = 101) -> float:
    return statistics.median(_time_ms(function) for _ in range(times))


def _time_ms(function: Callable[[], object]) -> float:
    before_s = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - before_s)


def _said(row: Row) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else f'{value:,}'}" for name, value in row.items()
    )


if __name__ == "__main__":
    main()
