"""The proof, or disproof, from the workers' records (step_records.py) that each epoch trained every sample once."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Epochs:
    """The result for the samples: per epoch, ids that were lost and ids that were repeated."""

    complete: int
    lost: dict[int, list[int]]
    repeated: dict[int, list[int]]

    @property
    def is_exact(self) -> bool:
        return not self.lost and not self.repeated


class Proof:
    """All records of one job.

    A step may have been begun more than once. The attempt that stands is the one of the highest generation in which
    some worker applied it: a worker that applied it in a lower one is gone with its state. A job that was lost as a
    whole may have got further than the one that resumed from its checkpoint, and ended: the steps after that end do not
    stand. The work of a newcomer before its admission, in generation 0, is excluded.
    """

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        for path in sorted(folder.glob("worker-*.jsonl")):
            # The last line of a killed worker may be cut short; the action that it announces never happened.
            lines = path.read_bytes().split(b"\n")
            self.records += [json.loads(line) for line in lines[:-1]]
        if any(record.get("generation") for record in self.records):  # else one process trained alone
            self.records = [record for record in self.records if record.get("generation") != 0]
        self._standing: dict[int, int] = {}
        for record in self.records:
            if "after" in record:
                step, generation = record["after"], record["generation"]
                self._standing[step] = max(generation, self._standing.get(step, 0))
        ends = [end["end"] for end in self.ends()]
        if ends:
            self._standing = {step: number for step, number in self._standing.items() if step < min(ends)}

    def epochs(self, samples: int) -> Epochs:
        """Compare the samples of each epoch with the data set {0, ..., samples - 1}."""
        trained: dict[int, Counter[int]] = defaultdict(Counter)
        for record in self._trained():
            trained[record["epoch"]].update(record["ids"])
        everything = range(samples)
        lost = {e: [i for i in everything if i not in ids] for e, ids in trained.items()}
        repeated = {e: [i for i, times in ids.items() if times > 1] for e, ids in trained.items()}
        return Epochs(
            complete=len(trained),
            lost={epoch: ids for epoch, ids in lost.items() if ids},
            repeated={epoch: ids for epoch, ids in repeated.items() if ids},
        )

    def samples_by_step(self) -> dict[int, list[tuple[int, int]]]:
        """Return for each step that stands, sorted: (epoch, sample) of all the samples that all workers trained in
        it."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for record in self._trained():
            found[record["before"]] += [(record["epoch"], sample) for sample in record["ids"]]
        return {step: sorted(samples) for step, samples in sorted(found.items())}

    def _trained(self) -> Iterator[Record]:
        """Yield the records of local batches whose steps stand."""
        for record in self.records:
            if "before" in record and self._standing.get(record["before"]) == record["generation"]:
                yield record

    def steps(self) -> int:
        """Return the number of optimizer steps that stand."""
        return len(self._standing)

    def redone(self) -> int:
        """Return the number of attempts at a step that do not stand: begun with samples, and repeated in a later
        generation. A rehearsal has no samples: a regroup at the end of an epoch lets everybody's loop body run once,
        without an effect."""
        begun = {(r["before"], r["generation"]) for r in self.records if r.get("ids")}
        return sum(1 for step, generation in begun if self._standing.get(step, generation) != generation)

    def first_steps(self, generation: int, pids: set[int]) -> dict[int, int]:
        """Return for each of the processes the clock at its first applied step at or above a generation."""
        first: dict[int, int] = {}
        for record in self.records:
            if "after" in record and record["generation"] >= generation and record["pid"] in pids:
                first[record["pid"]] = min(record["ns"], first.get(record["pid"], record["ns"]))
        return first

    def pauses_at(self, generation: int) -> list[float]:
        """Return the milliseconds between the last applied step before a generation and the first one in it, for each
        process that took part in both."""
        pauses = []
        for after in self.applied().values():
            before = [r["ns"] for r in after if r["generation"] < generation]
            since = [r["ns"] for r in after if r["generation"] >= generation]
            if before and since:
                pauses.append((min(since) - max(before)) / 1e6)
        return pauses

    def median_step_ms(self) -> float:
        """Return the median of the milliseconds between two applied steps of one process in one generation."""
        gaps: list[float] = [
            (b["ns"] - a["ns"]) / 1e6
            for after in self.applied().values()
            for a, b in itertools.pairwise(after)
            if a["generation"] == b["generation"]
        ]
        return statistics.median(gaps)

    def generations(self) -> dict[int, int]:
        """Return the size by generation, in their order, of the generations that trained."""
        return dict(sorted((r["generation"], r["size"]) for r in self.records if "after" in r))

    def ends(self) -> list[Record]:
        return [record for record in self.records if "end" in record]

    def applied(self) -> dict[tuple[str, int, int], list[Record]]:
        """Return the records of applied steps by worker: its host, its process id there, and since when it has had that
        id."""
        by_worker: dict[tuple[str, int, int], list[Record]] = defaultdict(list)
        for record in self.records:
            if "after" in record:
                by_worker[record.get("host", ""), record["pid"], record.get("since", 0)].append(record)
        return by_worker
