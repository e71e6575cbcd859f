"""The files of a sample ledger: the content and the encoding of their lines, and the writer. proving.py reads them.

A line is a JSON array whose first item names its kind, so that people can read it and a truncated line is recognized.
Sample ids are plain numbers; consecutive ones are pairs of [first, count].
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("farandole")


FORMAT = 1
WHOLE, HOLED = "whole", "holed"  # of the same length: one is written over the other

Ids: TypeAlias = list[int | tuple[int, int]]
GenerationKey: TypeAlias = tuple[int, int]
"""(run_id, number): ordered; a later start is greater."""
Entry: TypeAlias = tuple[int, int, int]
"""(run_id, number, entry): the same, under the commit rule."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """First line of a file. `status` changes from WHOLE to HOLED when a line could not be written."""

    format: int
    status: str
    worker: str
    host: str
    pid: int
    part: int


class _OfGeneration(msgspec.Struct, frozen=True, array_like=True):
    """A record that a member of a generation has written."""

    run_id: int
    generation: int

    @property
    def key(self) -> GenerationKey:
        return self.run_id, self.generation


class _OfEntry(msgspec.Struct, frozen=True, array_like=True):
    """The same, under the commit rule. `entry` numbers the calls of the elastic function in one generation: a worker
    that is alone can begin again without a new one."""

    run_id: int
    generation: int
    entry: int

    @property
    def key(self) -> Entry:
        return self.run_id, self.generation, self.entry


class Started(_OfGeneration, frozen=True, tag="started"):
    """A worker is a member of a generation, which starts at `step`: records of lower generations for this step and
    later ones are void.

    nonce    tells generations of two jobs with the same numbers apart
    cursor   samples of `epoch` that are trained already
    samples  positions of one epoch's order: of the data set, where each sample comes once; 0 where unknown
    order    name of the order, as the loader gives it
    copied   the worker has copied parameters and optimizer state from another one; None where unknown
    """

    nonce: str
    rank: int
    size: int
    step: int
    epoch: int
    cursor: int
    samples: int
    order: str = ""
    copied: bool | None = None

    @property
    def streams(self) -> int:
        """Number of streams from which the samples come, sample n of stream v as id v + streams * n; 0 without streams.
        Their lengths are known to the data set alone."""
        return int(self.order.removeprefix("streams-")) if self.order.startswith("streams-") else 0

    @property
    def has_each_once(self) -> bool:
        """True when an epoch must have each of the samples 0, 1, ..., samples - 1 once, or the first samples of each
        stream, without a gap. Otherwise, as with weighted draws, only each position of the order must come once."""
        return self.streams > 0 or (self.samples > 0 and not self.order.startswith("weighted"))


class Listed(_OfGeneration, frozen=True, tag="listed"):
    """The samplers of a script have listed the batches of an epoch (farandole run --in-place): the order of this epoch
    has each sample of the data set once, except for these.

    samples   of the data set
    left_out  samples that no sampler has listed
    repeats   samples that they have listed again, each as often as it comes again
    """

    epoch: int
    samples: int
    left_out: Ids
    repeats: Ids


class Intent(_OfGeneration, frozen=True, tag="intent"):
    """A worker is about to contribute to a step: the samples of its local batch as the loader has delivered them.

    start, stop  positions of the global batch in the epoch's order; those beyond its end are of the next epoch
    low, high    positions of the local batch, in the order of `ids`; equal for a dummy batch, whose samples do not
                 count and are not in `ids`
    """

    step: int
    rank: int
    epoch: int
    start: int
    stop: int
    low: int
    high: int
    ids: Ids


class Applied(_OfGeneration, frozen=True, tag="applied"):
    """A worker has applied a step. `samples` and `ids_hash` are sums over the local batches of all ranks, as agreed in
    the step's last reduction; the hash is ids_hash().

    digest   digest of a part of the state before the step, the same part on all ranks; 0 where nothing was hashed
    updates  number of times that optimizers have changed the worker's weights since the last step that it has applied,
             without a copied state in between; -1 where not counted
    is_skipped  the step has trained none of its samples, on any worker: all of them have left it out
    """

    step: int
    epoch: int
    start: int
    stop: int
    samples: int
    ids_hash: int
    digest: int = 0
    updates: int = -1
    is_skipped: bool = False


class Differed(_OfGeneration, frozen=True, tag="differed"):
    """The states of the members were compared after `step` steps, and differed: see state/state_digest.py. `rank` is
    that of the worker that writes this. An empty `ranks` means that these tensors are computed from each worker's own
    samples."""

    step: int
    rank: int
    name: str
    objects: int
    ranks: tuple[int, ...]
    source: int
    is_trained: bool


class EpochEnded(_OfGeneration, frozen=True, tag="ended"):
    """All workers have ended an epoch at this cursor; the next step is `step`."""

    step: int
    epoch: int
    cursor: int


class Hashed(_OfGeneration, frozen=True, tag="hashed"):
    """The SHA-256 of parameters, buffers and optimizer state in strict mode, at the end of an epoch or within it. All
    runs of a job must have the same one after the same step, whatever has happened to their workers."""

    step: int
    epoch: int
    hash: str


class Entered(_OfEntry, frozen=True, tag="entered"):
    """A worker is about to call the elastic function, under the commit rule. All members of the generation have the
    state of commit number `commit`: earlier records after that commit are void.

    samplers  samplers of the state: name, and samples of the data set
    """

    nonce: str
    rank: int
    size: int
    commit: int
    samplers: list[tuple[str, int]]


class Trained(_OfEntry, frozen=True, tag="trained"):
    """A worker has told a sampler which samples it has trained, under the commit rule.

    commit             number of the last commit before
    number             number of the call in the generation; equal on all ranks that share a batch
    ids                samples of this rank
    repeats            its samples that another rank has among its `ids`: they fill up the end of an epoch
    samples, ids_hash  of the `ids` of all ranks together; -1 and 0 where each rank knows its own only
    """

    commit: int
    rank: int
    sampler: str
    number: int
    epoch: int
    ids: Ids
    repeats: Ids
    samples: int
    ids_hash: int


class EpochLeft(_OfEntry, frozen=True, tag="left"):
    """A sampler was told to begin another epoch, under the commit rule, with `samples` of this one untrained; -1:
    unknown, since each rank has recorded its own."""

    commit: int
    rank: int
    sampler: str
    epoch: int
    samples: int


class Missed(msgspec.Struct, frozen=True, array_like=True, tag="missed"):
    """A number of lines before this one could not be written."""

    lines: int


Record: TypeAlias = (
    Opened
    | Started
    | Listed
    | Intent
    | Applied
    | Differed
    | EpochEnded
    | Hashed
    | Entered
    | Trained
    | EpochLeft
    | Missed
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """Return the line, with its end."""
    return _encoder.encode(record) + b"\n"


def decode(line: bytes) -> Record | None:
    """Return the record of a line; None for an incomplete line."""
    try:
        record: Record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return record


def name_of(key: GenerationKey | Entry) -> str:
    """Return the name of a generation, for people."""
    run_id, number, *_ = key
    return f"generation {number}" + (f" of run {run_id}" if run_id > 1 else "")


def compact(ids: Sequence[int] | NDArray[np.int64]) -> Ids:
    """Return the shorter form: the ids as they are, or their runs."""
    array = np.asarray(ids, dtype=np.int64)
    ends = np.flatnonzero(np.diff(array) != 1) + 1
    if 2 * (len(ends) + 1) > len(array):
        plain: Ids = array.tolist()
        return plain
    bounds = [0, *ends.tolist(), len(array)]
    return [(int(array[begin]), end - begin) for begin, end in itertools.pairwise(bounds)]


def expand(ids: Ids) -> NDArray[np.int64]:
    """Return every id, in the order in which it was delivered."""
    if not any(isinstance(item, tuple) for item in ids):
        return np.array(ids, dtype=np.int64)
    runs = [item if isinstance(item, tuple) else (item, 1) for item in ids]
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])


# A hash of a set of samples, whose sum over parts is that of the whole ------------------------------------------------

HASH_MASK = (1 << 64) - 1


def ids_hash(ids: Sequence[int] | NDArray[np.int64]) -> int:
    """Return the sum, modulo 2^64, of a mixed 64-bit number for each id (the finalizer of splitmix64).

    Two collections of equally many ids with the same hash are equal, except with a probability of 2^-64; deliberate
    collisions are not considered. The order of the ids does not matter; their multiplicity does.
    """
    x = np.asarray(ids, dtype=np.int64).astype(np.uint64)
    x = x + np.uint64(0x9E3779B97F4A7C15)  # not 0, which would be mixed to 0
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


# The writer -----------------------------------------------------------------------------------------------------------
#
# A worker's files of a sample ledger. A line is one write(2), so that it survives a kill -9 right after it.
#
# Nothing here stops the training. When a line cannot be written (a full disk), this is logged once, and the file is
# marked as incomplete.

PART_BYTES = 64 << 20  # a larger file is followed by another one


class LedgerWriter:
    """Writes to `folder`/WORKER-RANDOM-0000.jsonl, then to -0001 and so on.

    worker, host  for people who read the ledger
    write         os.write, or a substitute in a test
    """

    def __init__(
        self,
        folder: Path,
        worker: str,
        host: str,
        part_bytes: int = PART_BYTES,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._folder, self._worker, self._host = folder, worker, host
        self._stem = f"{worker}-{secrets.token_hex(4)}"
        self._part_bytes, self._system_write = part_bytes, write
        self._file: int | None = None
        self._bytes = self._part = 0
        self._is_torn = False  # the file may end in the middle of a line
        self._missed = 0
        self._started: Started | Entered | None = None
        self._has_warned = False

    def write(self, record: Record) -> None:
        """Write a record. Never raises errors of the file system."""
        try:
            if self._file is None or self._bytes >= self._part_bytes:
                self._next_part()
            if self._missed:
                self._put(Missed(self._missed))
                self._missed = 0
            self._put(record)
        except OSError as error:
            self._missed += 1
            self._give_warning(error)
        if isinstance(record, Started | Entered):
            self._started = record  # for the parts to come

    def close(self) -> None:
        """Close the file. Idempotent; a later write() begins a new part."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _next_part(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._stem}-{self._part:04d}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.close()
        self._file, self._bytes, self._is_torn = file, 0, False
        try:
            status = HOLED if self._missed else WHOLE
            self._put(Opened(FORMAT, status, self._worker, self._host, os.getpid(), self._part))
            if self._started is not None:
                self._put(self._started)  # each part can be understood alone
        except OSError:
            self.close()  # begun anew with the next line
            raise
        self._part += 1

    def _put(self, record: Record) -> None:
        assert self._file is not None
        line = encode(record)
        if self._is_torn:
            line = b"\n" + line
        written = self._system_write(self._file, line)
        self._bytes += written
        self._is_torn = written < len(line)
        if written < len(line) - 1:  # without the end of its line, a record is there
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def _give_warning(self, error: OSError) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # needs no new block, so a full disk does not matter
                os.pwrite(self._file, HOLED.encode(), len(f'["opened",{FORMAT},"'))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the sample ledger in %s lacks records from now on: %s; training continues. Free space there",
                self._folder,
                error,
            )
