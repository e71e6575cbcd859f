"""The proof from the lines of a sample ledger under the commit rule: which samples each epoch trained, by sampler.
Pure.

Samples count when they were recorded, and a record stands unless it was rolled back: a generation that begins with the
state of commit c makes earlier records after that commit void.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from farandole.errors import ConfigError
from farandole.training.ledger.check import EpochCounts, FileNotes, Line, settled
from farandole.training.ledger.findings import EpochFinding, Findings
from farandole.training.ledger.records import (
    HASH_MASK,
    Entered,
    Entry,
    EpochLeft,
    Ids,
    Opened,
    Trained,
    expand,
    ids_hash,
    name_of,
)

SamplerCall = tuple[Entry, str, int, int]
"""A call of a sampler on all ranks: entry, sampler, number, epoch."""


def check_commits(lines: Iterable[Line]) -> Findings:
    """Prove that each epoch trained each sample once, or report the violations. `lines` is read twice. Raises
    ConfigError for lines that do not belong to one job's ledger, or that have no sampler."""
    story = _Story()
    for line in settled(lines, story.problems):
        if isinstance(line.record, Entered):
            story.enter(line.record)
        elif isinstance(line.record, Opened):
            story.add_opened(line.record, line.file)
    if not story.samples:
        raise ConfigError(
            "the ledger has no records of a sampler: under the commit rule, give the ElasticSampler that the loader "
            "uses to TorchState(sampler=...), and call its record_batch()"
        )
    count = _Count(story)
    for line in settled(lines, []):
        if isinstance(line.record, Trained):
            count.add_record(line.record)
        elif isinstance(line.record, EpochLeft):
            count.leave(line.record)
    return count.findings()


@dataclass
class _Story(FileNotes):
    """The members of each generation, and the records that it made void.

    samples  by sampler;  ranks  by entry: its size, and the ranks that have written
    """

    samples: dict[str, int] = field(default_factory=dict)
    commits: dict[Entry, int] = field(default_factory=dict)
    ranks: dict[Entry, tuple[int, set[int]]] = field(default_factory=dict)

    def enter(self, record: Entered) -> None:
        name = name_of(record.key)
        self.refuse_another_job(record.key[:2], record.nonce)
        for sampler, samples in record.samplers:
            if self.samples.setdefault(sampler, samples) != samples:
                raise ConfigError(
                    f"the data set of {sampler!r} has {self.samples[sampler]} samples on one worker and {samples} on "
                    f"another worker, or at another time, in {name}"
                )
        first = self.commits.setdefault(record.key, record.commit)
        if first != record.commit:
            self.problems.append(f"{name} begins with commit {first} and with commit {record.commit}")
        self.ranks.setdefault(record.key, (record.size, set()))[1].add(record.rank)

    def kept(self) -> dict[Entry, float]:
        """Return by entry the commit before which its records stand."""
        kept, lowest = {}, float("inf")
        for key in sorted(self.commits, reverse=True):
            kept[key] = lowest
            lowest = min(lowest, self.commits[key])
        return kept

    def silent_ranks(self, key: Entry) -> list[int]:
        size, ranks = self.ranks[key]
        return sorted(set(range(size)) - ranks)


@dataclass
class _EpochCounts(EpochCounts):
    """The counts of one epoch. `left`: untrained samples when another epoch was begun, as far as known."""

    padding: int = 0
    most_padding: int = 0
    left: int = 0
    is_left: bool = False


class _Count:
    """The number of times that each sample was trained, from the records that stand."""

    def __init__(self, story: _Story) -> None:
        self._story, self._kept = story, story.kept()
        self._epochs: dict[tuple[str, int], _EpochCounts] = {}
        self._calls: dict[SamplerCall, tuple[int, int]] = {}  # samples and hash on which all ranks agreed
        self._seen: dict[SamplerCall, list[int]] = defaultdict(lambda: [0, 0])
        self._by_one: set[Entry] = set()  # entries in which each rank knows its own samples only
        self._records = self._void = 0

    def add_record(self, record: Trained) -> None:
        if not self._stands(record):
            self._void += 1
            return
        self._records += 1
        epoch = self._epoch(record.sampler, record.epoch)
        ids, repeats = self._known(epoch, record.ids), self._known(epoch, record.repeats)
        np.add.at(epoch.counts, ids, 1)
        epoch.padding += len(repeats)
        epoch.most_padding = max(epoch.most_padding, self._story.ranks[record.key][0] - 1)
        if record.samples < 0:
            self._by_one.add(record.key)
            return
        call = (record.key, record.sampler, record.number, record.epoch)
        agreed = self._calls.setdefault(call, (record.samples, record.ids_hash))
        if agreed != (record.samples, record.ids_hash):
            self._story.problems.append(
                f"ranks of {name_of(record.key)} recorded different batches as number {call[2]}"
            )
        seen = self._seen[call]
        seen[0] += len(expand(record.ids))
        seen[1] = (seen[1] + ids_hash(expand(record.ids))) & HASH_MASK

    def leave(self, record: EpochLeft) -> None:
        if self._stands(record):
            epoch = self._epoch(record.sampler, record.epoch)
            epoch.is_left, epoch.left = True, max(epoch.left, record.samples)

    def _stands(self, record: Trained | EpochLeft) -> bool:
        return record.commit < self._kept.get(record.key, float("inf"))

    def _epoch(self, sampler: str, number: int) -> _EpochCounts:
        key = (sampler, number)
        if key not in self._epochs:
            self._epochs[key] = _EpochCounts(np.zeros(self._story.samples[sampler], dtype=np.uint16))
        return self._epochs[key]

    def _known(self, epoch: _EpochCounts, ids: Ids) -> NDArray[np.int64]:
        array = expand(ids)
        is_known = (array >= 0) & (array < len(epoch.counts))
        epoch.foreign += array[~is_known].tolist()
        return array[is_known]

    def findings(self) -> Findings:
        story = self._story
        for call, (samples, whole) in self._calls.items():
            self._compare(call, samples - self._seen[call][0], (whole - self._seen[call][1]) & HASH_MASK)
        for key in sorted(story.ranks):
            if silent := story.silent_ranks(key):
                text = f"{name_of(key)}: no file of {'rank' if len(silent) == 1 else 'ranks'} {silent}"
                if key in self._by_one:
                    story.problems.append(f"{text}, and each rank recorded only its own samples")
                else:
                    story.remarks.append(text)
        last = {sampler: max(n for name, n in self._epochs if name == sampler) for sampler, _ in self._epochs}
        return Findings(
            samples=story.samples,
            first_step=0,
            steps=0,
            redone=self._void,
            generations=len({key[:2] for key in story.commits}),
            workers=len(story.workers),
            epochs=[
                self._judge(sampler, number, epoch, is_last=number == last[sampler])
                for (sampler, number), epoch in sorted(self._epochs.items())
            ],
            problems=story.problems,
            remarks=story.remarks,
            records=self._records,
        )

    def _compare(self, call: SamplerCall, samples: int, rest: int) -> None:
        """Compare a call with its sum, which all ranks know, and count the missing part."""
        key, sampler, number, epoch = call
        if samples < 0 or (samples == 0 and rest):
            self._story.problems.append(
                f"{name_of(key)}, batch {number} of {sampler}: the recorded samples differ from the samples on which "
                f"the ranks agreed"
            )
        elif samples:
            self._epoch(sampler, epoch).add_unseen(samples, rest)

    def _judge(self, sampler: str, number: int, epoch: _EpochCounts, is_last: bool) -> EpochFinding:
        """Return the finding of an epoch. Untrained samples were left out on purpose (`break`) only if the sampler knew
        of as many when it was told to continue; in the last epoch they may still come."""
        untrained: list[int] = np.flatnonzero(epoch.counts == 0).tolist()
        proved = unproved = 0
        if epoch.unseen:
            if epoch.are_unseen(untrained):
                proved, untrained = epoch.unseen, []
            else:
                unproved = epoch.unseen
        if epoch.padding > epoch.most_padding:
            self._story.problems.append(
                f"epoch {number} of {sampler}: {epoch.padding} samples were trained twice as padding at its end, which "
                f"is more than the number of ranks minus one"
            )
        may_be_untrained = max(0, epoch.left) + unproved
        is_lost = len(untrained) > may_be_untrained if epoch.is_left else not is_last
        return EpochFinding(
            epoch=number,
            begin=0,
            end=len(epoch.counts) - (0 if is_lost else len(untrained)),
            is_ended=epoch.is_left or not untrained,
            lost=untrained if is_lost else [],
            repeated=np.flatnonzero(epoch.counts > 1).tolist(),
            foreign=epoch.foreign,
            proved_by_hash=proved,
            unproved=unproved,
            sampler=sampler,
            padding=epoch.padding,
        )
