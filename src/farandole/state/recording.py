"""Whom loader, optimizer and state tell which samples a step trains, where a sample ledger is kept. Main thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from farandole.state.ticket import Batch


class Recorder(Protocol):
    """Writes it down (worker/sample_records.py)."""

    def delivered(self, batch: Batch, ids: Sequence[int]) -> None: ...
    def intend(self, batch: Batch) -> int: ...
    def agree(self, samples: int, ids_hash: int) -> None: ...
    def apply(self, batch: Batch) -> None: ...


_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """From here on `recorder` is told; with None nobody is."""
    global _recorder
    _recorder = recorder


def delivered(batch: Batch, ids: Sequence[int]) -> None:
    """The loader hands out a batch with these samples of the data set; none for a ghost."""
    if _recorder is not None:
        _recorder.delivered(batch, ids)


def intend(batch: Batch) -> int:
    """This rank is about to contribute to the step. The hash of its share for the step header; 0 when nobody
    wants to know."""
    return _recorder.intend(batch) if _recorder is not None else 0


def agree(samples: int, ids_hash: int) -> None:
    """The sums over the shares of all ranks, from the headers of the step's last reduction."""
    if _recorder is not None:
        _recorder.agree(samples, ids_hash)


def apply(batch: Batch) -> None:
    """The step is decided on this rank; its number and the loader's cursor have not moved yet."""
    if _recorder is not None:
        _recorder.apply(batch)
