"""Records of a worker for the sample ledger, under the commit rule."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from farandole.base.env import read_job_env, read_worker_env
from farandole.integrations.horovod.committed_state import CommittedState
from farandole.integrations.horovod.sampler import ElasticSampler
from farandole.training.collectives import world
from farandole.training.ledger.records import Entered, EpochLeft, LedgerWriter, Trained, compact, ids_hash
from farandole.training.state.session import SamplerRecorder, TrainedSamples


class CommitRecords(SamplerRecorder):
    """Writes records for the worker of `committed`. Samplers that its state does not contain are not recorded: their
    records are not rolled back either."""

    is_needed = True

    def __init__(self, committed: CommittedState, writer: LedgerWriter) -> None:
        self._committed, self._writer = committed, writer
        self._entry = (0, 0, 0)
        self._calls: Counter[str] = Counter()  # by sampler, in this entry

    def entered(self) -> None:
        """Record that the members of the generation all have this state, and the function is about to be called."""
        here = world.current()
        generation = here.id.run_id, here.id.number
        entry = self._entry[2] + 1 if self._entry[:2] == generation else 0
        self._entry, self._calls = (*generation, entry), Counter()
        named = self._committed.samplers().items()
        samplers = [(name, each.samples) for name, each in named if isinstance(each, ElasticSampler)]
        place = here.placement
        self._writer.write(Entered(*self._entry, here.id.nonce, place.rank, place.size, self._commit, samplers))

    def close(self) -> None:
        self._writer.close()

    # Reports of samplers (state/session.py) -------------------------------------------------------------

    def trained(self, sampler: object, parts: Sequence[TrainedSamples]) -> None:
        name = self._name(sampler)
        if name is None:
            return
        rank = world.current().placement.rank
        for part in parts:
            samples, whole = (-1, 0) if part.everyone is None else (len(part.everyone), ids_hash(part.everyone))
            ids, repeats = compact(part.ids), compact(part.repeats)
            call = self._calls[name]
            self._writer.write(
                Trained(*self._entry, self._commit, rank, name, call, part.epoch, ids, repeats, samples, whole)
            )
        self._calls[name] += 1

    def left(self, sampler: object, epoch: int, samples: int | None) -> None:
        name = self._name(sampler)
        if name is not None:
            rank, left = world.current().placement.rank, -1 if samples is None else samples
            self._writer.write(EpochLeft(*self._entry, self._commit, rank, name, epoch, left))

    @property
    def _commit(self) -> int:
        return self._committed.progress.step

    def _name(self, sampler: object) -> str | None:
        return next((name for name, each in self._committed.samplers().items() if each is sampler), None)


def commit_records(committed: CommittedState | None) -> CommitRecords | None:
    """Return None without a ledger to keep, or without a TorchState."""
    folder = read_job_env().sample_ledger
    if not folder or committed is None:
        return None
    env = read_worker_env()
    writer = LedgerWriter(Path(folder), env.worker if env is not None else "alone", socket.gethostname())
    return CommitRecords(committed, writer)
