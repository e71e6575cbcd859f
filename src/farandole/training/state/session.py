"""What an elastic function has installed in this process: the run loop, which lies above optimizer, loader and state
and answers their requests, and those that record, audit and time the steps. Main thread only.

Outside of an elastic function, and for what a job does not have, null objects are in their places.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from farandole.base.membership import Progress
    from farandole.training.state.batch import Batch, GlobalBatch

Samples = NDArray[np.int64]


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


class RunLoop:
    """The run loop, as optimizer, loader and state see it; this one is that of a script without an elastic function."""

    def can_repeat(self) -> bool:
        """Return whether a fault in the current step can be absorbed: the loader will hand out its batch again."""
        return False

    def steps_decided(self) -> int:
        """Return the step counter; 0 where steps are not counted."""
        return 0

    def prepared(self) -> int:
        """Return the number of the planned generation for which this worker holds a PREPARE; 0 for none."""
        return 0

    def agree(self, prepared_by_rank: list[int]) -> None:
        """Take note of the value that each rank holds: a planned change is agreed when all are equal."""

    def digest(self) -> int:
        """Return the digest of the state from the last boundary; 0 when nothing was hashed."""
        return 0

    def has_saved(self) -> bool:
        """Return whether this rank has begun a checkpoint at the last boundary."""
        return False

    def compare(self, digests_by_rank: list[int], has_any_saved: bool) -> None:
        """Take note of the digests of all ranks, and of a checkpoint. Different digests mean different states."""

    def receives_updates(self) -> bool:
        """Return whether it answers `agreed_update`; otherwise only the state itself can know of host events."""
        return False

    def agreed_update(self) -> HostUpdateResult | None:
        """Return the change that all ranks adopt now, or None. Called by all ranks at the same commit."""
        return None

    def committing(self) -> None:
        """Note that a commit is being made: until committed(), it is neither the old one nor the new one."""

    def committed(self) -> None:
        """Note that the live state equals the new commit."""


class Recorder:
    """The sample ledger, as loader, optimizer and state see it; this one records nothing. `SampleRecords` in
    worker/sample_records.py writes it."""

    def delivered(self, batch: Batch, ids: Sequence[int]) -> None:
        """Note that the loader hands out a batch with these samples of the data set; none for a dummy batch."""

    def intend(self, batch: Batch) -> int:
        """Note that this rank is about to contribute to the step. Returns the hash of its local batch for the step
        header; 0 where nothing is recorded."""
        return 0

    def agree(self, samples: int, ids_hash: int) -> None:
        """Note the sums over the local batches of all ranks, from the headers of the step's last reduction."""

    def apply(self, batch: Batch) -> None:
        """Note that the step is decided on this rank. Its number and the loader's cursor have not moved yet."""

    def updated(self, optimizer: object) -> None:
        """Note that the optimizer has changed its parameters."""

    def undone(self) -> None:
        """Note that the last updated() was undone."""


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


class SamplerRecorder:
    """The samples that samplers were told of, under the commit rule, and whether they are needed: collecting them takes
    time. This one records nothing."""

    is_needed = False

    def trained(self, sampler: object, parts: Sequence[TrainedSamples]) -> None:
        """Note the samples that a sampler was told this rank has trained."""

    def left(self, sampler: object, epoch: int, samples: int | None) -> None:
        """Note that a sampler enters another epoch, with so many samples of this one untrained; None: not known."""


class Auditor:
    """The audit of strict mode; this one compares nothing. `StrictSteps` in worker/strict_steps.py does."""

    def compare(self, global_batch: GlobalBatch, own: Sequence[int], again: Sequence[int]) -> None:
        """Compare the results of audited shards before a step is applied: by rank, the digest of its own audited shard,
        and that of the shard which it has computed again. Raises ShardsDiffer, alike on all ranks, when two differ."""


class Timer:
    """The times of the steps, where local batches follow the speed of the workers, and whether they are needed; this
    one measures nothing. `Balance` in data/balance.py does."""

    is_needed = False

    def take_own_ns(self) -> int:
        """Return the nanoseconds that this worker took for the step that it is about to reduce; 0: not measured."""
        return 0

    def agreed(self, samples: Sequence[int], own_ns: Sequence[int]) -> None:
        """Take note of samples and time of each rank, by rank, from the headers of a reduction."""


class Session:
    """The parts that are installed.

    is_elastic  an elastic function runs, so that the size of the world may change
    may_save  asks a job's coordinator: may_save(name, progress, file) returns "" if this worker may save, else the
              reason; `name` identifies the request. None without a coordinator, where rank 0 stays the same worker.
              It does not end with the elastic function
    """

    def __init__(self) -> None:
        self.may_save: Callable[[str, Progress, str], str] | None = None
        self.close()

    def open(
        self,
        run_loop: RunLoop,
        *,
        recorder: Recorder | None = None,
        sampler_recorder: SamplerRecorder | None = None,
        auditor: Auditor | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Enter an elastic function. None: the job does not have this part."""
        self.is_elastic, self.run_loop = True, run_loop
        self.recorder, self.sampler_recorder = recorder or Recorder(), sampler_recorder or SamplerRecorder()
        self.auditor, self.timer = auditor or Auditor(), timer or Timer()

    def close(self) -> None:
        """Leave the elastic function. Idempotent."""
        self.open(RunLoop())
        self.is_elastic = False


SESSION = Session()
"""That of this process."""
