"""The lines of a sample ledger: what they say, and how they are written. Pure; writer.py and reading.py use it.

A line is a JSON array whose first item names its kind, so that a person can read it and a line that was cut
short can be told. Sample ids are plain numbers; where they follow each other, pairs of [first, how many].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

FORMAT = 1
WHOLE, HOLED = "whole", "holed"  # of the same length: one is written over the other

Ids: TypeAlias = list[int | tuple[int, int]]
Generation: TypeAlias = tuple[int, int]
"""(lineage, number): ordered; what starts later is greater."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The first line of a file. `status` turns from WHOLE into HOLED when a line could not be written."""

    format: int
    status: str
    worker: str
    host: str
    pid: int
    part: int


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """This worker is a member of a generation, which starts at `step`: what lower generations have written of
    this step and of later ones is void.

    nonce    tells generations of two jobs with the same numbers apart
    cursor   samples of `epoch` that are trained already
    samples  positions of one epoch's order: of the data set, where each sample comes once; 0 where nobody knows
    order    name of the order, as the loader gives it
    """

    lineage: int
    generation: int
    nonce: str
    rank: int
    size: int
    step: int
    epoch: int
    cursor: int
    samples: int
    order: str = ""

    @property
    def key(self) -> Generation:
        return self.lineage, self.generation

    @property
    def has_each_once(self) -> bool:
        """Whether an epoch is to have each of the samples 0, 1, ..., samples - 1 once. Otherwise, as with drawing by
        weights, it is only the positions of the order of which each has to come once."""
        return self.samples > 0 and not self.order.startswith("weighted")


class Intent(msgspec.Struct, frozen=True, array_like=True, tag="intent"):
    """About to contribute to a step: the samples of this rank's share as the loader has delivered them.

    start, stop  positions of the global batch in the epoch's order; those beyond its end are of the next epoch
    low, high    positions of the share, in the order of `ids`; equal for a ghost, whose samples do not count and are
                 not in `ids`
    """

    lineage: int
    generation: int
    step: int
    rank: int
    epoch: int
    start: int
    stop: int
    low: int
    high: int
    ids: Ids

    @property
    def key(self) -> Generation:
        return self.lineage, self.generation


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied"):
    """This worker has applied a step. `samples` and `ids_hash` are sums over the shares of all ranks, as they
    agreed on in the step's last reduction; the hash is hashing.ids_hash."""

    lineage: int
    generation: int
    step: int
    epoch: int
    start: int
    stop: int
    samples: int
    ids_hash: int

    @property
    def key(self) -> Generation:
        return self.lineage, self.generation


class EpochEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """All workers have ended an epoch, with the cursor there; the next step is `step`."""

    lineage: int
    generation: int
    step: int
    epoch: int
    cursor: int

    @property
    def key(self) -> Generation:
        return self.lineage, self.generation


class Missed(msgspec.Struct, frozen=True, array_like=True, tag="missed"):
    """So many lines before this one could not be written."""

    lines: int


Record: TypeAlias = Opened | Started | Intent | Applied | EpochEnded | Missed

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """The line, with its end."""
    return _encoder.encode(record) + b"\n"


def decode(line: bytes) -> Record | None:
    """None for a line that no writer has written as a whole."""
    try:
        record: Record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return record


def compact(ids: Sequence[int] | NDArray[np.int64]) -> Ids:
    """The shorter form: as they are, or the runs that they are made of."""
    array = np.asarray(ids, dtype=np.int64)
    ends = np.flatnonzero(np.diff(array) != 1) + 1
    if 2 * (len(ends) + 1) > len(array):
        plain: Ids = array.tolist()
        return plain
    bounds = [0, *ends.tolist(), len(array)]
    return [(int(array[begin]), end - begin) for begin, end in itertools.pairwise(bounds)]


def expand(ids: Ids) -> NDArray[np.int64]:
    """Every id, in the order in which it was delivered."""
    if not any(isinstance(item, tuple) for item in ids):
        return np.array(ids, dtype=np.int64)
    runs = [item if isinstance(item, tuple) else (item, 1) for item in ids]
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])
