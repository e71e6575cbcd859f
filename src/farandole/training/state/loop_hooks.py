"""Queries from the lower layers to the run loop, which lies above them and installs itself here. Main thread only."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from farandole.training.state.batch import Batch, GlobalBatch


class RunLoop(Protocol):
    """The elastic run loop, as optimizer, loader and state see it."""

    def can_repeat(self) -> bool:
        """Return whether a fault in the current step can be absorbed: the loader will hand out its batch again."""
        ...

    def steps_decided(self) -> int:
        """Return the step counter."""
        ...

    def prepared(self) -> int:
        """Return the number of the planned generation for which this worker holds a PREPARE; 0 for none."""
        ...

    def agree(self, prepared_by_rank: list[int]) -> None:
        """Take note of the value that each rank holds: a planned change is agreed when all are equal."""
        ...

    def digest(self) -> int:
        """Return the digest of the state from the last boundary; 0 when nothing was hashed."""
        ...

    def has_saved(self) -> bool:
        """Return whether this rank has begun a checkpoint at the last boundary."""
        ...

    def compare(self, digests_by_rank: list[int], has_any_saved: bool) -> None:
        """Take note of the digests of all ranks, and of a checkpoint. Different digests mean different states."""
        ...

    def receives_updates(self) -> bool:
        """Return whether it answers `agreed_update`; otherwise only the state itself can know of host events."""
        ...

    def agreed_update(self) -> HostUpdateResult | None:
        """Return the change that all ranks adopt now, or None. Called by all ranks at the same commit."""
        ...

    def committing(self) -> None:
        """Note that a commit is being made: until committed(), it is neither the old one nor the new one."""
        ...

    def committed(self) -> None:
        """Note that the live state equals the new commit."""
        ...


_run_loop: RunLoop | None = None


def install(run_loop: RunLoop | None) -> None:
    """Install the run loop when it enters an elastic function, or remove it (None) when it leaves."""
    global _run_loop
    _run_loop = run_loop


def can_repeat() -> bool:
    return _run_loop is not None and _run_loop.can_repeat()


def steps_decided() -> int:
    """Return the step counter; 0 outside an elastic function, where steps are not counted."""
    return _run_loop.steps_decided() if _run_loop is not None else 0


def prepared() -> int:
    """Return RunLoop.prepared() for the step header; 0 outside an elastic function."""
    return _run_loop.prepared() if _run_loop is not None else 0


def agree(prepared_by_rank: list[int]) -> None:
    """Pass the values in the headers of all ranks, in order of rank, to RunLoop.agree()."""
    if _run_loop is not None:
        _run_loop.agree(prepared_by_rank)


def digest() -> int:
    """Return RunLoop.digest() for the step header; 0 outside an elastic function."""
    return _run_loop.digest() if _run_loop is not None else 0


def has_saved() -> bool:
    """Return RunLoop.has_saved() for the step header; False outside an elastic function."""
    return _run_loop is not None and _run_loop.has_saved()


def compare(digests_by_rank: list[int], has_any_saved: bool) -> None:
    """Pass the values in the headers of all ranks, in order of rank, to RunLoop.compare()."""
    if _run_loop is not None:
        _run_loop.compare(digests_by_rank, has_any_saved)


def receives_updates() -> bool:
    return _run_loop is not None and _run_loop.receives_updates()


def agreed_update() -> HostUpdateResult | None:
    return _run_loop.agreed_update() if _run_loop is not None else None


def committing() -> None:
    if _run_loop is not None:
        _run_loop.committing()


def committed() -> None:
    if _run_loop is not None:
        _run_loop.committed()


def is_elastic() -> bool:
    """Return whether an elastic function runs, so that the size of the world may change."""
    return _run_loop is not None


# The effect of host events on a job, in Horovod's numbers -------------------------------------------------------------
#
# State receives the events; the run loop agrees on them.


class HostUpdateResult(enum.IntFlag):
    """The effect of host changes, as State.on_hosts_updated() receives it. Several changes at once are combined with
    bitwise or.

    Examples:
        >>> fd.elastic.HostUpdateResult.mixed == fd.elastic.HostUpdateResult.removed | fd.elastic.HostUpdateResult.added
        True
    """

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


# The audit of strict mode ---------------------------------------------------------------------------------------------


class Auditor(Protocol):
    """Compares the results of audited shards (worker/shard_inquiry.py)."""

    def compare(self, global_batch: GlobalBatch, own: Sequence[int], again: Sequence[int]) -> None: ...


_auditor: Auditor | None = None


def install_auditor(auditor: Auditor | None) -> None:
    """Install the auditor that is called from now on; None removes it."""
    global _auditor
    _auditor = auditor


def compare_shards(global_batch: GlobalBatch, own: Sequence[int], again: Sequence[int]) -> None:
    """Compare the results of the audited shards, before a step is applied.

    Args:
        global_batch: The global batch, which has an audit.
        own: The digest of each rank's audited shard, by rank.
        again: The digest of the shard that each rank has computed again, by rank.

    Raises:
        ShardsDiffer: Alike on all ranks: two results differ.
    """
    if _auditor is not None:
        _auditor.compare(global_batch, own, again)


# The time of each worker ----------------------------------------------------------------------------------------------
#
# Where local batches follow the speed of the workers, optimizers report the times of each step. Main thread.


class Timer(Protocol):
    """Measures steps (data/balance.py)."""

    def take_own_ns(self) -> int: ...
    def agreed(self, samples: Sequence[int], own_ns: Sequence[int]) -> None: ...


_timer: Timer | None = None


def install_timer(timer: Timer | None) -> None:
    """Install the timer that is called from now on; None removes it."""
    global _timer
    _timer = timer


def take_own_ns() -> int:
    """Return this worker's time for the step whose gradients it is about to reduce, in nanoseconds; 0: not measured."""
    return _timer.take_own_ns() if _timer is not None else 0


def measures_time() -> bool:
    """Return whether a timer is installed."""
    return _timer is not None


def record_times(samples: Sequence[int], own_ns: Sequence[int]) -> None:
    """Report samples and time of each rank, by rank, from the headers of a reduction."""
    if _timer is not None:
        _timer.agreed(samples, own_ns)


# Recorders ------------------------------------------------------------------------------------------------------------
#
# Recorders of the samples of each step, where a sample ledger is kept. Loader, optimizer and state report to them.
# Main thread.

Samples = NDArray[np.int64]


class Recorder(Protocol):
    """Writes the samples of decided steps to the ledger (worker/sample_records.py)."""

    def delivered(self, batch: Batch, ids: Sequence[int]) -> None: ...
    def intend(self, batch: Batch) -> int: ...
    def agree(self, samples: int, ids_hash: int) -> None: ...
    def apply(self, batch: Batch) -> None: ...
    def updated(self, optimizer: object) -> None: ...
    def undone(self) -> None: ...


@dataclass(frozen=True)
class TrainedSamples:
    """The samples of an epoch that a sampler was told of in one call.

    ids       samples that this rank has trained, without repeats
    repeats   samples that this rank and another one have trained; they fill up the end of an epoch
    everyone  samples that all ranks have trained in the same call; None: not known
    """

    epoch: int
    ids: Samples
    repeats: Samples
    everyone: Samples | None


class SamplerRecorder(Protocol):
    """Records the samples that samplers were told of, under the commit rule."""

    def trained(self, sampler: object, parts: Sequence[TrainedSamples]) -> None: ...
    def left(self, sampler: object, epoch: int, samples: int | None) -> None: ...


_recorder: Recorder | None = None
_sampler_recorder: SamplerRecorder | None = None


def install_recorder(recorder: Recorder | None) -> None:
    """Install the recorder that is called from now on; None removes it."""
    global _recorder
    _recorder = recorder


def record_delivered(batch: Batch, ids: Sequence[int]) -> None:
    """Report that the loader hands out a batch with these samples of the data set; none for a dummy batch."""
    if _recorder is not None:
        _recorder.delivered(batch, ids)


def record_intended(batch: Batch) -> int:
    """Report that this rank is about to contribute to the step. Returns the hash of its local batch for the step
    header; 0 without a recorder."""
    return _recorder.intend(batch) if _recorder is not None else 0


def record_agreed(samples: int, ids_hash: int) -> None:
    """Report the sums over the local batches of all ranks, from the headers of the step's last reduction."""
    if _recorder is not None:
        _recorder.agree(samples, ids_hash)


def record_applied(batch: Batch) -> None:
    """Report that the step is decided on this rank. Its number and the loader's cursor have not moved yet."""
    if _recorder is not None:
        _recorder.apply(batch)


def record_updated(optimizer: object) -> None:
    """Report that the optimizer has changed its parameters."""
    if _recorder is not None:
        _recorder.updated(optimizer)


def record_undone() -> None:
    """Report that the last updated() was undone."""
    if _recorder is not None:
        _recorder.undone()


# Under the commit rule ------------------------------------------------------------------------------------------------


def install_sampler_recorder(recorder: SamplerRecorder | None) -> None:
    """Install the recorder of samplers that is called from now on; None removes it."""
    global _sampler_recorder
    _sampler_recorder = recorder


def records_samplers() -> bool:
    """Return whether a recorder is installed: collecting its arguments takes time."""
    return _sampler_recorder is not None


def record_trained(sampler: object, parts: Sequence[TrainedSamples]) -> None:
    """Report the samples that a sampler was told this rank has trained."""
    if _sampler_recorder is not None:
        _sampler_recorder.trained(sampler, parts)


def record_left(sampler: object, epoch: int, samples: int | None) -> None:
    """Report that a sampler enters another epoch, with so many samples of this one untrained; None: not known."""
    if _sampler_recorder is not None:
        _sampler_recorder.left(sampler, epoch, samples)
