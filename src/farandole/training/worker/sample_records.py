"""Records of a worker for the sample ledger."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from farandole.base.env import read_job_env, read_worker_env
from farandole.training.collectives import world
from farandole.training.ledger.records import (
    Applied,
    Differed,
    EpochEnded,
    Hashed,
    Intent,
    LedgerWriter,
    Listed,
    Started,
    compact,
    ids_hash,
)
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.session import SESSION, Recorder, Samples
from farandole.training.state.step_state import StepState
from farandole.training.state.sync import Divergence


class SampleRecords(Recorder):
    """Writes records for the worker of `state`, which has a loader."""

    def __init__(self, state: StepState, writer: LedgerWriter) -> None:
        self._state, self._writer = state, writer
        self._ids: list[int] = []  # of the current global batch, from all of its micro-batches so far
        self._intended: int | None = None  # their hash, once it is written
        self._agreed: tuple[int, int] | None = None
        self._updates: list[int] = []  # optimizers, by id, that have moved weights since the last applied step

    def started(self, has_copied: bool) -> None:
        """Record that the members of the generation all have this state. `has_copied`: parameters and optimizer state
        of this worker are copies of another worker's."""
        if has_copied:
            self._updates.clear()
        here, progress = world.current(), self._state.progress
        run_id, number = self._generation()
        loader = self._state.loader.state_dict()
        self._writer.write(
            Started(
                run_id=run_id,
                generation=number,
                nonce=here.id.nonce,
                rank=here.placement.rank,
                size=here.placement.size,
                step=progress.step,
                epoch=progress.epoch,
                cursor=progress.cursor,
                samples=loader.get("size", 0),
                order=str(loader.get("order", "")),
                copied=has_copied,
            )
        )

    def listed(self, epoch: int, samples: int, left_out: Samples, repeats: Samples) -> None:
        """Record which samples of the data set an epoch has not, and which ones more than once: its order is that of a
        script's own samplers."""
        self._writer.write(Listed(*self._generation(), epoch, samples, compact(left_out), compact(repeats)))

    def epoch_ended(self) -> None:
        """Record that all workers have returned for the next epoch; the loader has not moved yet."""
        progress = self._state.progress
        self._writer.write(EpochEnded(*self._generation(), progress.step, progress.epoch, progress.cursor))

    def hashed(self, state_hash: str) -> None:
        """Record the hash of the state at the end of an epoch, or within it."""
        progress = self._state.progress
        self._writer.write(Hashed(*self._generation(), progress.step, progress.epoch, state_hash))

    def differed(self, found: Divergence) -> None:
        """Record that the states of the members differed. This worker may have replaced its own since."""
        self._updates.clear()
        key, rank = self._generation(), world.current().placement.rank
        differed = Differed(
            *key, found.step, rank, found.name, found.objects, found.ranks, found.source, found.is_trained
        )
        self._writer.write(differed)

    def found_local(self, step: int, names: Sequence[str]) -> None:
        """Record that some tensors are computed from each worker's own samples, and are no longer compared."""
        rank = world.current().placement.rank
        self._writer.write(Differed(*self._generation(), step, rank, names[0], len(names), (), rank, False))

    def close(self) -> None:
        self._writer.close()

    # Reports of loader, optimizer and state (state/session.py) ------------------------------------------

    def delivered(self, batch: Batch, ids: Sequence[int]) -> None:
        if batch.index == 0:
            self._ids = []
        self._ids += ids
        self._intended = self._agreed = None

    def intend(self, batch: Batch) -> int:
        """Record the samples, once for each global batch, also when several optimizers reduce gradients for it."""
        if self._intended is None:
            whole, rank = batch.global_batch, world.current().placement.rank
            place = (whole.epoch, whole.start, whole.stop, whole.low, whole.high)
            self._writer.write(Intent(*self._generation(), self._state.step, rank, *place, compact(self._ids)))
            self._intended = ids_hash(self._ids)
        return self._intended

    def agree(self, samples: int, ids_hash: int) -> None:
        self._agreed = samples, ids_hash

    def apply(self, batch: Batch) -> None:
        """Record that the step was applied. The next global batch is another one, also of a loader that does not report
        its samples."""
        if self._agreed is not None:
            global_batch, key = batch.global_batch, self._generation()
            updates = max(Counter(self._updates).values(), default=0)
            place = (self._state.step, global_batch.epoch, global_batch.start, global_batch.stop)
            digest, is_skipped = SESSION.run_loop.digest(), step.facts().trains_nothing
            self._writer.write(Applied(*key, *place, *self._agreed, digest, updates, is_skipped))
        self._ids, self._intended, self._agreed = [], None, None
        self._updates.clear()

    def updated(self, optimizer: object) -> None:
        self._updates.append(id(optimizer))

    def undone(self) -> None:
        self._updates.pop()

    def _generation(self) -> tuple[int, int]:
        """Return the run id and the number of the generation. A job that resumes from a checkpoint has a higher run id,
        and counts its generations anew."""
        id = world.current().id
        return max(id.run_id, self._state.run_id), id.number


def sample_records(state: StepState) -> SampleRecords | None:
    """Return None without a ledger to keep, or without a loader."""
    folder = read_job_env().sample_ledger
    if not folder or state.loader is None:
        return None
    env = read_worker_env()
    return SampleRecords(
        state, LedgerWriter(Path(folder), env.worker if env is not None else "alone", socket.gethostname())
    )
