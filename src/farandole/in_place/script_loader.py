"""A script's DataLoader with a DistributedSampler as a loader of Farandole: samples, order and batches are those of
torch, for any number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from farandole.collectives import world
from farandole.data.elastic_loader import LoaderHooks, NoLoaderHooks
from farandole.data.loader import DataLoader
from farandole.data.sample_order import BatchLayout, Lookup
from farandole.errors import ConfigError, StepError
from farandole.state import step
from farandole.state.step import GlobalBatch, StepStatus

NUMBERED = "_farandole_numbered"
"""Attribute of a sampler: the script has called its set_epoch()."""


class NoStepInEpoch(StepError):
    """The script has taken all batches of an epoch for training, and has made no step."""


class SamplerOrder:
    """The order of a DistributedSampler. Its permutation of an epoch depends on the number that the script gives to
    set_epoch().

    Where a global batch can be divided equally, each of the workers of the start gets the samples that its own sampler
    would give it: every `workers`-th one.

    Args:
        sampler: The sampler; no other is made of it.
        workers: The number of workers at the start.
        multiple_of: The samples beyond the last multiple of this number are left out.
    """

    def __init__(self, sampler: DistributedSampler[Any], workers: int, multiple_of: int = 1) -> None:
        self._sampler, self._workers, self._multiple_of = sampler, workers, multiple_of
        self.layout: BatchLayout | None = None  # the current one
        self._known = (0, int(sampler.epoch))  # an epoch, and its number
        self._permutations: dict[int, NDArray[np.int64]] = {}

    @property
    def identity(self) -> str:
        drops = ", drop_last" if self._sampler.drop_last else ""
        return f"DistributedSampler, {self._workers} workers, shuffle={self._sampler.shuffle}{drops}"

    def length(self, samples: int) -> int:
        if len(self._sampler.dataset) != samples:  # type: ignore[arg-type]
            raise ConfigError(
                f"the DistributedSampler is for a data set of {len(self._sampler.dataset)} samples, "  # type: ignore[arg-type]
                f"and that of its DataLoader has {samples}"
            )
        of_ranks = samples - samples % self._workers if self._sampler.drop_last else samples
        return of_ranks - of_ranks % self._multiple_of

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        self.layout = layout

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            return self._permutation(self.number_of(epoch))[self._positions(positions)]

        return look_up

    def number_of(self, epoch: int) -> int:
        """Return the number of an epoch; of a later one than is known, the expected number."""
        known, number = self._known
        return number + (epoch - known) * int(hasattr(self._sampler, NUMBERED))

    def set_number(self, epoch: int, number: int) -> bool:
        """Set the number of the epoch. Returns whether it is the expected one."""
        is_expected = self.number_of(epoch) == number
        self._known = (epoch, number)
        return is_expected

    def rest(self, epoch: int, position: int, rank: int, workers: int) -> list[int]:
        """Return the samples of a rank behind a position that ends a global batch, as a DistributedSampler of `workers`
        ranks would divide them: every `workers`-th one, with repeated samples where they do not divide."""
        permutation = self._permutation(self.number_of(epoch))
        rest = permutation[position:]
        if self._sampler.drop_last:
            rest = rest[: len(rest) - len(rest) % workers]
        elif len(rest):
            rest = np.concatenate([rest, np.resize(permutation, -len(rest) % workers)])
        return [int(each) for each in rest[rank::workers]]

    def _positions(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return positions in torch's permutation, in which the samples of each rank lie `workers` apart."""
        layout = self.layout
        assert layout is not None
        size, workers = layout.global_batch_size, self._workers
        starts = positions // size * size
        samples = np.minimum(starts + size, layout.size) - starts
        of_each = np.maximum(samples // workers, 1)
        rank, place = np.divmod(positions - starts, of_each)
        return np.where(samples % workers == 0, starts + place * workers + rank, positions)

    def _permutation(self, number: int) -> NDArray[np.int64]:
        samples = len(self._sampler.dataset)  # type: ignore[arg-type]
        key = number if self._sampler.shuffle else 0
        if key not in self._permutations:
            while len(self._permutations) > 1:  # this epoch and the next one
                self._permutations.pop(next(iter(self._permutations)))
            if self._sampler.shuffle:  # as DistributedSampler.__iter__ of torch 2.13, torch/utils/data/distributed.py
                generator = torch.Generator()
                generator.manual_seed(self._sampler.seed + number)
                self._permutations[key] = torch.randperm(samples, generator=generator).numpy()
            else:
                self._permutations[key] = np.arange(samples)
        return self._permutations[key]


class ScriptHooks(LoaderHooks, Protocol):
    """The calls of a ScriptLoader, besides those of every loader."""

    def begin_counting(self) -> None:
        """Note from now on whether the script calls step()."""
        ...

    def has_stepped(self) -> bool:
        """Return whether the script has called step() since begin_counting()."""
        ...

    def end_counting(self) -> None:
        """Note it no longer."""
        ...

    def drop_bodies(self) -> None:
        """Restore what the loop bodies of the current global batch have changed."""
        ...


class NoScriptHooks(NoLoaderHooks):
    """The hooks of a ScriptLoader without a run loop."""

    def begin_counting(self) -> None:
        pass

    def has_stepped(self) -> bool:
        return False

    def end_counting(self) -> None:
        pass

    def drop_bodies(self) -> None:
        pass


class ScriptLoader(DataLoader):
    """The loader of a training whose epochs are the script's iterations over its own DataLoader.

    Args:
        theirs: The script's DataLoader.
        workers: The number of workers at the start.

    Attributes:
        is_left: The code of the script after the batches of this epoch has run.
        static_because: Why all workers are to leave the step loop at the next boundary; empty: they are not. Newcomers
            receive it with the position.
        batch_of_all: Samples of one batch of the script on each of the workers of the start.
        batches_of_step: Batches that the script takes on each worker for one step; 0: not known yet. The first step of
            the job shows it: where the script takes another batch without a step, the gradients of the first bodies
            are dropped, and these batches come again when it has called step().

    Raises:
        ConfigError: It cannot be divided anew when workers change.
    """

    hooks: ScriptHooks

    def __init__(self, theirs: TorchDataLoader[Any], workers: int) -> None:
        refuse_unsuitable(theirs)
        sampler: Any = theirs.sampler
        self._sampler = sampler
        assert theirs.batch_size is not None
        self._batch_size, self.batch_of_all = theirs.batch_size, theirs.batch_size * workers
        self._their_order = SamplerOrder(sampler, workers, self.batch_of_all if theirs.drop_last else 1)
        size = self._their_order.length(len(theirs.dataset))  # type: ignore[arg-type]
        if not size:
            raise ConfigError(f"its data set of {len(theirs.dataset)} samples does not fill one batch of all workers")  # type: ignore[arg-type]
        super().__init__(
            theirs.dataset,  # type: ignore[arg-type]
            min(self.batch_of_all, size),
            seed=int(sampler.seed) % 2**64,
            order=self._their_order,
            num_workers=theirs.num_workers,
            timeout=theirs.timeout,
            prefetch_factor=theirs.prefetch_factor,
            multiprocessing_context=theirs.multiprocessing_context,
            persistent_workers=theirs.persistent_workers,
            **(replaceable := _replaceable_of(theirs)),
        )
        self._theirs, self._replaceable = theirs, replaceable
        self.hooks = NoScriptHooks()
        self.is_left = False
        self.static_because = ""
        self.batches_of_step = 0
        self._counted_by = 0  # workers with which batches_of_step was counted, until the second step has confirmed it
        self._bodies = 0  # loop bodies since the first batch, while the batches of a step are counted
        self._before_rehearsal: dict[str, Any] | None = None

    # Epochs ----------------------------------------------------------------------------------------------

    def is_numbered(self) -> bool:
        """Return whether the script numbers its epochs with sampler.set_epoch()."""
        return hasattr(self._sampler, NUMBERED)

    def number(self) -> int:
        """Return the number that the script has given to its sampler last."""
        return int(self._sampler.epoch)

    def has_number(self) -> bool:
        """Return whether the current epoch is the one of that number."""
        return self._their_order.number_of(self.epoch) == self.number()

    def begin_epoch(self) -> None:
        """Begin the current epoch, or go on in it, with the number that the script has given to its sampler."""
        replaceable = _replaceable_of(self._theirs)
        if replaceable != self._replaceable:
            self.close()
            self._replaceable = replaceable
            self._open(**{**self._options, **replaceable})
        if not self._their_order.set_number(self.epoch, self.number()):
            self._restart()

    def end_epoch(self) -> None:
        """End the iteration over the batches, also where `break` has left some."""
        self._is_ended = self.is_left = True
        self._has_to_leave = False
        self.batch, self.indices, self._is_pending = None, [], False
        step.close()

    def advance(self) -> None:
        """Move on to the next epoch."""
        self.is_left = False
        self._advance()

    # Batches of a step -------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._counted_by and self.batches_of_step > 1:
            self._look_at_second_step()
        if self.batches_of_step or self.batch is None:
            return super().__next__()
        step.end_body()
        if not self._bodies and not (step.is_noticed() and step.status() in (StepStatus.OPEN, StepStatus.REDUCED)):
            return super().__next__()
        if not self._bodies:
            step.abort()
            self.hooks.begin_counting()
        self._bodies += 1
        if not self.hooks.has_stepped():
            return self._count_on()
        bodies, self._bodies = self._bodies, 0
        self.hooks.end_counting()
        self.set_batches_of_step(bodies)
        self._counted_by = self._world
        return super().__next__()

    def _look_at_second_step(self) -> None:
        """Correct the number of batches of a step where the script has called step() earlier for the second one: it had
        left out the first batches of the job, and steps for each batch. These bodies are dropped, and run again."""
        if self._world != self._counted_by:
            self._counted_by = 0  # further bodies belong to a step now
        elif step.has_early_step() and step.expects_micro_batch():
            self._counted_by = 0
            self.hooks.drop_bodies()
            self.set_batches_of_step(1)
        elif not step.is_undecided() and self.cursor > self._layout.global_batch_size:
            self._counted_by = 0

    def _count_on(self) -> Any:
        if self._bodies >= len(self):
            self._bodies = 0
            self.hooks.end_counting()
            raise NoStepInEpoch("the script has taken all batches of an epoch for training without optimizer.step()")
        return self._hand_out(is_rehearsal=True)

    @property
    def left_out_samples(self) -> int:
        """Number of samples of the data set that `drop_last` leaves out in each epoch, other ones each time."""
        return len(self._sampler.dataset) - self._layout.size

    def set_batches_of_step(self, batches: int) -> None:
        """Set the number of batches of the script for one step. The current position must be that of a step."""
        self.batches_of_step = batches
        self._layout = dataclasses.replace(
            self._layout,
            global_batch_size=min(self.batch_of_all * batches, self._layout.size),
            max_local_batch=self._batch_size if batches > 1 else None,
        )
        self._their_order.layout = self._layout
        self._padding.is_allowed = batches > 1
        self.__dict__.pop("_identity", None)
        self._restart_aborted()

    def _restart_aborted(self) -> None:
        """Fetch again from the current position; the run loop still has to see the aborted step."""
        self._index_stream.restart(self._layout, self.epoch, self.cursor, self._rank, self._world)

    def commit(self, global_batch: GlobalBatch) -> None:
        super().commit(global_batch)
        self.batches_of_step = self.batches_of_step or 1

    def rest(self, position: int, rank: int, workers: int) -> list[int]:
        """Return the samples of a rank in the rest of the current epoch, from the end of a global batch on, as torch
        would divide them."""
        return self._their_order.rest(self.epoch, position, rank, workers)

    # Batches without effect --------------------------------------------------------------------------------

    def rehearse(self) -> Any:
        """Return a batch whose step is aborted. Call end_rehearsal() after the loop body."""
        self.end_rehearsal()
        self._before_rehearsal = self.state_dict()
        here = world.current().placement
        self.start_rehearsal(here.rank, here.size, is_at_tail=False)
        return self._hand_out(is_rehearsal=True)

    def end_rehearsal(self) -> None:
        """Return to the position before rehearse(). Idempotent."""
        before, self._before_rehearsal = self._before_rehearsal, None
        if before is not None:
            step.close()
            self.end_rehearsals()
            self.load_state_dict(before)

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        number = self._their_order.number_of(self.epoch)
        left = {"left": 1} if self.is_left else {}
        static = {"static": self.static_because} if self.static_because else {}
        return {**super().state_dict(), "number": number, "batches": self.batches_of_step, **left, **static}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._their_order.set_number(state.get("epoch", 0), state.get("number", 0))
        self.is_left = bool(state.get("left"))
        self.static_because = state.get("static", self.static_because)  # what was found since then is not forgotten
        batches = state.get("batches", 0)
        if not batches:  # it was saved before the number was known, which is not forgotten
            ours = ("global_batch_size", "max_local_batch")
            state = {name: value for name, value in state.items() if name not in ours}
            state["global_batch_size"] = self._layout.global_batch_size
        elif batches != self.batches_of_step:
            self.set_batches_of_step(batches)
        super().load_state_dict(state)


def _replaceable_of(theirs: TorchDataLoader[Any]) -> dict[str, Any]:
    """Return the attributes that determine what batches hold, and that a script may replace between two epochs."""
    collate = None if theirs.collate_fn is default_collate else theirs.collate_fn
    return {"collate_fn": collate, "worker_init_fn": theirs.worker_init_fn, "pin_memory": theirs.pin_memory}


def refuse_unsuitable(theirs: TorchDataLoader[Any]) -> None:
    """Raise ConfigError, with the reason, for a DataLoader whose batches cannot be divided anew when workers change."""
    sampler = theirs.sampler
    if isinstance(theirs.dataset, IterableDataset):
        raise ConfigError(
            f"its DataLoader has {type(theirs.dataset).__name__}, an IterableDataset, whose samples cannot be read by "
            f"index"
        )
    if not isinstance(sampler, DistributedSampler):
        raise ConfigError(
            f"its DataLoader has a {type(sampler).__name__}, and no DistributedSampler, which would tell how the "
            f"samples are divided"
        )
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise ConfigError(f"its sampler {type(sampler).__name__} has an order of its own (__iter__)")
    if type(theirs.batch_sampler) is not BatchSampler or theirs.batch_size is None:
        raise ConfigError(f"its DataLoader has batches of its own ({type(theirs.batch_sampler).__name__})")
