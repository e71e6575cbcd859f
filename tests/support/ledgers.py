"""Ledgers as the workers of a job would write them, without workers: a test says what happens to the job."""

from __future__ import annotations

from collections.abc import Iterable

from farandole.training.data.partition import even_slice
from farandole.training.ledger.check import Line
from farandole.training.ledger.records import (
    FORMAT,
    WHOLE,
    Applied,
    EpochEnded,
    Intent,
    Listed,
    Opened,
    Record,
    Started,
    compact,
    ids_hash,
)

TWO_STREAMS = "streams-2"


class WrittenJob:
    """A job whose members write one file each.

    order, is_carried  of the loader: its name; whether the tail of an epoch is filled from the next one
    left_out  samples of the data set that the samplers of a script have left out of each epoch

    members  in order of rank;  step, epoch, cursor  where the state of all members is
    """

    def __init__(
        self,
        samples: int = 40,
        global_batch_size: int = 10,
        members: Iterable[str] = ("a", "b", "c"),
        order: str = "",
        is_carried: bool = False,
        left_out: int = 0,
    ) -> None:
        self.samples, self.global_batch_size = samples, global_batch_size
        self.order, self.is_carried, self.left_out = order, is_carried, left_out
        self._all = samples + left_out
        self.files: dict[str, list[Record]] = {}
        self.run_id, self.generation = 1, 0
        self.step = self.epoch = self.cursor = 0
        self.members: list[str] = []
        self.regroup(members)

    def regroup(self, members: Iterable[str]) -> None:
        """The next generation has these members; a new one opens its file."""
        self.generation += 1
        self.members = list(members)
        for rank, name in enumerate(self.members):
            if name not in self.files:
                self.files[name] = [Opened(FORMAT, WHOLE, name, "host", 1, 0)]
            key = (self.run_id, self.generation)
            self.files[name].append(
                Started(
                    *key,
                    f"n{key}",
                    rank,
                    len(self.members),
                    self.step,
                    self.epoch,
                    self.cursor,
                    0 if self.order == TWO_STREAMS or self.left_out else self.samples,
                    self.order,
                )
            )
            for epoch in range(self.epoch, self.epoch + 2 if self.left_out else self.epoch):
                left_out = [(self.samples + place + 17 * epoch) % self._all for place in range(self.left_out)]
                self.files[name].append(Listed(*key, epoch, self._all, list(left_out), []))

    def begin(self) -> None:
        """All members are about to contribute to the next step."""
        start, stop = self._batch()
        for rank, name in enumerate(self.members):
            low, high = even_slice(start, stop, rank, len(self.members))
            ids = compact([self.sample_at(position) for position in range(low, high)])
            self.files[name].append(
                Intent(self.run_id, self.generation, self.step, rank, self.epoch, start, stop, low, high, ids)
            )

    def apply(self, by: Iterable[str] | None = None, is_skipped: bool = False) -> None:
        """All members, or those named, apply the step that was begun; the state moves."""
        self.apply_in_vain(self.members if by is None else by, is_skipped)
        self.step, self.cursor = self.step + 1, self._batch()[1]

    def apply_in_vain(self, by: Iterable[str], is_skipped: bool = False) -> None:
        """These apply it, and their state is lost with them."""
        start, stop = self._batch()
        total = ids_hash([self.sample_at(position) for position in range(start, stop)])
        for name in by:
            self.files[name].append(
                Applied(
                    self.run_id,
                    self.generation,
                    self.step,
                    self.epoch,
                    start,
                    stop,
                    stop - start,
                    total,
                    is_skipped=is_skipped,
                )
            )

    def train(self, steps: int = 1) -> None:
        """Steps without trouble; from one epoch into the next."""
        for _ in range(steps):
            if self.cursor >= self.samples:
                self.end_epoch()
            self.begin()
            self.apply()

    def end_epoch(self) -> None:
        for name in self.members:
            self.files[name].append(EpochEnded(self.run_id, self.generation, self.step, self.epoch, self.cursor))
        self.epoch, self.cursor = self.epoch + 1, max(0, self.cursor - self.samples)

    def sample_at(self, position: int) -> int:
        """Any order will do, if it is another one in each epoch."""
        if position >= self.samples:
            return (position - self.samples + 17 * (self.epoch + 1)) % self.samples
        if self.order == TWO_STREAMS:  # the first one is twice as long
            turn, place = divmod(position, 3)
            return 2 * (2 * turn + place) if place < 2 else 2 * turn + 1
        if self.order.startswith("weighted"):
            return position // 2
        return (position + 17 * self.epoch) % self._all

    def lines(self) -> list[Line]:
        return [
            Line(f"{name}-0000.jsonl", number, record)
            for name, records in sorted(self.files.items())
            for number, record in enumerate(records, start=1)
        ]

    def _batch(self) -> tuple[int, int]:
        stop = self.cursor + self.global_batch_size
        return self.cursor, stop if self.is_carried else min(stop, self.samples)
