"""The findings of a check of a sample ledger, as values and as text for people. Pure; the command line prints it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

SHOWN = 20  # samples named in the text; the JSON has all


class EpochFinding(msgspec.Struct, frozen=True):
    """The outcome of one epoch's samples.

    begin, end      positions of the epoch's order that this ledger covers; end - begin samples
    is_ended        the job has gone on to the next epoch, or has trained everything
    lost, repeated  samples that no file has as trained, and samples that were trained more than once
    foreign         numbers that are no sample of the data set
    proved_by_hash  samples of workers whose files are missing: known by their sum alone, which is right
    unproved        samples of such workers that remain unknown; some of `lost` may be among them
    sampler         its name in the state, under the commit rule
    padding         samples that a rank has trained for the second time on purpose, to fill up the end of the epoch,
                    or because a script's sampler says so; not in `repeated`
    skipped         samples whose steps all workers have skipped; they count as visited
    left_out        samples that a script's sampler has left out of the epoch; not in `lost`
    size            positions of the epoch's order, where a script's sampler has made it; 0: as many as samples
    """

    epoch: int
    begin: int
    end: int
    is_ended: bool
    lost: list[int]
    repeated: list[int]
    foreign: list[int]
    proved_by_hash: int
    unproved: int
    sampler: str = ""
    padding: int = 0
    skipped: int = 0
    left_out: int = 0
    size: int = 0

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.repeated or self.foreign or self.unproved)


class Findings(msgspec.Struct, frozen=True):
    """The findings of a ledger about its job.

    samples   of one epoch; 0 where unknown. Under the commit rule, by the sampler's name
    streams   number of streams from which they come; 0 without streams
    steps     optimizer steps that stand, from first_step on; redone  attempts that had to be repeated
    records   instead of steps, under the commit rule: workers' records that stand; redone counts those rolled back
    problems  evidence against exactly once, besides that in `epochs`; remarks  other notes
    hashes    of a strict job, by step: the SHA-256 of the state, at the end of epochs or more often
    """

    samples: int | dict[str, int]
    first_step: int
    steps: int
    redone: int
    generations: int
    workers: int
    epochs: list[EpochFinding]
    problems: list[str]
    remarks: list[str]
    records: int | None = None
    streams: int = 0
    hashes: dict[int, str] = {}

    def samples_of(self, sampler: str) -> int:
        return self.samples if isinstance(self.samples, int) else self.samples[sampler]

    @property
    def is_exact(self) -> bool:
        """True when every sample was trained once in each whole epoch, and none twice in any other."""
        return not self.problems and all(epoch.is_exact for epoch in self.epochs)

    def whole_epochs(self, sampler: str = "") -> int:
        """Return the number of epochs trained from the first position to the last one; of streams, until all had
        ended."""
        samples = self.samples_of(sampler)
        epochs = [epoch for epoch in self.epochs if epoch.sampler == sampler]
        if self.streams:
            return sum(1 for epoch in epochs if epoch.begin == 0 and epoch.is_ended)
        return sum(1 for epoch in epochs if epoch.begin == 0 and epoch.end == (epoch.size or samples) > 0)


def as_json(findings: Findings, comparison: Comparison | None = None) -> str:
    """Return all findings, and those of a comparison with another job under "compared"."""
    compared = {} if comparison is None else {"compared": msgspec.to_builtins(comparison)}
    values = {"is_exact": findings.is_exact, **msgspec.to_builtins(findings), **compared}
    return msgspec.json.format(msgspec.json.encode(values)).decode()


def format_findings(findings: Findings) -> Iterator[str]:
    """Yield the lines for people."""
    by = f"{_many(findings.workers, 'worker')} in {_many(findings.generations, 'generation')}"
    if findings.records is None:
        yield f"{_many(findings.steps, 'step')} of {by}; {_many(findings.redone, 'step')} redone"
    else:
        yield f"{_many(findings.records, 'recorded batch')} of {by}; {findings.redone:,} rolled back"
    if findings.first_step > 0:
        yield f"the ledger begins at step {findings.first_step}"
    if findings.streams:
        yield (
            f"{_many(findings.whole_epochs(), 'ended epoch')} of {_many(findings.streams, 'stream')}; each "
            f"stream must yield its first samples once, without a gap. Only the data set knows where a stream ends"
        )
    for sampler in [""] if isinstance(findings.samples, int) else findings.samples:
        samples = findings.samples_of(sampler)
        prefix = f"{sampler}: " if sampler else ""
        if not findings.streams:
            yield f"{prefix}{_many(findings.whole_epochs(sampler), 'whole epoch')} of {_many(samples, 'sample')}"
        epochs = [epoch for epoch in findings.epochs if epoch.sampler == sampler]
        numbered = ((epoch.epoch, line) for epoch in epochs for line in _of_epoch(epoch, samples))
        yield from (prefix + line for line in _gathered(numbered))
    if findings.hashes:
        step, state_hash = max(findings.hashes.items())
        yield f"{_many(len(findings.hashes), 'hash')} of the state; after step {step}: {state_hash}"
    for remark in findings.remarks:
        yield f"note: {remark}"
    for problem in findings.problems[:SHOWN]:
        yield f"ERROR: {problem}"
    if len(findings.problems) > SHOWN:
        yield f"ERROR: and {len(findings.problems) - SHOWN:,} more errors"
    yield "exactly once: yes" if findings.is_exact else "exactly once: NO, or not proved; see above"


class Comparison(msgspec.Struct, frozen=True):
    """The hashes of two strict jobs.

    steps      steps after which both have one
    different  those of them after which they differ
    """

    steps: list[int]
    different: list[int]

    @property
    def is_equal(self) -> bool:
        """True when there is something to compare, and no difference."""
        return bool(self.steps) and not self.different


def compare(findings: Findings, others: Findings) -> Comparison:
    """Compare the states of two jobs by their hashes."""
    steps = sorted(findings.hashes.keys() & others.hashes.keys())
    return Comparison(steps, [step for step in steps if findings.hashes[step] != others.hashes[step]])


def format_comparison(comparison: Comparison) -> str:
    """Return the line for people."""
    steps, different = comparison.steps, comparison.different
    if not steps:
        return "the same state: UNKNOWN: the ledgers have no hashes after the same steps; only strict jobs write them"
    if not different:
        return f"the same state: yes, by {_many(len(steps), 'hash')}, the last one after step {steps[-1]}"
    last = max((step for step in steps if step < different[0]), default=None)
    before = "" if last is None else f"; they were equal after step {last}"
    return f"the same state: NO, since step {different[0]} at the latest{before}"


def _gathered(numbered: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Yield a line that is equal for consecutive epochs only once."""
    runs: list[tuple[int, int, str]] = []
    for epoch, line in numbered:
        first, last, before = runs[-1] if runs else (0, -1, "")
        if runs and line == before and epoch == last + 1:
            runs[-1] = (first, epoch, line)
        else:
            runs.append((epoch, epoch, line))
    for first, last, line in runs:
        yield (f"epoch {first}" if first == last else f"epochs {first} to {last}, each") + f": {line}"


def _of_epoch(epoch: EpochFinding, samples: int) -> Iterator[str]:
    """Yield the lines of an epoch; none for an epoch without irregularities."""
    size = epoch.size or samples
    if (epoch.begin, epoch.end) != (0, size):
        covered = epoch.end - epoch.begin
        begun = f" from position {epoch.begin:,} on" if epoch.begin else ""
        left = max(0, size - epoch.end)
        if not left:
            end = ""
        elif epoch.is_ended:
            end = f'; it ended without {_many(left, "sample")} (break, or tail="drop")'
        else:
            end = f"; it is unfinished, {_many(left, 'sample')} are left"
        yield f"{_many(covered, 'sample')}{begun}{end}"
    if epoch.skipped:
        yield f"{_many(epoch.skipped, 'sample')} visited and not trained: all workers have skipped their steps"
    if epoch.padding:
        where = "as the script's sampler repeats them" if epoch.size else "as padding at its end"
        yield f"{_many(epoch.padding, 'sample')} trained twice {where}"
    if epoch.left_out:
        yield f"{_many(epoch.left_out, 'sample')} left out by the script's sampler (drop_last, a subset, a draw)"
    if epoch.proved_by_hash:
        yield f"{_many(epoch.proved_by_hash, 'sample')} of {_silent(epoch)}; their hash is correct"
    if epoch.unproved:
        yield (f"UNPROVED: {_many(epoch.unproved, 'sample')} of {_silent(epoch)}; their numbers are not known")
    lost = "LOST, OR AMONG THE UNPROVED" if epoch.unproved else "LOST"
    for what, ids in ((lost, epoch.lost), ("REPEATED", epoch.repeated), ("NOT IN THE DATA SET", epoch.foreign)):
        if ids:
            more = f", ... ({len(ids):,} in all)" if len(ids) > SHOWN else f" ({len(ids):,} in all)"
            yield f"{what}: {', '.join(map(str, ids[:SHOWN]))}{more}"


def _silent(epoch: EpochFinding) -> str:
    before = "that were lost before they had recorded them, or " if epoch.sampler else ""
    return f"workers {before}whose files are missing"


def _many(count: int, what: str) -> str:
    plural = "" if count == 1 else "es" if what.endswith(("batch", "hash")) else "s"
    return f"{count:,} {what}{plural}"
