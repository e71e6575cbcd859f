"""The proof from the lines of a sample ledger: which samples each epoch trained, and how often. Pure.

A step may have been begun several times. A step stands if it was applied and is not void: "generation g starts at step
s" makes all records of lower generations for step s and later steps void, since the workers that applied them are gone
together with their state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from farandole.errors import ConfigError
from farandole.training.ledger.findings import EpochFinding, Findings
from farandole.training.ledger.records import (
    HASH_MASK,
    HOLED,
    Applied,
    EpochEnded,
    GenerationKey,
    Hashed,
    Intent,
    Listed,
    Missed,
    Opened,
    Record,
    Started,
    expand,
    ids_hash,
    name_of,
)
from farandole.training.ledger.weights_story import WeightsStory

Attempt = tuple[GenerationKey, int]  # at a step


@dataclass(frozen=True)
class Line:
    """A line of a ledger: its position and its record; None when it cannot be read.

    is_cut_short  it has no end: its worker was killed while it wrote
    """

    file: str
    number: int
    record: Record | None
    is_cut_short: bool = False


def check(lines: Iterable[Line]) -> Findings:
    """Prove that each epoch trained each sample once, or report the violations. `lines`, those of one file after the
    other, is read twice. Raises ConfigError for lines that do not belong to one job's ledger."""
    story = _Story()
    for line in settled(lines, story.problems):
        story.add_record(line)
    story.conclude()
    count = _Count(story)
    for line in settled(lines, []):
        if isinstance(line.record, Intent):
            count.add_record(line.record, line)
    return count.findings()


def settled(lines: Iterable[Line], problems: list[str]) -> Iterator[Line]:
    """Yield the readable lines, without intents that the same rank wrote again before the step was applied: it was
    handed the same step again, or has left its epoch before the step, and its last intent is the contribution."""
    held: Line | None = None
    broken: Line | None = None
    for line in lines:
        if broken is not None:
            if broken.file != line.file or not isinstance(line.record, Missed):
                problems.append(f"{broken.file}, line {broken.number} cannot be read")
            broken = None
        if line.record is None:
            if not line.is_cut_short:
                broken = line  # a full disk cuts lines off, too; then the next line reports it
            continue
        if held is not None and _ends(held, line):
            if not _is_repeated(held.record, line.record):
                yield held
            held = None
        if isinstance(line.record, Intent):
            held = line
        else:
            yield line
    if broken is not None:
        problems.append(f"{broken.file}, line {broken.number} cannot be read")
    if held is not None:
        yield held


def _ends(held: Line, line: Line) -> bool:
    """Return whether no intent behind this line can replace the held one."""
    return held.file != line.file or isinstance(line.record, Intent | Applied | Started)


def _is_repeated(before: Record | None, after: Record) -> bool:
    return (
        isinstance(before, Intent)
        and isinstance(after, Intent)
        and (before.key, before.step, before.rank) == (after.key, after.step, after.rank)
    )


@dataclass
class FileNotes:
    """What the files themselves say, under either rule."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    workers: set[str] = field(default_factory=set)
    nonces: dict[tuple[int, int], str] = field(default_factory=dict)

    def add_opened(self, record: Opened, file: str) -> None:
        self.workers.add(file.rpartition("-")[0])
        if record.status == HOLED:
            self.remarks.append(f"{file} is incomplete: its worker could not write all lines (full disk?)")

    def refuse_another_job(self, generation: GenerationKey, nonce: str) -> None:
        if self.nonces.setdefault(generation, nonce) != nonce:
            raise ConfigError(
                f"two jobs have written in this folder: there are two starts of {name_of(generation)}. Give each job "
                f"its own folder, and check each folder"
            )


@dataclass
class EpochCounts:
    """The counts of one epoch.

    counts       number of times that each sample was trained, or skipped with its step
    unseen, unseen_hash  of the samples that no file has, and of which only the sums are known
    foreign      numbers that are no sample of the data set
    """

    counts: NDArray[np.uint16]
    unseen: int = 0
    unseen_hash: int = 0
    foreign: list[int] = field(default_factory=list)

    def add_unseen(self, samples: int, samples_hash: int) -> None:
        self.unseen += samples
        self.unseen_hash = (self.unseen_hash + samples_hash) & HASH_MASK

    def are_unseen(self, ids: list[int]) -> bool:
        """Return whether these are all the unseen samples."""
        return len(ids) == self.unseen and ids_hash(ids) == self.unseen_hash


@dataclass
class _Story(FileNotes):
    """The outcome of the steps, from all records but the samples.

    standing     by step, records that were applied and are not void
    hashes       in strict mode, by step, the hash of the state
    listed       by epoch, what its order has otherwise than each sample once
    weights      history of the weights of each worker
    is_doubtful  the steps are not consecutive: the start that made some of them void may be in a missing file, the only
                 one of its generation
    """

    starts: dict[GenerationKey, Started] = field(default_factory=dict)
    applied: dict[Attempt, Applied] = field(default_factory=dict)
    ended: list[EpochEnded] = field(default_factory=list)
    begun: set[Attempt] = field(default_factory=set)
    standing: dict[int, Applied] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    listed: dict[int, Listed] = field(default_factory=dict)
    weights: WeightsStory = field(default_factory=WeightsStory)
    is_doubtful: bool = False

    def add_record(self, line: Line) -> None:
        record = line.record
        self.weights.add_record(line.file, record)
        if isinstance(record, Opened):
            self.add_opened(record, line.file)
        elif isinstance(record, Started):
            self._add_start(record)
        elif isinstance(record, Listed):
            before = self.listed.get(record.epoch)
            if before is None or before.key < record.key:
                self.listed[record.epoch] = record
        elif isinstance(record, Intent):
            self.begun.add((record.key, record.step))
        elif isinstance(record, Applied):
            attempt = record.key, record.step
            agreed = msgspec.structs.replace(record, digest=0, updates=-1)
            if self.applied.setdefault(attempt, agreed) != agreed:
                self.problems.append(f"step {record.step}: workers of {name_of(record.key)} recorded different values")
        elif isinstance(record, EpochEnded):
            self.ended.append(record)
        elif isinstance(record, Hashed) and self.hashes.setdefault(record.step, record.hash) != record.hash:
            self.problems.append(
                f"the state after step {record.step} has two hashes, {self.hashes[record.step]} and {record.hash}, "
                f"although the job was strict"
            )

    def _add_start(self, record: Started) -> None:
        self.refuse_another_job(record.key, record.nonce)
        first = self.starts.setdefault(record.key, record)
        if first.samples != record.samples:
            raise ConfigError(
                f"the data set has {first.samples} samples on one worker and {record.samples} on another worker, "
                f"in {name_of(record.key)}"
            )
        if (first.step, first.epoch, first.cursor) != (record.step, record.epoch, record.cursor):
            self.problems.append(f"{name_of(record.key)} starts at step {first.step} and at step {record.step}")

    def conclude(self) -> None:
        """Decide which records stand, and whether the steps are consecutive."""
        if not self.starts:
            raise ConfigError("the ledger is empty: no worker has entered an elastic function with a loader")
        for (generation, step), record in sorted(self.applied.items()):
            if any(key > generation and start.step <= step for key, start in self.starts.items()):
                continue
            if step in self.standing:
                self.problems.append(f"step {step} was applied in two generations, and was void in neither")
            self.standing[step] = record
        before: Applied | None = None
        for _, record in sorted(self.standing.items()):
            self._follow(before, record)
            before = record
        newest = max(self.starts.items())[1]
        if before is not None and newest.step > before.step + 1:
            self.problems.append(_unrecorded(before.step + 1, newest.step - 1))
        self.weights.conclude()
        self.problems += self.weights.problems
        self.remarks += self.weights.remarks

    def _follow(self, before: Applied | None, record: Applied) -> None:
        if record.samples != record.stop - record.start:
            self.problems.append(f"step {record.step} has {record.samples} samples of {record.stop - record.start}")
        first = min(self.starts.items())[1]
        expected = (first.step, first.epoch, first.cursor)
        if before is not None:
            expected = (before.step + 1, before.epoch, before.stop)
        if 0 < first.samples < expected[2]:  # the next epoch has had its first samples
            expected = (expected[0], expected[1] + 1, expected[2] - first.samples)
        if record.step > expected[0]:
            self.problems.append(_unrecorded(expected[0], record.step - 1))
        elif (record.epoch, record.start) != expected[1:] and not (record.epoch > expected[1] and record.start == 0):
            self.is_doubtful = True
            self.problems.append(
                f"step {record.step} begins at position {record.start} of epoch {record.epoch}, "
                f"the previous step ended at position {expected[2]} of epoch {expected[1]}"
            )

    def ends(self) -> dict[int, int]:
        """Return by epoch the cursor at which all workers ended it; without void ends."""
        return {
            end.epoch: end.cursor
            for end in self.ended
            if not any(
                key > end.key and (start.step, start.epoch) <= (end.step, end.epoch)
                for key, start in self.starts.items()
            )
        }


@dataclass(kw_only=True)
class _EpochCounts(EpochCounts):
    """The counts of one epoch.

    skipped   samples of skipped steps
    is_mixed  some of the sums of unseen samples are of two epochs
    size      positions of the epoch's order; 0: not known
    samples   of the data set
    expected  number of times that the order has each sample; None: once
    """

    begin: int
    size: int
    samples: int
    expected: NDArray[np.uint16] | None = None
    end: int = 0
    skipped: int = 0
    is_mixed: bool = False


class _Count:
    """The number of times that each sample was trained, from the intents of the steps that stand."""

    def __init__(self, story: _Story) -> None:
        self._story = story
        newest = max(story.starts.items())[1]
        self._size, self._streams, self._has_each_once = newest.samples, newest.streams, newest.has_each_once
        self._left: dict[int, list[int]] = {}  # by step: samples and hash that no intent has accounted for
        self._epochs: dict[int, _EpochCounts] = {}
        for step, record in sorted(story.standing.items()):
            for number, start, stop in self._parts(record.epoch, record.start, record.stop):
                epoch = self._epochs.setdefault(number, self._new(number, start))
                epoch.end = max(epoch.end, stop)
                epoch.skipped += stop - start if record.is_skipped else 0
            self._left[step] = [record.samples, record.ids_hash]

    def _new(self, number: int, begin: int) -> _EpochCounts:
        listed = self._story.listed.get(number)
        if listed is None:
            counts = np.zeros(self._size if self._has_each_once else 0, dtype=np.uint16)
            return _EpochCounts(counts, begin=begin, size=self._size, samples=self._size)
        left_out, repeats = expand(listed.left_out), expand(listed.repeats)
        expected = np.ones(listed.samples, np.uint16)
        np.subtract.at(expected, left_out, 1)
        np.add.at(expected, repeats, 1)
        size = listed.samples - len(left_out) + len(repeats)
        return _EpochCounts(np.zeros_like(expected), begin=begin, size=size, samples=listed.samples, expected=expected)

    def _parts(self, epoch: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (epoch, start, stop) of each epoch in which these positions are; several where a tail is carried."""
        if not 0 < self._size < stop:
            return [(epoch, start, stop)]
        rest = (epoch + 1, max(0, start - self._size), stop - self._size)
        return [rest] if start >= self._size else [(epoch, start, self._size), rest]

    def add_record(self, intent: Intent, line: Line) -> None:
        record = self._story.standing.get(intent.step)
        if record is None or record.key != intent.key:
            return  # begun, and not applied; or void
        if (intent.epoch, intent.start, intent.stop) != (record.epoch, record.start, record.stop):
            self._story.problems.append(f"{line.file}, line {line.number} contradicts the applied step: {intent}")
            return
        ids = expand(intent.ids)
        left = self._left[intent.step]
        left[0] -= len(ids)
        left[1] = (left[1] - ids_hash(ids)) & HASH_MASK
        if (self._has_each_once or intent.epoch in self._story.listed) and len(ids):
            of_this = max(0, self._size - intent.low) if self._size and not self._streams else len(ids)
            self._add(intent.epoch, ids[:of_this])
            self._add(intent.epoch + 1, ids[of_this:])

    def _add(self, number: int, ids: NDArray[np.int64]) -> None:
        if not len(ids):
            return
        epoch = self._epochs.get(number)
        if epoch is None:  # positions that the global batch does not have
            self._story.problems.append(f"a step of another epoch has samples of epoch {number}: {ids.tolist()[:20]}")
            return
        # No stream has more samples than all of them together.
        is_known = (ids >= 0) & (ids < (self._streams * epoch.end or epoch.samples))
        epoch.foreign += ids[~is_known].tolist()
        missing = int(ids[is_known].max(initial=-1)) + 1 - len(epoch.counts)
        if missing > 0:  # of streams
            epoch.counts = np.concatenate([epoch.counts, np.zeros(missing + len(epoch.counts), dtype=np.uint16)])
        np.add.at(epoch.counts, ids[is_known], 1)

    def findings(self) -> Findings:
        story = self._story
        for step, (samples, rest) in self._left.items():
            record = story.standing[step]
            if samples < 0 or (samples == 0 and rest != 0):
                story.problems.append(
                    f"step {step}: the recorded samples differ from the samples on which the workers agreed"
                )
            elif samples:
                parts = self._parts(record.epoch, record.start, record.stop)
                for number, *_ in parts:
                    epoch = self._epochs[number]
                    epoch.is_mixed |= len(parts) > 1
                    epoch.add_unseen(samples, rest)
        if not self._has_each_once and any(epoch.expected is None for epoch in self._epochs.values()):
            story.remarks.append("this order may repeat samples: only that each position was trained once is proved")
        ends, newest = story.ends(), max(self._epochs, default=0)
        story.problems += [
            f"epoch {number} was left at position {epoch.end} of {epoch.size}, and no worker recorded its end"
            for number, epoch in sorted(self._epochs.items())
            if number < newest and epoch.end < epoch.size and number not in ends
        ]
        epochs = [self._judge(number, epoch, number in ends) for number, epoch in sorted(self._epochs.items())]
        if story.is_doubtful:
            epochs = [self._doubted(each) for each in epochs]
        last = max(story.standing, default=-1)
        tried = story.begun | story.applied.keys()
        stands = {(record.key, step) for step, record in story.standing.items()}
        return Findings(
            samples=max([self._size, *(each.samples for each in story.listed.values())]),
            first_step=min(story.standing, default=0),
            streams=self._streams,
            steps=len(story.standing),
            redone=sum(1 for attempt in tried - stands if attempt[1] <= last),
            generations=len(story.starts),
            workers=len(story.workers),
            epochs=epochs,
            problems=story.problems,
            remarks=story.remarks,
            hashes=story.hashes,
        )

    def _judge(self, number: int, epoch: _EpochCounts, is_ended: bool) -> EpochFinding:
        """Return the finding of an epoch. A whole epoch has every sample; of any other one only the number is known.

        Local batches that are in no file are known by their sum. They are the samples that no other worker has trained,
        if that sum is right. The sum of local batches that reach into the next epoch covers both, and proves neither.
        """
        never = self._never(epoch)
        # Of streams, the trained part of an unfinished epoch has no gaps, either.
        is_whole = epoch.begin == 0 and (self._streams > 0 or epoch.end == epoch.size > 0)
        proved = unproved = 0
        if epoch.unseen and (self._has_each_once or epoch.expected is not None):
            if is_whole and not epoch.is_mixed and epoch.are_unseen(never):
                proved, never = epoch.unseen, []
            else:
                unproved = epoch.unseen
        return EpochFinding(
            epoch=number,
            begin=epoch.begin,
            end=epoch.end,
            is_ended=is_ended or epoch.end == epoch.size > 0,
            lost=never if is_whole else [],
            repeated=np.flatnonzero(epoch.counts > (1 if epoch.expected is None else epoch.expected)).tolist(),
            foreign=epoch.foreign,
            proved_by_hash=proved,
            unproved=unproved,
            skipped=epoch.skipped,
            padding=0 if epoch.expected is None else int(np.maximum(epoch.expected.astype(int) - 1, 0).sum()),
            left_out=0 if epoch.expected is None else int((epoch.expected == 0).sum()),
            size=epoch.size if epoch.expected is not None else 0,
        )

    def _doubted(self, epoch: EpochFinding) -> EpochFinding:
        """Return the finding without repeated samples where one of the two steps may be void."""
        if not epoch.repeated:
            return epoch
        self._story.problems.append(
            f"epoch {epoch.epoch}: samples {epoch.repeated[:20]} are in two steps that contradict each other; "
            f"whether both steps count is not known"
        )
        return msgspec.structs.replace(epoch, repeated=[])

    def _never(self, epoch: _EpochCounts) -> list[int]:
        """Return the samples that are in no file; of streams those before the last one in any file."""
        if not self._streams:
            left = (1 if epoch.expected is None else epoch.expected.astype(int)) - epoch.counts.astype(int)
            never: list[int] = np.repeat(np.arange(len(left)), np.maximum(left, 0)).tolist()
            return never
        gaps = []
        for stream in range(min(self._streams, len(epoch.counts))):
            counts = epoch.counts[stream :: self._streams]
            length = int(np.flatnonzero(counts).max(initial=-1)) + 1
            gaps += (stream + self._streams * np.flatnonzero(counts[:length] == 0)).tolist()
        return sorted(gaps)


def _unrecorded(first: int, last: int) -> str:
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"no file records that {steps} had been applied: files or lines of the ledger are missing"
