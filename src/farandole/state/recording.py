"""Recorders of the samples of each step, where a sample ledger is kept. Loader, optimizer and state report to them.
Main thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from farandole.state.global_batch import Batch

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
    """Records the samples that samplers were told of, under the commit rule (worker/sample_records.py)."""

    def trained(self, sampler: object, parts: Sequence[TrainedSamples]) -> None: ...
    def left(self, sampler: object, epoch: int, samples: int | None) -> None: ...


_recorder: Recorder | None = None
_sampler_recorder: SamplerRecorder | None = None


def install(recorder: Recorder | None) -> None:
    """Install the recorder that is called from now on; None removes it."""
    global _recorder
    _recorder = recorder


def delivered(batch: Batch, ids: Sequence[int]) -> None:
    """Report that the loader hands out a batch with these samples of the data set; none for a dummy batch."""
    if _recorder is not None:
        _recorder.delivered(batch, ids)


def intend(batch: Batch) -> int:
    """Report that this rank is about to contribute to the step. Returns the hash of its local batch for the step
    header; 0 without a recorder."""
    return _recorder.intend(batch) if _recorder is not None else 0


def agree(samples: int, ids_hash: int) -> None:
    """Report the sums over the local batches of all ranks, from the headers of the step's last reduction."""
    if _recorder is not None:
        _recorder.agree(samples, ids_hash)


def apply(batch: Batch) -> None:
    """Report that the step is decided on this rank. Its number and the loader's cursor have not moved yet."""
    if _recorder is not None:
        _recorder.apply(batch)


def updated(optimizer: object) -> None:
    """Report that the optimizer has changed its parameters."""
    if _recorder is not None:
        _recorder.updated(optimizer)


def undone() -> None:
    """Report that the last updated() was undone."""
    if _recorder is not None:
        _recorder.undone()


# Under the commit rule ------------------------------------------------------------------------------------------------


def install_for_samplers(recorder: SamplerRecorder | None) -> None:
    """Install the recorder of samplers that is called from now on; None removes it."""
    global _sampler_recorder
    _sampler_recorder = recorder


def records_samplers() -> bool:
    """Return whether a recorder is installed: collecting its arguments takes time."""
    return _sampler_recorder is not None


def trained(sampler: object, parts: Sequence[TrainedSamples]) -> None:
    """Report the samples that a sampler was told this rank has trained."""
    if _sampler_recorder is not None:
        _sampler_recorder.trained(sampler, parts)


def left(sampler: object, epoch: int, samples: int | None) -> None:
    """Report that a sampler enters another epoch, with so many samples of this one untrained; None: not known."""
    if _sampler_recorder is not None:
        _sampler_recorder.left(sampler, epoch, samples)
