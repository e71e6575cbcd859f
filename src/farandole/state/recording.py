"""Whom loader, optimizer and state tell which samples a step trains, where a sample ledger is kept. Main thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from farandole.state.global_batch import Batch

Samples = NDArray[np.int64]


class Recorder(Protocol):
    """Writes it down (worker/sample_records.py)."""

    def delivered(self, batch: Batch, ids: Sequence[int]) -> None: ...
    def intend(self, batch: Batch) -> int: ...
    def agree(self, samples: int, ids_hash: int) -> None: ...
    def apply(self, batch: Batch) -> None: ...
    def updated(self, optimizer: object) -> None: ...
    def undone(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """What a sampler was told in one call, of one epoch.

    ids       this rank has trained them; without repeats
    repeats   it has trained these, too, and another rank the same ones: they fill up the end of an epoch
    everyone  what all ranks have trained in the same call; None: nobody knows
    """

    epoch: int
    ids: Samples
    repeats: Samples
    everyone: Samples | None


class SamplerRecorder(Protocol):
    """Writes down what samplers were told, under the commit rule (worker/commit_records.py)."""

    def trained(self, sampler: object, parts: Sequence[Part]) -> None: ...
    def left(self, sampler: object, epoch: int, samples: int | None) -> None: ...


_recorder: Recorder | None = None
_sampler_recorder: SamplerRecorder | None = None


def install(recorder: Recorder | None) -> None:
    """From here on `recorder` is told; with None nobody is."""
    global _recorder
    _recorder = recorder


def delivered(batch: Batch, ids: Sequence[int]) -> None:
    """The loader hands out a batch with these samples of the data set; none for a dummy batch."""
    if _recorder is not None:
        _recorder.delivered(batch, ids)


def intend(batch: Batch) -> int:
    """This rank is about to contribute to the step. The hash of its local batch for the step header; 0 when nobody
    wants to know."""
    return _recorder.intend(batch) if _recorder is not None else 0


def agree(samples: int, ids_hash: int) -> None:
    """The sums over the local batches of all ranks, from the headers of the step's last reduction."""
    if _recorder is not None:
        _recorder.agree(samples, ids_hash)


def apply(batch: Batch) -> None:
    """The step is decided on this rank; its number and the loader's cursor have not moved yet."""
    if _recorder is not None:
        _recorder.apply(batch)


def updated(optimizer: object) -> None:
    """The optimizer has moved its parameters."""
    if _recorder is not None:
        _recorder.updated(optimizer)


def undone() -> None:
    """The last updated() was taken back."""
    if _recorder is not None:
        _recorder.undone()


# Under the commit rule ---------------------------------------------------------------------------------------


def install_for_samplers(recorder: SamplerRecorder | None) -> None:
    """From here on `recorder` is told; with None nobody is."""
    global _sampler_recorder
    _sampler_recorder = recorder


def hears_samplers() -> bool:
    """Whether somebody wants to know: what to tell takes time to find out."""
    return _sampler_recorder is not None


def trained(sampler: object, parts: Sequence[Part]) -> None:
    """A sampler was told what this rank has trained."""
    if _sampler_recorder is not None:
        _sampler_recorder.trained(sampler, parts)


def left(sampler: object, epoch: int, samples: int | None) -> None:
    """A sampler goes on to another epoch, with so many samples of this one untrained; None: nobody knows."""
    if _sampler_recorder is not None:
        _sampler_recorder.left(sampler, epoch, samples)
