"""The proof from a sample ledger about the weights: each worker has applied each step once, and all had the same
state. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from farandole.training.ledger.records import Applied, Differed, GenerationKey, Missed, Opened, Record, Started, name_of


@dataclass
class _WorkerHistory:
    """The progress of one worker, by its files; `last` is None where some lines are missing."""

    key: GenerationKey | None = None
    last: int | None = None
    part: int = -1


@dataclass
class WeightsStory:
    """The history of the weights, from all lines of a ledger, those of one file after the other."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    _workers: dict[str, _WorkerHistory] = field(default_factory=dict)  # by the stem of their files
    _members: dict[tuple[GenerationKey, int], str] = field(default_factory=dict)  # by generation and rank
    _digests: dict[tuple[GenerationKey, int], dict[int, list[str]]] = field(default_factory=dict)  # by attempt: names
    _differed: dict[tuple[GenerationKey, int], Differed] = field(default_factory=dict)

    def add_record(self, file: str, record: Record | None) -> None:
        stem = file.rpartition("-")[0]
        worker, name = self._workers.setdefault(stem, _WorkerHistory()), stem.rpartition("-")[0] or stem
        if isinstance(record, Opened):
            if record.part != worker.part + 1:
                worker.last = None  # a file between them is missing
            worker.part = record.part
        elif isinstance(record, Missed):
            worker.last = None
        elif isinstance(record, Started):
            self._members[record.key, record.rank] = name
            self._start(worker, name, record)
        elif isinstance(record, Applied):
            self._apply(worker, name, record)
        elif isinstance(record, Differed):
            self._differed.setdefault((record.key, record.step), record)

    def _start(self, worker: _WorkerHistory, name: str, record: Started) -> None:
        if record.key == worker.key:
            return  # each file of a worker begins with it
        is_same_job = worker.key is not None and worker.key[0] == record.key[0]
        if is_same_job and worker.last is not None and record.copied is False and record.step != worker.last + 1:
            self.problems.append(
                f"{name} had applied steps up to {worker.last}, and began {name_of(record.key)} at step {record.step} "
                f"without a copy of another worker's state"
            )
        worker.key, worker.last = record.key, record.step - 1

    def _apply(self, worker: _WorkerHistory, name: str, record: Applied) -> None:
        if worker.key == record.key and worker.last is not None:
            if record.step <= worker.last:
                self.problems.append(f"{name} applied step {record.step} again")
            elif record.step > worker.last + 1:
                skipped = (
                    f"steps {worker.last + 1} to {record.step - 1}"
                    if record.step > worker.last + 2
                    else (f"step {worker.last + 1}")
                )
                self.problems.append(f"{name} applied step {record.step} without {skipped}")
        worker.last = record.step
        if record.updates == 0 and not record.is_skipped:
            self.problems.append(f"{name} counted step {record.step}, but its weights did not change")
        elif record.updates > 1:
            self.problems.append(f"step {record.step} was applied {record.updates} times to the weights of {name}")
        if record.digest:
            found = self._digests.setdefault((record.key, record.step), {})
            found.setdefault(record.digest, []).append(name)

    def conclude(self) -> None:
        """Report which workers had other weights, and until when."""
        for (key, step), record in sorted(self._differed.items()):
            who = ", ".join(self._members.get((key, rank), f"rank {rank}") for rank in record.ranks)
            further = record.objects - 1
            more = f" and {further} more tensor{'s' if further > 1 else ''}" if further else ""
            source = self._members.get((key, record.source), f"rank {record.source}")
            if not record.ranks:
                self.remarks.append(
                    f"{record.name}{more} is computed from each worker's own samples, and is not compared"
                )
                continue
            text = f"the workers found before step {step} that {record.name}{more} of {who} differed from {source}'s"
            # Buffers may be computed from each worker's own samples, as BatchNorm's statistics are.
            (self.problems if record.is_trained else self.remarks).append(text)
        begun: tuple[tuple[str, ...], int, int] | None = None
        for (key, step), found in sorted(self._digests.items()):
            if len(found) == 1 or any((key, later) in self._differed for later in (step, step + 1)):
                continue  # equal, or reported above
            others = tuple(sorted(_minority(found)))
            if begun is not None and begun[0] == others:
                begun = (others, begun[1], step)
                continue
            self._report(begun)
            begun = (others, step, step)
        self._report(begun)

    def _report(self, begun: tuple[tuple[str, ...], int, int] | None) -> None:
        if begun is not None:
            who, first, last = begun
            self.problems.append(
                f"the state of {', '.join(who)} differed from that of the others before step {first}"
                + (f", and still before step {last}" if last > first else "")
            )


def _minority(found: dict[int, list[str]]) -> list[str]:
    """Return the workers whose digest differs from the most frequent one; with ties, the digest of the first file
    counts."""
    right = max(found.values(), key=len)
    return [name for names in found.values() if names is not right for name in names]
