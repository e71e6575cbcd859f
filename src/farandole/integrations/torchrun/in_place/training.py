"""The training of a script of torchrun, elastic in place: the step loop, driven by the iterator of its DataLoader.

    first batch          the objects are checked, and the step loop is entered; or the job stays static
    each batch           a boundary, as with a loader of Farandole
    after the batches    the code of the script; the remaining workers complete its collectives
    next iteration       the end of the epoch
    end of the script    the end of the elastic function, which is the rest of the script

Where the script turns out to do something that cannot follow the membership, all workers leave the step loop at the
next boundary, and it runs on as a static job (`Training._become_static`). A newcomer passes over the epochs that are
done; docs/decisions/elastic-in-place.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from farandole.errors import ConfigError, FarandoleError, StepError
from farandole.integrations.torchrun.in_place.collective_notes import CollectiveNotes
from farandole.integrations.torchrun.in_place.loop_shape import loop_variables, reason_in_batches
from farandole.integrations.torchrun.in_place.passing_over import PassingOver
from farandole.integrations.torchrun.in_place.script_evaluations import Evaluations
from farandole.integrations.torchrun.in_place.script_exchanges import reason_of
from farandole.integrations.torchrun.in_place.script_loader import NoStepInEpoch, ScriptLoader
from farandole.integrations.torchrun.in_place.script_objects import (
    Objects,
    Registry,
    line_of_script,
    runs_in_lightning,
)
from farandole.integrations.torchrun.in_place.script_samplers import (
    advance,
    may_be_divided,
    names_of,
    refuse_undivided,
    shuffles,
)
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.integrations.torchrun.in_place.script_step_loop import InPlaceLoop
from farandole.integrations.torchrun.in_place.scripted_state import script_of, state_of
from farandole.integrations.torchrun.in_place.torchs_loaders import torchs_iterator, torchs_length
from farandole.integrations.torchrun.in_place.worker_shares import Shares
from farandole.integrations.torchrun.process_group.works import OF_SCRIPTS
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport
from farandole.training.data.listed_batches import ListedBatches
from farandole.training.state import step
from farandole.training.state.step import StepStatus
from farandole.training.state.step_state import StepState
from farandole.training.worker import context

logger = logging.getLogger("farandole")


class Training:
    """The training of this process.

    Args:
        workers: The number of workers at the start of the job.
        registry: The objects of the script.
    """

    def __init__(self, workers: int, registry: Registry) -> None:
        self.workers, self._registry = workers, registry
        self._static_because = ""  # why the job stays static
        self._state: StepState | None = None
        self._script: ScriptState | None = None
        self.loop: InPlaceLoop | None = None
        self._objects: Objects | None = None
        self._loader: ScriptLoader | None = None
        self._other: TorchDataLoader[Any] | None = None  # without a DistributedSampler, iterated last
        self.is_first_rank = False  # the script was started as rank 0 of the job
        self._evaluations = Evaluations()
        self.shares = Shares(workers)
        self._constructed = 0  # DataLoaders, when the last iteration for training began
        self._trains_in_eval = False  # the models are in eval() mode while they are trained
        self._line_in_eval = ""  # of a DataLoader that was taken for one of a validation
        self._lengths: list[int] = []  # batches in the script's iterations over its training loader
        self._begun = 0  # iterations of the script over its training loader
        self._began_at = 0  # the cursor at which the last one began
        self.passing = PassingOver(workers)
        self.notes = CollectiveNotes(self)
        self._is_over = False
        self._is_in_batches = False  # the script has a batch, and has not left the loop over them

    # Calls of torch_patches.py -----------------------------------------------------------------------------

    @property
    def passes_over(self) -> bool:
        """True while this worker runs code whose effects do not count."""
        return self.passing.is_under_way

    def begin_world(self) -> None:
        """Handle that the world is entered, by init_process_group()."""
        self.passing.begin_world()
        here = world.current().placement
        self.shares.at_start = here.rank, here.size
        self._evaluations.begin()
        self.is_first_rank = not self.passing.has_to_join and world.current().placement.rank == 0
        OF_SCRIPTS.transport = self._transport

    def batches(self, theirs: TorchDataLoader[Any]) -> Iterator[Any] | None:
        """Return an iterator over the batches of a DataLoader of the script; None: torch's own iterator is right."""
        if self._is_over or not world.is_entered():
            return None
        if not may_be_divided(theirs):
            if not self._is_evaluating(theirs):
                self._other = theirs
            elif self.loop is not None and not self.passes_over:
                line = self._registry.loaders.line_of(theirs)
                self._evaluations.look_at_part(theirs, *self.shares.at_start, line)
            return None
        if self._static_because:
            return torchs_iterator(self.shares.in_current_world(theirs))
        if self._loader is None and runs_in_lightning():
            self._stay_static(
                "Lightning's Trainer counts its batches itself: use the Trainer of farandole.frameworks.lightning"
            )
            return None
        is_validation = self._loader is not None and not self._is_of_training(theirs) and not shuffles(theirs)
        if self._is_evaluating(theirs) or is_validation:
            return self._evaluation(theirs)
        return self._training(theirs)

    def note_length(self, theirs: TorchDataLoader[Any], length: int) -> None:
        """Note that len() of a DataLoader of the script was asked for."""
        if world.is_entered() and not self._is_over:
            self._evaluations.note_length(theirs, length)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle that an optimizer is about to apply its gradients.

        Raises:
            StepError: Its samples come from no batch of the training loader, and a worker is lost at this moment.
        """
        if self._static_because or self._is_over or self.passes_over or not world.is_entered():
            return
        if self.loop is None or self._loader is None:
            self._stay_static(self._reason_without_loader())
            return
        if step.batch() is None:
            self._become_static_in_step(optimizer, self.loop)

    def end(self) -> None:
        """Handle the end of the script, or of its process group. Idempotent. A forked child is not the script."""
        if self._is_over or world.is_forked_child():
            return
        self._is_over = True
        OF_SCRIPTS.transport = None
        if self.loop is None or self._loader is None:
            return
        job = context.job()
        if job is not None and job.link.is_over:  # this worker has left the job, or the job is over
            self.loop.uninstall()
            return
        if self.passing.has_to_join:
            logger.warning("this worker has not joined: its script ended before it reached the others")
            self.loop.uninstall()
            return
        if self.passing.is_member:
            if not self._loader.is_left:
                logger.error(
                    "this newcomer's script has ended before epoch %d, in which the others are", self._loader.epoch
                )
                self.loop.uninstall()
                return
            self.passing.stop(self._state_entered, self._loader)
        self.loop.leave()

    def abandon(self) -> None:
        """Handle that the script has failed."""
        self._is_over = True
        OF_SCRIPTS.transport = None

    # Opening -----------------------------------------------------------------------------------------------

    def _open(self, theirs: TorchDataLoader[Any], listed: ListedBatches | None, why_not: str) -> bool:
        """Enter the training with this DataLoader. False: the job stays static, on all workers."""
        try:
            loader = None if listed is None else ScriptLoader(theirs, listed)
            objects = self._registry.objects()
        except FarandoleError as error:
            loader, why_not = None, why_not or str(error)
        if not self.passing.has_to_join:
            why_not = reason_of(b"" if listed is None else listed.digest, why_not, theirs)
        if why_not or loader is None:
            self._stay_static(why_not)
            return False
        try:
            state = state_of(objects, loader)
            script = script_of(objects, state)
            loop = InPlaceLoop(context.job(), state, loader, script, self.is_first_rank)
            loop.install()
        except FarandoleError as error:
            self._stay_static(str(error))
            return False
        self._loader, self._objects, self.loop, self._state = loader, objects, loop, state
        self.shares.has_begun = True
        self._script = script
        self._trains_in_eval = not any(each.training for each in self._registry.parallel)
        if self.passing.has_to_join:
            loader.known = -1
        else:
            loop.enter()
        return True

    def _stay_static(self, reason: str) -> None:
        self._static_because = reason
        OF_SCRIPTS.transport = None
        if world.current().placement.rank == 0:
            logger.warning(
                "%s: this job is not elastic in place, since %s; when a worker is lost, the job ends, or starts again "
                "as a whole with --max-restarts",
                line_of_script(),
                reason,
            )

    def _become_static(self, reason: str) -> None:
        """Leave the step loop with all workers, between two iterations over the training loader: the script runs on as
        a static job."""
        loop, loader = self.loop, self._loader
        assert loop is not None
        assert loader is not None
        if self.passing.has_to_join:
            self._join(loop, loader)
        if self.passing.is_member:
            if not loader.is_left:
                raise StepError(
                    f"{line_of_script()}: this newcomer's script is behind the batches of epoch {loader.epoch}, in "
                    f"which the other workers are"
                )
            self.passing.stop(self._state_entered, loader)
        loop.become_static(f"{line_of_script()}: {reason}")
        self._be_static(reason)

    def _become_static_in_step(self, optimizer: torch.optim.Optimizer, loop: InPlaceLoop) -> None:
        """Leave the step loop with all workers before a step whose gradients are reduced, as those of any
        DistributedDataParallel, and belong to no batch of the training loader."""
        what = f"{type(optimizer).__name__}.step() with samples that come from no batch of the first training loader"
        number = world.current().id.number
        loop.become_static(f"{line_of_script()}: {what}")
        if world.current().id.number != number:
            raise StepError(
                f"{line_of_script()}: {what}; such a step cannot be repeated, and a worker was lost in it. A job that "
                f"is elastic in place has one training loader, and steps inside the loop over its batches"
            )
        self._be_static(what)

    def _be_static(self, reason: str) -> None:
        self._static_because, self.loop = reason, None
        OF_SCRIPTS.transport = None
        size = world.current().placement.size
        if size != self.workers:
            batches = f"a static job with {size} workers, not {self.workers}, and so with other global batches"
            world.remark("static job", f"{batches}, since {reason}")
        if self._loader is not None:
            self.shares.in_current_world(self._loader.theirs)

    def _reason_without_loader(self) -> str:
        if self._line_in_eval:
            return (
                f"the script trains while its models are in eval() mode, in which the iteration over the DataLoader of "
                f"{self._line_in_eval} was taken for a validation: call train() before it"
            )
        if self._other is not None:
            try:
                refuse_undivided(self._other)
            except ConfigError as error:
                return str(error)
        return "optimizer.step() trains samples of no DataLoader with a DistributedSampler"

    def _is_evaluating(self, theirs: TorchDataLoader[Any]) -> bool:
        """Return whether this iteration is one that trains nothing, as far as that is known before its first batch."""
        if not torch.is_grad_enabled():
            return True
        parallel = list(self._registry.parallel)
        if not parallel or any(each.training for each in parallel):
            return False
        # With gradients in eval() mode: a validation, or a training of some layers on top of others (a linear probe).
        if self._loader is None:
            return not shuffles(theirs)
        return not (self._trains_in_eval and self._is_of_training(theirs))

    def _is_of_training(self, theirs: TorchDataLoader[Any]) -> bool:
        """Return whether this is the training loader: the one of the last epoch, or one that the script has constructed
        since then for the same samples, in the same way."""
        assert self._loader is not None
        last, loaders = self._loader.theirs, self._registry.loaders
        if theirs is last:
            return True
        if not loaders.is_younger(theirs, self._constructed):
            return False
        is_same_data = theirs.dataset is last.dataset or (
            type(theirs.dataset) is type(last.dataset)
            and loaders.line_of(theirs) == loaders.line_of(last)
            and len(theirs.dataset) == len(last.dataset)  # type: ignore[arg-type]
        )
        return is_same_data and names_of(theirs) == names_of(last)

    # Iterations --------------------------------------------------------------------------------------------

    def _training(self, theirs: TorchDataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of an iteration of the script for training. Whether it is one, and the next one over this
        loader, shows when the script asks for the first batch."""
        if self.loop is None and not self._static_because and self._is_in_other_thread():
            self._stay_static("its batches are taken by another thread than the main one, ahead of the steps")
        if not self._static_because and self._loader is not None and not self._is_of_training(theirs):
            yield from self._other_training(theirs)
            return
        if not self._static_because and self._objects is not None and (newer := self._registry.newer(self._objects)):
            self._become_static(f"the script has constructed {newer} since its training began")
            yield from torchs_iterator(self.shares.in_current_world(theirs))
            return
        listed, why_not = (None, "") if self._static_because else self.shares.list(theirs)
        if self._static_because or (self.loop is None and not self._open(theirs, listed, why_not)):
            yield from torchs_iterator(self.shares.in_current_world(theirs))
            return
        loader = self._loader
        assert loader is not None
        loader.expect(theirs, listed, why_not)
        if listed is not None:
            with self.shares.as_rank(self.shares.at_start[0]):
                advance(theirs)
        has_looked = self._has_only_looked()
        begun = self._begun = self._begun - int(has_looked)
        self._begun += 1
        self._lengths[begun:] = [0 if listed is None else listed.steps_from(0)]
        self._constructed = len(self._registry.loaders)
        yield from self._epoch(begun, has_looked)

    def _other_training(self, theirs: TorchDataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of another loader than the first one that was iterated for training: its position is not
        kept, and a step with its samples could not be repeated."""
        assert self._loader is not None
        reason = (
            f"the script iterates for training over a second DataLoader ({self._registry.loaders.line_of(theirs)}), "
            f"besides the first one ({self._registry.loaders.line_of(self._loader.theirs)})"
        )
        self._leave_for_other(reason)
        for batch in torchs_iterator(self.shares.in_current_world(theirs)):
            yield batch
            self._leave_for_other(reason)

    def _leave_for_other(self, reason: str) -> None:
        """Become static before a batch of another loader; while the step of a batch of the first one is undecided, at
        its next boundary."""
        loop, loader = self.loop, self._loader
        if self._static_because or loop is None or loader is None:
            return
        if not self._is_in_batches:
            self._become_static(reason)
            return
        loader.static_because = f"{line_of_script()}: {reason}"
        if not step.is_undecided() and loop.become_static_in_batches(loader.static_because) is not None:
            self._be_static(reason)

    def _is_in_other_thread(self) -> bool:
        return threading.current_thread() is not threading.main_thread()

    def _epoch(self, begun: int, has_looked: bool) -> Iterator[Any]:
        """Yield the batches of the script's iteration number `begun`, of which the script may have looked at the first
        batch already."""
        loop, loader = self.loop, self._loader
        assert loop is not None
        assert loader is not None
        script = self._script
        assert script is not None
        script.batches = 0
        loader.end_rehearsal()
        if self.passing.has_to_join:
            script.begin_anew(loop_variables())
            script.batches += 1
            yield loader.rehearse()
            loader.end_rehearsal()
            if self.passing.is_done_already(loader, begun, sum(self._lengths)):
                return
            self._join(loop, loader)
        if self.passing.is_member:
            if not self.passing.arrives(loader, begun):
                if not script.batches:
                    script.batches += 1
                    yield loader.rehearse()
                    loader.end_rehearsal()
                return
            self.passing.stop(self._state_entered, loader)
        loop.reach_epoch(begun + self.passing.offset)
        if has_looked and loader.next_batches is not None and loader.next_batches.digest != loader.listed.digest:
            loader.known = -1  # as where the number of the epoch was set after the look
            while not loop.agree_on_batches() and not loader.static_because:
                pass
        if loader.static_because and (loader.known != loader.epoch or loader.is_left):
            self._become_static(loader.static_because)
            yield from torchs_iterator(self.shares.in_current_world(loader.theirs))
            return
        loader.begin_epoch()
        if has_looked:
            loop.record_batches()
        loop.arrive()
        if has_looked or script.iteration != loader.epoch:
            loader.draw_seed()
            script.iteration = loader.epoch
        self._began_at = loader.cursor
        yield from self._batches(loop, loader)
        if loader.is_left and not self._static_because:
            self.passing.begin_behind(self._state_entered)

    def _batches(self, loop: InPlaceLoop, loader: ScriptLoader) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, until a reason is found why the job has to become static, and the
        rest of them then."""
        # A newcomer that finds a reason in the state of the others does not wait for a step: they have left the loop.
        began_at = -1 if loader.static_because else self._began_at
        iterator, taken = iter(loader), 0
        try:
            while True:
                if self._static_because:  # since a step with samples of another loader
                    yield from self.shares.rest(loader, loader.cursor)
                    return
                if taken:
                    loader.static_because = loader.static_because or reason_in_batches(loader.batches_of_step, taken)
                if loader.static_because:
                    position = loop.become_static_in_batches(loader.static_because, began_at)
                    if position is not None:
                        self._be_static(loader.static_because)
                        self._is_in_batches = False
                        yield from self.shares.rest(loader, position)
                        return
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except NoStepInEpoch as error:
                    self._become_static(str(error))
                    return
                finally:
                    self._evaluations.follow(self._registry.loaders, self._is_of_training)
                if loader.leaves_before_batch:
                    began_at = -1
                    loader.take_back()
                    continue
                taken += 1
                self._is_in_batches = True
                if self._script is not None:
                    if step.is_rehearsal() and loader.is_over and self._script.batches:
                        # A body without effect behind the last batch has the last number: a schedule ends there.
                        self._script.set_batches(self._script.batches - 1)
                    self._script.batches += 1
                yield batch
        finally:
            self._is_in_batches = False

    def _has_only_looked(self) -> bool:
        """Return whether the script has taken the first batch of its last iteration and no model has seen it, as in
        `len(next(iter(loader))[0])`: the next iteration is the same one."""
        is_first = self._loader is not None and self._loader.cursor == self._began_at
        is_first &= self._script is not None and self._script.batches == 1  # a newcomer begins in the middle
        is_unused = step.batch() is not None and not step.is_noticed()
        return bool(self._begun) and is_first and is_unused and step.status() in (StepStatus.OPEN, StepStatus.ABORTED)

    def _evaluation(self, theirs: TorchDataLoader[Any]) -> Iterator[Any]:
        """Return torch's iterator, over this worker's share in the current world; its first batch where this worker
        passes over code."""
        if torch.is_grad_enabled():
            self._line_in_eval = self._registry.loaders.line_of(theirs)
        current = self.shares.in_current_world(theirs)
        if self.passes_over:
            return islice(torchs_iterator(current), 1)
        self._evaluations.compare(theirs, torchs_length(current), self._registry.loaders.line_of(theirs))
        return torchs_iterator(current)

    # Newcomers ---------------------------------------------------------------------------------------------

    def _join(self, loop: InPlaceLoop, loader: ScriptLoader) -> None:
        """Ask to be admitted, and get the state of the others; pass over code from now on."""
        state = self._state_entered
        for optimizer in state.optimizers():
            optimizer.zero_grad()
        loop.enter()
        self.passing.has_to_join = False
        logger.warning("joined at %s; carried over: %s", loader, self._objects)
        self.passing.begin(state)

    @property
    def _state_entered(self) -> StepState:
        assert self._state is not None
        return self._state

    def _transport(self, op: str) -> Transport:
        """Return the transport for a collective that the script calls."""
        if world.are_refused():
            world.raise_if_refused(op)
        if self.loop is None or self.passes_over:
            return world.current().transport
        return self.loop.transport_of_call()
