"""The batches of an epoch as samplers of torch list them, for the workers with which a job has started: global batches,
and their division among any number of workers. Pure.

The k-th batches of all workers of the start, in order of their ranks, are the global batch of step k; of several steps,
where the script adds up the gradients of several batches. With as many workers as at the start, each of them gets the
batches that its own sampler has listed; otherwise the samples of a global batch are divided as evenly as possible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from farandole.errors import ConfigError

Samples = NDArray[np.int64]


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    workers: int
    samples: bytes
    sizes: bytes


class ListedBatches:
    """The batches of one epoch; immutable.

    Args:
        samples: The samples of each worker of the start, in the order of its batches, by rank.
        sizes: The number of samples in each batch; those of all workers are alike.
        batches_of_step: Batches of each worker for one step.

    Attributes:
        workers: The number of workers at the start.
        size: The number of samples of all workers together, repeated ones included.
        largest, smallest: Most and fewest samples of a batch.
    """

    def __init__(self, samples: Samples, sizes: NDArray[np.int64], batches_of_step: int = 1) -> None:
        self._samples, self._sizes = samples, sizes
        self.workers, self.size = samples.shape[0], samples.size
        self.largest, self.smallest = int(sizes.max()), int(sizes.min())
        self.batches_of_step = batches_of_step
        self._columns = np.concatenate(([0], np.cumsum(sizes)))  # of `samples`, at which batches begin
        steps = -(-len(sizes) // batches_of_step)
        first = np.minimum(np.arange(steps + 1) * batches_of_step, len(sizes))
        self._bounds = self.workers * self._columns[first]  # positions at which the global batches begin

    def added_up(self, batches_of_step: int) -> ListedBatches:
        """Return the same batches, with so many of them for a step."""
        return ListedBatches(self._samples, self._sizes, batches_of_step)

    # Global batches --------------------------------------------------------------------------------------

    @property
    def largest_global_batch(self) -> int:
        """Most samples of a global batch."""
        return int(np.diff(self._bounds).max())

    @property
    def last_global_batch(self) -> int:
        """Samples of the epoch's last global batch."""
        return int(self._bounds[-1] - self._bounds[-2])

    def steps_from(self, position: int) -> int:
        """Return the number of global batches from a position to the end of the epoch."""
        return len(self._bounds) - 1 - self._step_at(position)

    def stop(self, position: int) -> int:
        """Return the end of the global batch that begins at a position."""
        step = self._step_at(position)
        return int(self._bounds[min(step + 1, len(self._bounds) - 1)])

    def batches_of(self, start: int) -> list[int]:
        """Return the sizes of a worker's batches in the global batch that begins at a position."""
        first = self._step_at(start) * self.batches_of_step
        return [int(each) for each in self._sizes[first : first + self.batches_of_step]]

    def look_up(self, positions: NDArray[np.int64]) -> Samples:
        """Return the samples at positions of the epoch's order: within a global batch, worker by worker."""
        step = np.searchsorted(self._bounds, positions, side="right") - 1
        start = self._bounds[step]
        width = (self._bounds[np.minimum(step + 1, len(self._bounds) - 1)] - start) // self.workers
        rank, place = np.divmod(positions - start, np.maximum(width, 1))
        found: Samples = self._samples[rank, start // self.workers + place]
        return found

    def divides_equally(self, position: int, workers: int) -> bool:
        """Return whether all global batches from a position on have as many samples for each of `workers`."""
        lengths = np.diff(self._bounds[self._step_at(position) :])
        return not (lengths % workers).any()

    def adds_unequal(self, position: int) -> bool:
        """Return whether a global batch from a position on adds up batches of different sizes."""
        first = self._step_at(position) * self.batches_of_step
        steps = range(first, len(self._sizes), self.batches_of_step)
        return any(len(set(self._sizes[each : each + self.batches_of_step].tolist())) > 1 for each in steps)

    def _step_at(self, position: int) -> int:
        return int(np.searchsorted(self._bounds, position, side="left"))

    # Without global batches ------------------------------------------------------------------------------

    def rest(self, position: int, rank: int, workers: int) -> list[list[int]]:
        """Return the batches of a rank behind a position that ends a global batch, for `workers` that share the rest
        of the epoch without a step loop: equally many batches of the same sizes, with repeated samples where the rest
        cannot be divided equally."""
        column = position // self.workers
        if workers == self.workers:
            own = self._sizes[int(np.searchsorted(self._columns, column)) :]
            return _cut(self._samples[rank, column:], own.tolist())
        rest = self._samples[:, column:].T.ravel()  # workers take turns, sample by sample
        share = np.concatenate([rest, np.resize(rest, -len(rest) % workers)])[rank::workers]
        sizes = [self.largest] * (len(share) // self.largest)
        left = len(share) % self.largest
        if left >= min(2, self.smallest) or (left and not sizes):
            sizes.append(left)
        elif left:
            sizes[-1] += left  # a batch of one sample, which BatchNorm refuses, where the script has none
        return _cut(share, sizes)

    # The whole --------------------------------------------------------------------------------------------

    @property
    def digest(self) -> bytes:
        """A hash of all batches."""
        return hashlib.blake2b(self.pack(), digest_size=16).digest()

    def pack(self) -> bytes:
        """Return the batches as bytes."""
        return msgspec.msgpack.encode(_Packed(self.workers, _narrow(self._samples), _narrow(self._sizes)))

    @classmethod
    def unpack(cls, packed: bytes) -> ListedBatches:
        """Return the batches that pack() has packed."""
        read = msgspec.msgpack.decode(packed, type=_Packed)
        return cls(_wide(read.samples).reshape(read.workers, -1), _wide(read.sizes))

    def left_out(self, samples: int) -> Samples:
        """Return the samples of a data set of that size that are in no batch."""
        return np.flatnonzero(np.bincount(self._samples.ravel(), minlength=samples) == 0)

    def repeated(self) -> Samples:
        """Return the samples that come more than once, each as often as it comes again."""
        counts = np.bincount(self._samples.ravel())
        return np.repeat(np.arange(len(counts)), np.maximum(counts - 1, 0))


def of_lists(by_rank: Sequence[Sequence[Sequence[int]]], samples: int) -> ListedBatches:
    """Return the batches of all workers of the start.

    Args:
        by_rank: The batches of each worker, by rank.
        samples: The number of samples in the data set.

    Raises:
        ConfigError: They do not make steps of all workers.
    """
    sizes = [np.array([len(batch) for batch in batches], dtype=np.int64) for batches in by_rank]
    for rank, each in enumerate(sizes):
        if len(each) != len(sizes[0]):
            raise ConfigError(f"lists {len(sizes[0])} batches for rank 0 and {len(each)} for rank {rank}")
        if (each != sizes[0]).any():
            step = int(np.flatnonzero(each != sizes[0])[0])
            raise ConfigError(
                f"lists batches of different sizes for one step: {sizes[0][step]} samples for rank 0 and {each[step]} "
                f"for rank {rank}, whose gradients count alike"
            )
    if not len(sizes[0]) or not sizes[0].min():
        raise ConfigError("lists no batch" if not len(sizes[0]) else "lists an empty batch")
    flat = np.array([[index for batch in batches for index in batch] for batches in by_rank], dtype=np.int64)
    refuse_foreign(flat, samples)
    return ListedBatches(flat, sizes[0])


def refuse_foreign(listed: Samples, samples: int) -> None:
    """Raise ConfigError for samples that a data set of this size does not have."""
    lowest, highest = int(listed.min()), int(listed.max())
    if lowest < 0 or highest >= samples:
        raise ConfigError(
            f"lists sample {lowest if lowest < 0 else highest}, and the data set of its DataLoader has {samples}"
        )


def _cut(samples: Samples, sizes: list[int]) -> list[list[int]]:
    return [each.tolist() for each in np.split(samples, np.cumsum(sizes)[:-1])] if sizes else []


def _narrow(values: NDArray[np.int64]) -> bytes:
    is_small = int(values.max(initial=0)) < 2**31
    return (b"4" if is_small else b"8") + values.astype("<i4" if is_small else "<i8").tobytes()


def _wide(packed: bytes) -> NDArray[np.int64]:
    return np.frombuffer(packed[1:], dtype=f"<i{packed[:1].decode()}").astype(np.int64)
