"""What a ledger of the commit rule proves, from lines as workers would write them."""

from __future__ import annotations

import pytest

from farandole.errors import ConfigError
from farandole.training.ledger.check import Line
from farandole.training.ledger.findings import Findings, format_findings
from farandole.training.ledger.proving import prove
from farandole.training.ledger.records import (
    FORMAT,
    WHOLE,
    Entered,
    EpochLeft,
    Opened,
    Record,
    Trained,
    compact,
    ids_hash,
)

SAMPLES = 12


class WrittenJob:
    """Workers that share an ElasticSampler of 12 samples in order, 2 of them each in every batch."""

    def __init__(self, members: str = "ab") -> None:
        self.files: dict[str, list[Record]] = {}
        self.commit = self.generation = 0
        self.enter(members)

    def enter(self, members: str) -> None:
        """The next generation; its state is that of `self.commit`."""
        self.generation, self.members, self.calls = self.generation + 1, members, 0
        for rank, name in enumerate(members):
            lines = self.files.setdefault(name, [Opened(FORMAT, WHOLE, name, "host", 1, 0)])
            size, nonce = len(members), f"n{self.generation}"
            lines.append(Entered(1, self.generation, 0, nonce, rank, size, self.commit, [("sampler", SAMPLES)]))

    def train(self, first: int, *, epoch: int = 0, by: str | None = None, repeats: list[int] | None = None) -> None:
        """Everybody trains two samples from `first` on; `by` have recorded it."""
        everyone = range(first, min(SAMPLES, first + 2 * len(self.members)))
        for rank, name in enumerate(self.members):
            if by is None or name in by:
                own = compact(everyone[rank :: len(self.members)])
                at = (1, self.generation, 0, self.commit, rank, "sampler", self.calls, epoch)
                again = repeats if repeats and rank == len(self.members) - 1 else []
                self.files[name].append(Trained(*at, own, compact(again), len(everyone), ids_hash(everyone)))
        self.calls += 1

    def leave(self, untrained: int, epoch: int = 0) -> None:
        for rank, name in enumerate(self.members):
            self.files[name].append(EpochLeft(1, self.generation, 0, self.commit, rank, "sampler", epoch, untrained))

    def findings(self, without: str = "") -> Findings:
        lines = [
            Line(f"{name}-0000.jsonl", number, record)
            for name, records in self.files.items()
            if name not in without
            for number, record in enumerate(records, start=1)
        ]
        return prove(lines)


def test_what_was_trained_after_the_commit_that_a_generation_begins_with_is_void() -> None:
    job = WrittenJob()
    job.train(0)
    job.commit += 1
    job.train(4)
    job.enter("a")
    for first in (4, 6, 8, 10):
        job.train(first)
    found = job.findings()
    assert found.is_exact
    assert found.whole_epochs("sampler") == 1
    assert (found.redone, found.records) == (2, 6)
    assert list(format_findings(found))[:2] == [
        "6 recorded batches of 2 workers in 2 generations; 2 rolled back",
        "sampler: 1 whole epoch of 12 samples",
    ]


def test_what_was_committed_and_is_trained_again_is_named() -> None:
    job = WrittenJob()
    job.train(0)
    job.commit += 1
    job.enter("a")
    for first in (2, 4, 6, 8, 10):
        job.train(first)
    found = job.findings()
    assert not found.is_exact
    assert found.epochs[0].repeated == [2, 3]
    assert "sampler: epoch 0: REPEATED: 2, 3 (2 in all)" in list(format_findings(found))


def test_samples_of_an_epoch_that_was_left_are_lost_unless_the_sampler_knew_of_as_many() -> None:
    for untrained, lost in ((4, []), (0, [8, 9, 10, 11])):
        job = WrittenJob()
        job.train(0)
        job.train(4)
        job.leave(untrained)
        job.train(0, epoch=1)
        found = job.findings()
        assert found.epochs[0].lost == lost
        assert found.is_exact == (lost == [])
        assert found.epochs[1].lost == [], "it may go on"


def test_what_a_worker_had_not_recorded_when_it_died_is_proved_by_the_hash() -> None:
    job = WrittenJob()
    job.train(0)
    job.train(4, by="a")
    job.commit += 1
    job.enter("a")
    job.train(8)
    job.train(10)
    found = job.findings()
    assert found.is_exact
    assert found.epochs[0].proved_by_hash == 2
    assert job.findings(without="b").epochs[0].proved_by_hash == 4


def test_padding_is_reported_and_more_than_the_ranks_but_one_is_wrong() -> None:
    job = WrittenJob()
    for first in (0, 4, 8):
        job.train(first, repeats=[0] if first == 8 else None)
    found = job.findings()
    assert found.is_exact
    assert found.epochs[0].padding == 1
    assert "sampler: epoch 0: 1 sample trained twice as padding at its end" in list(format_findings(found))
    job.train(12, repeats=[1])
    assert not job.findings().is_exact


def test_ranks_that_know_their_own_samples_only_must_all_have_written() -> None:
    job = WrittenJob()
    for rank, name in enumerate("ab"):
        ids = compact(range(6 * rank, 6 * rank + 6))
        job.files[name].append(Trained(1, 1, 0, 0, rank, "sampler", 0, 0, ids, [], -1, 0))
    assert job.findings().is_exact
    found = job.findings(without="b")
    assert not found.is_exact
    assert "no file of rank [1]" in found.problems[0]


def test_batches_that_ranks_saw_differently_are_found() -> None:
    job = WrittenJob()
    job.train(0, by="a")
    job.calls = 0
    job.train(4, by="b")
    assert any("recorded different batches" in problem for problem in job.findings().problems)


def test_a_ledger_without_a_sampler_and_one_of_two_jobs_are_refused() -> None:
    job = WrittenJob()
    job.files["a"][1] = Entered(1, 1, 0, "other", 0, 2, 0, [("sampler", SAMPLES)])
    with pytest.raises(ConfigError, match="two jobs"):
        job.findings()
    job = WrittenJob("a")
    job.files["a"][1] = Entered(1, 1, 0, "n1", 0, 1, 0, [])
    with pytest.raises(ConfigError, match="has no records of a sampler"):
        job.findings()
