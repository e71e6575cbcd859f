"""A script's DataLoader as a loader of Farandole: samples, order and batches are those that its own samplers list, for
any number of workers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader, default_collate

from farandole.errors import StepError
from farandole.integrations.torchrun.in_place.script_samplers import NUMBERED, numbered_sampler, samplers_of
from farandole.training.collectives import world
from farandole.training.data.elastic_loader import LoaderHooks
from farandole.training.data.listed_batches import ListedBatches
from farandole.training.data.loader import DataLoader
from farandole.training.data.partition import BatchLayout
from farandole.training.data.sample_order import Lookup
from farandole.training.state import step
from farandole.training.state.batch import GlobalBatch
from farandole.training.state.step import StepStatus


class NoStepInEpoch(StepError):
    """The script has taken all batches of an epoch for training, and has made no step."""


class ListedOrder:
    """The order of the current epoch, as the samplers of the script have listed it.

    listed  its batches
    """

    identity = "listed"

    def __init__(self, listed: ListedBatches) -> None:
        self.listed = listed

    def length(self, _samples: int) -> int:
        return self.listed.size

    def bind(self, _layout: BatchLayout, _seed: int) -> Lookup:
        return lambda _epoch, positions: self.listed.look_up(positions)


class ScriptHooks(LoaderHooks):
    """The calls of a ScriptLoader, besides those of every loader."""

    def begin_counting(self) -> None:
        """Note from now on whether the script calls step()."""

    def has_stepped(self) -> bool:
        """Return whether the script has called step() since begin_counting()."""
        return False

    def end_counting(self) -> None:
        """Note it no longer."""

    def drop_bodies(self) -> None:
        """Restore what the loop bodies of the current global batch have changed."""


class _Seeds:
    """The seeds of loader processes, each time that they are started.

    next  the seed of the next ones
    """

    next = 0

    def __call__(self) -> int:
        seed, self.next = self.next, (self.next + 1) % 2**63
        return seed


class ScriptLoader(DataLoader):
    """The loader of a training whose epochs are the script's iterations over its own DataLoader.

    Args:
        theirs: The script's DataLoader.
        listed: The batches of its first epoch.

    Attributes:
        theirs: The script's DataLoader. A script may construct another one for each epoch.
        is_left: The code of the script after the batches of this epoch has run.
        static_because: Why all workers are to leave the step loop at the next boundary; empty: they are not. Newcomers
            receive it with the position.
        leaves_before_batch: They are to do so at once, before the batch that is handed out next.
        batches_of_step: Batches that the script takes on each worker for one step; 0: not known yet. The first step of
            the job shows it: where the script takes another batch without a step, the gradients of the first bodies
            are dropped, and these batches come again when it has called step().
        known: The epoch whose batches are known; -1: none.
        next_batches: The batches that the script's samplers have listed last, for the epoch that it has begun, or is
            about to begin; None: they cannot be listed.
        why_not_listed: The reason in this case.
        is_of_trial: The next batch is that of a trial (workers_trial.py): on all workers the same samples.
        change: Makes another batch of the next one, which has these samples, in a trial (division_trial.py).

    Raises:
        ConfigError: Its arguments cannot be supported.
    """

    hooks: ScriptHooks

    def __init__(self, theirs: TorchDataLoader[Any], listed: ListedBatches) -> None:
        self.theirs = theirs
        self._seeds = self._seed_of_processes = _Seeds()
        self._their_order = ListedOrder(listed)
        seed = next((each.seed for each in samplers_of(theirs) if type(getattr(each, "seed", None)) is int), 0)
        super().__init__(
            theirs.dataset,  # type: ignore[arg-type]
            listed.largest_global_batch,
            seed=seed % 2**64,
            order=self._their_order,
            **_arguments_of(theirs),
        )
        self.hooks = ScriptHooks()
        self.is_left = False
        self.static_because = ""
        self.leaves_before_batch = False
        self.batches_of_step = 0
        self._counted_by = 0  # workers with which batches_of_step was counted, until the second step has confirmed it
        self.known = -1
        self._bodies = 0  # loop bodies since the first batch, while the batches of a step are counted
        self._before_rehearsal: tuple[dict[str, Any], ListedBatches] | None = None
        self.next_batches: ListedBatches | None = listed
        self.why_not_listed = ""
        self.is_of_trial = False
        self.change: Callable[[Any, Sequence[int]], Any] | None = None
        self._first_number = _number_of(theirs)
        self._known_number = (0, self._first_number)  # an epoch, and its number
        self.know(listed)

    # Epochs ----------------------------------------------------------------------------------------------

    def is_numbered(self) -> bool:
        """Return whether the script numbers its epochs with sampler.set_epoch()."""
        sampler = numbered_sampler(self.theirs)
        return sampler is not None and (hasattr(sampler, NUMBERED) or sampler.epoch != self._first_number)

    def number(self) -> int:
        """Return the number that the script has given to its sampler last."""
        return _number_of(self.theirs)

    def number_of(self, epoch: int) -> int:
        """Return the number of an epoch; of a later one than is known, the expected number."""
        known, number = self._known_number
        return number + (epoch - known) * int(self.is_numbered())

    def has_number(self) -> bool:
        """Return whether the current epoch is the one of that number."""
        return self.number_of(self.epoch) == self.number()

    def expect(self, theirs: TorchDataLoader[Any], listed: ListedBatches | None, why_not: str = "") -> None:
        """Take note of the batches of the epoch that the script is about to begin, or of the reason why there are none,
        and of its DataLoader."""
        self.next_batches, self.why_not_listed = listed, why_not
        arguments = {"pin_memory_device": "", **_arguments_of(theirs)}
        self.theirs = theirs
        dataset: Any = theirs.dataset
        if dataset is not self.dataset or arguments != self._options:
            self.close()
            self.dataset = dataset
            self._open(**arguments)

    def know(self, listed: ListedBatches) -> None:
        """Take these for the batches of the current epoch."""
        self.known = self.epoch
        self._divide(listed)
        self._restart()

    def _divide(self, listed: ListedBatches) -> None:
        """Divide these batches from now on."""
        self._their_order.listed = listed = listed.added_up(self.batches_of_step or 1)
        self._layout = dataclasses.replace(
            self._layout,
            size=listed.size,
            global_batch_size=listed.largest_global_batch,
            # BatchNorm refuses a batch of one sample, which the script has none of.
            min_local_batch=min(2, listed.smallest),
            listed=listed,
        )

    @property
    def listed(self) -> ListedBatches:
        """The batches of the current epoch."""
        return self._their_order.listed

    def begin_epoch(self) -> None:
        """Begin the current epoch, with the number that the script has given to its sampler; or go on in it, with the
        batches that the others have."""
        self._known_number = (self.epoch, self.number())
        if self.known != self.epoch and self.next_batches is not None:
            self.know(self.next_batches)

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

    # Random numbers ----------------------------------------------------------------------------------------

    def draw_seed(self) -> None:
        """Draw the seed of an iteration's loader processes as torch does at its beginning, so that what the script
        draws afterwards is the same (torch 2.13, torch/utils/data/dataloader.py, _BaseDataLoaderIter.__init__)."""
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.theirs.generator)
        self._seeds.next = int(drawn)

    @contextlib.contextmanager
    def draws_kept(self) -> Iterator[None]:
        """Return a context at whose end the generator that draw_seed() draws from is as before."""
        generator = self.theirs.generator or torch.default_generator
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)

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
        elif step.facts().has_early_step and step.expects_micro_batch():
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

    def set_batches_of_step(self, batches: int) -> None:
        """Set the number of batches of the script for one step. The current position must be that of a step."""
        self.batches_of_step = batches
        self._divide(self.listed)
        self._padding.is_allowed = batches > 1
        self._restart_aborted()

    def take_back(self) -> None:
        """Take back the batch that was handed out last: it was not seen by the script."""
        step.close()
        self._restart()

    def _restart_aborted(self) -> None:
        """Fetch again from the current position; the run loop still has to see the aborted step."""
        self._index_stream.restart(self._layout, self.epoch, self.cursor, self._rank, self._world)

    def commit(self, global_batch: GlobalBatch) -> None:
        super().commit(global_batch)
        self.batches_of_step = self.batches_of_step or 1

    def rest(self, position: int, rank: int, workers: int) -> list[list[int]]:
        """Return the batches of a rank in the rest of the current epoch, from the end of a global batch on, for workers
        that share it without a step loop."""
        return self.listed.rest(position, rank, workers)

    # Batches without effect --------------------------------------------------------------------------------

    def rehearse(self) -> Any:
        """Return a batch whose step is aborted. Call end_rehearsal() after the loop body."""
        self.end_rehearsal()
        self._before_rehearsal = self.state_dict(), self.listed
        if self.next_batches is not None:
            self._divide(self.next_batches)
        here = world.current().placement
        self.start_rehearsal(here.rank, here.size, is_at_tail=False)
        return self._hand_out(is_rehearsal=True)

    def _rehearse_a_change(self) -> None:
        if self.is_of_trial:
            self._index_stream.restart(self._layout, self.epoch, self.cursor, 0, self._world)
        elif self.change is None:
            super()._rehearse_a_change()
        else:  # one loop body, also where gradients of several are added up
            layout = dataclasses.replace(self._layout, listed=self.listed.added_up(1))
            self._index_stream.restart(layout, self.epoch, self.cursor, self._rank, self._world)

    def _hand_out(self, is_rehearsal: bool) -> Any:
        data = super()._hand_out(is_rehearsal)
        if self.change is None or not is_rehearsal or self.batch is None:
            return data
        return self.change(data, self.indices)

    @property
    def is_collated_by_script(self) -> bool:
        return self.theirs.collate_fn is not default_collate

    def collated(self, indices: Sequence[int]) -> Any:
        """Return a batch of these samples as the script's DataLoader makes one; read by this process."""
        collate: Callable[[list[Any]], Any] = self.theirs.collate_fn
        return collate([self.dataset[index] for index in indices])

    def end_rehearsal(self) -> None:
        """Return to the position before rehearse(). Idempotent."""
        before, self._before_rehearsal = self._before_rehearsal, None
        if before is not None:
            step.close()
            self.end_rehearsals()
            self._divide(before[1])
            self.load_state_dict(before[0])

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position. The batches of the epoch are told to newcomers apart (script_exchanges.py)."""
        state = {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "order": ListedOrder.identity,
            "number": self.number_of(self.epoch),
            "batches": self.batches_of_step,
            **self.record.state_dict(),
        }
        flags = {"ended": self._is_ended, "left": self.is_left, "static": self.static_because}
        return {**state, **{name: value for name, value in flags.items() if value}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known_number = (state["epoch"], state["number"])
        self.is_left = bool(state.get("left"))
        self.static_because = state.get("static", self.static_because)  # what was found since then is not forgotten
        self.epoch, self._cursor, self._is_ended = state["epoch"], state["cursor"], bool(state.get("ended"))
        self.record.load_state_dict(state)
        batches = state["batches"]
        if batches and batches != self.batches_of_step:  # 0: it was saved before the number was known
            self.set_batches_of_step(batches)
        self._restart()


def _number_of(theirs: TorchDataLoader[Any]) -> int:
    sampler = numbered_sampler(theirs)
    return 0 if sampler is None else int(sampler.epoch)


def _arguments_of(theirs: TorchDataLoader[Any]) -> dict[str, Any]:
    """Return the arguments with which the script's DataLoader fetches its batches."""
    return {
        "num_workers": theirs.num_workers,
        "collate_fn": None if theirs.collate_fn is default_collate else theirs.collate_fn,
        "pin_memory": theirs.pin_memory,
        "timeout": theirs.timeout,
        "prefetch_factor": theirs.prefetch_factor,
        "worker_init_fn": theirs.worker_init_fn,
        "multiprocessing_context": theirs.multiprocessing_context,
        "persistent_workers": theirs.persistent_workers,
    }
