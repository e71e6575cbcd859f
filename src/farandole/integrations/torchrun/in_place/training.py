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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from farandole.errors import ConfigError, FarandoleError, StepError
from farandole.integrations.torchrun.in_place.loop_shape import line_that_counts, loop_variables
from farandole.integrations.torchrun.in_place.script_collectives import echo_world
from farandole.integrations.torchrun.in_place.script_evaluations import Evaluations
from farandole.integrations.torchrun.in_place.script_frames import runs_in_autograd_function
from farandole.integrations.torchrun.in_place.script_loader import NoStepInEpoch, ScriptLoader
from farandole.integrations.torchrun.in_place.script_objects import (
    Objects,
    Registry,
    kept_count,
    kept_rank,
    line_of_script,
    runs_in_lightning,
)
from farandole.integrations.torchrun.in_place.script_samplers import (
    SameForAll,
    advance,
    listed as listed_batches,
    may_be_divided,
    names_of,
    place,
    plain_sampler,
    refuse_undivided,
    shuffles,
)
from farandole.integrations.torchrun.in_place.script_search import hooks_of, roots_of_script
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.integrations.torchrun.in_place.script_step_loop import InPlaceLoop, ScriptedState, reason_of
from farandole.integrations.torchrun.process_group.works import set_transport_of_scripts
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
        self._loop: InPlaceLoop | None = None
        self._objects: Objects | None = None
        self._loader: ScriptLoader | None = None
        self._other: TorchDataLoader[Any] | None = None  # without a DistributedSampler, iterated last
        self.is_first_rank = False  # the script was started as rank 0 of the job
        self._evaluations = Evaluations()
        self._place_at_start = (0, 1)  # rank and size that the script has read at its start
        self._constructed = 0  # DataLoaders, when the last iteration for training began
        self._trains_in_eval = False  # the models are in eval() mode while they are trained
        self._line_in_eval = ""  # of a DataLoader that was taken for one of a validation
        self._kept_count = ""  # a variable of the script that has the number of workers of the start
        self._lengths: list[int] = []  # batches in the script's iterations over its training loader
        self._begun = 0  # iterations of the script over its training loader
        self._began_at = 0  # the cursor at which the last one began
        self._offset = 0  # from these to the epochs of the training
        self._has_to_join = False
        self._was_found = False  # passing over what the others have done, this worker has come to their epoch
        self._real: world.World | None = None  # while this worker, a member, passes over code
        self._is_over = False
        self._is_in_batches = False  # the script has a batch, and has not left the loop over them

    # Calls of torch_patches.py -----------------------------------------------------------------------------

    @property
    def passes_over(self) -> bool:
        """True while this worker runs code whose effects do not count."""
        return self._has_to_join or self._real is not None

    def begin_world(self) -> None:
        """Handle that the world is entered, by init_process_group()."""
        job = context.job()
        self._has_to_join = job is not None and job.is_newcomer()
        if self._has_to_join:
            world.enter(self._passing(world.current()))
        here = world.current().placement
        self._place_at_start = (here.rank, here.size)
        self._evaluations.begin()
        self.is_first_rank = not self._has_to_join and world.current().placement.rank == 0
        set_transport_of_scripts(self._transport)

    def batches(self, theirs: TorchDataLoader[Any]) -> Iterator[Any] | None:
        """Return an iterator over the batches of a DataLoader of the script; None: torch's own iterator is right."""
        if self._is_over or not world.is_entered():
            return None
        if not may_be_divided(theirs):
            if not self._is_evaluating(theirs):
                self._other = theirs
            elif self._loop is not None and not self.passes_over:
                line = self._registry.loaders.line_of(theirs)
                self._evaluations.look_at_part(theirs, *self._place_at_start, line)
            return None
        if self._static_because:
            return torchs_iterator(self._in_current_world(theirs))
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
        if self._loop is None or self._loader is None:
            self._stay_static(self._reason_without_loader())
            return
        if step.batch() is None:
            self._become_static_in_step(optimizer, self._loop)

    def note_gather(self, tensor: torch.Tensor) -> None:
        """Note that the script is about to gather this tensor from all workers: whether it has a row for each sample of
        the batch, and whether gradients flow into the own rows. A Function of the script, or of torch, brings those of
        the other workers itself."""
        loop, batch = self._loop, step.batch()
        if loop is None or batch is None or not batch.samples or not tensor.dim():
            return
        if tensor.dtype is torch.uint8 and tensor.dim() == 1:  # an object, as all_gather_object() sends it
            return
        rows = tensor.shape[0]
        if rows and rows % batch.samples == 0 and (batch.samples > 1 or tensor.dim() > 1):
            if not loop.number.gathers:
                loop.number.note_gather(line_of_script())
            if not runs_in_autograd_function():
                self._note_gradients(tensor, loop)

    def note_reduction(self, tensor: torch.Tensor) -> None:
        """Note that the script is about to reduce this tensor over all workers: whether gradients flow through the
        result, as through a loss, is known when they do. A copy of a loss for the log has a graph, too."""
        loop = self._loop
        size = world.current().placement.size if world.is_entered() else self.workers
        if loop is not None and size != self.workers and not self.passes_over and not self._kept_count:
            self._kept_count = kept_count(self.workers)
            if self._kept_count:
                text = (
                    f"{line_of_script()} reduces over {size} workers, and the script may compute with {self.workers}, "
                    f"the number of its start, in {self._kept_count}: get_world_size() is the one of now"
                )
                world.remark("number of workers", text)
        if loop is not None and step.batch() is not None:
            self._note_gradients(tensor, loop)

    def note_broadcast(self, source: int) -> None:
        """Note that the script is about to send something from this rank: where the worker that was started as rank 0
        is lost, the one that is rank 0 now may not know that it is."""
        if self._loop is None or self.passes_over or self.is_first_rank or source or world.current().placement.rank:
            return
        if name := kept_rank(self._place_at_start[0]):
            text = (
                f"{line_of_script()} sends from rank 0, which is another worker than at the start, with "
                f"{name} = {self._place_at_start[0]}: it may not have computed what it sends"
            )
            world.remark("sent by rank 0", text)

    def _note_gradients(self, tensor: torch.Tensor, loop: InPlaceLoop) -> None:
        if loop.number.differentiates or not tensor.requires_grad or tensor.is_leaf:
            return
        line = line_of_script()

        tensor.register_hook(lambda _: loop.number.note_gradients(line))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Handle the end of the script, or of its process group. Idempotent. A forked child is not the script."""
        if self._is_over or world.is_forked_child():
            return
        self._is_over = True
        set_transport_of_scripts(None)
        if self._loop is None or self._loader is None:
            return
        job = context.job()
        if job is not None and job.link.is_over:  # this worker has left the job, or the job is over
            self._loop.uninstall()
            return
        if self._has_to_join:
            logger.warning("this worker has not joined: its script ended before it reached the others")
            self._loop.uninstall()
            return
        if self._real is not None:
            if not self._loader.is_left:
                logger.error(
                    "this newcomer's script has ended before epoch %d, in which the others are", self._loader.epoch
                )
                self._loop.uninstall()
                return
            self.stop_passing()
        self._loop.leave()

    def abandon(self) -> None:
        """Handle that the script has failed."""
        self._is_over = True
        set_transport_of_scripts(None)

    # Opening -----------------------------------------------------------------------------------------------

    def _list(self, theirs: TorchDataLoader[Any]) -> tuple[ListedBatches | None, str]:
        """Return the batches of the epoch that the script begins, or the reason why there are none."""
        try:
            return listed_batches(theirs, self.workers, self._as_rank), ""
        except FarandoleError as error:
            return None, str(error)

    @contextmanager
    def _as_rank(self, rank: int) -> Iterator[None]:
        """Return a context in which this process has a rank of the start."""
        here = world.current()
        world.enter(echo_world(here, rank, self.workers))
        try:
            yield
        finally:
            world.enter(here)

    def _open(self, theirs: TorchDataLoader[Any], listed: ListedBatches | None, why_not: str) -> bool:
        """Enter the training with this DataLoader. False: the job stays static, on all workers."""
        try:
            loader = None if listed is None else ScriptLoader(theirs, listed)
            objects = self._registry.objects()
        except FarandoleError as error:
            loader, why_not = None, why_not or str(error)
        if not self._has_to_join:
            why_not = reason_of(b"" if listed is None else listed.digest, why_not, theirs)
        if why_not or loader is None:
            self._stay_static(why_not)
            return False
        try:
            state = ScriptedState(
                **{"model": None, "optimizer": None, **objects.modules, **objects.optimizers, **objects.others},
                loader=loader,  # type: ignore[arg-type]  # as TorchState(loader=...) of each DataLoader
                rehearse=False,
            )
            script = ScriptState(
                lambda: [*_parts_of(state), *objects.optimizers.values(), *objects.others.values()],
                lambda: [*roots_of_script(), *hooks_of(state.modules(), objects.optimizers.values())],
            )
            loop = InPlaceLoop(context.job(), state, loader, script, self.is_first_rank)
            loop.install()
        except FarandoleError as error:
            self._stay_static(str(error))
            return False
        self._loader, self._objects, self._loop, self._state = loader, objects, loop, state
        self._script = script
        self._trains_in_eval = not any(each.training for each in self._registry.parallel)
        if self._has_to_join:
            loader.known = -1
        else:
            loop.enter()
        return True

    def _stay_static(self, reason: str) -> None:
        self._static_because = reason
        set_transport_of_scripts(None)
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
        loop, loader = self._loop, self._loader
        assert loop is not None
        assert loader is not None
        if self._has_to_join:
            self._join(loop, loader)
        if self._real is not None:
            if not loader.is_left:
                raise StepError(
                    f"{line_of_script()}: this newcomer's script is behind the batches of epoch {loader.epoch}, in "
                    f"which the other workers are"
                )
            self.stop_passing()
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
        self._static_because, self._loop = reason, None
        set_transport_of_scripts(None)
        size = world.current().placement.size
        if size != self.workers:
            batches = f"a static job with {size} workers, not {self.workers}, and so with other global batches"
            world.remark("static job", f"{batches}, since {reason}")
        if self._loader is not None:
            self._in_current_world(self._loader.theirs)

    def _in_current_world(self, theirs: TorchDataLoader[Any]) -> TorchDataLoader[Any]:
        """Return a DataLoader with this worker's share of the batches of the script's in the current world: itself,
        where its sampler can be told."""
        if self._loader is None:
            return theirs
        here = world.current().placement
        plain = plain_sampler(theirs)
        if plain is not None:
            place(plain, here.rank, here.size)
            return theirs
        if (here.rank, here.size) == self._place_at_start:
            return theirs
        try:
            listed = listed_batches(theirs, self.workers, self._as_rank)
        except SameForAll:
            return theirs
        return with_batches(theirs, listed.rest(0, here.rank, here.size))

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
        if self._loop is None and not self._static_because and self._is_in_other_thread():
            self._stay_static("its batches are taken by another thread than the main one, ahead of the steps")
        if not self._static_because and self._loader is not None and not self._is_of_training(theirs):
            yield from self._other_training(theirs)
            return
        if not self._static_because and self._objects is not None and (newer := self._registry.newer(self._objects)):
            self._become_static(f"the script has constructed {newer} since its training began")
            yield from torchs_iterator(self._in_current_world(theirs))
            return
        listed, why_not = (None, "") if self._static_because else self._list(theirs)
        if self._static_because or (self._loop is None and not self._open(theirs, listed, why_not)):
            yield from torchs_iterator(self._in_current_world(theirs))
            return
        loader = self._loader
        assert loader is not None
        loader.expect(theirs, listed, why_not)
        if listed is not None:
            with self._as_rank(self._place_at_start[0]):
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
        for batch in torchs_iterator(self._in_current_world(theirs)):
            yield batch
            self._leave_for_other(reason)

    def _leave_for_other(self, reason: str) -> None:
        """Become static before a batch of another loader; while the step of a batch of the first one is undecided, at
        its next boundary."""
        loop, loader = self._loop, self._loader
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
        loop, loader = self._loop, self._loader
        assert loop is not None
        assert loader is not None
        script = self._script
        assert script is not None
        script.batches = 0
        loader.end_rehearsal()
        if self._has_to_join:
            script.begin_anew(loop_variables())
            script.batches += 1
            yield loader.rehearse()
            loader.end_rehearsal()
            if self._is_done_already(loader, begun):
                return
            self._join(loop, loader)
        if self._real is not None:
            if not self._arrives(loader, begun):
                if not script.batches:
                    script.batches += 1
                    yield loader.rehearse()
                    loader.end_rehearsal()
                return
            self.stop_passing()
        loop.reach_epoch(begun + self._offset)
        if has_looked and loader.next_batches is not None and loader.next_batches.digest != loader.listed.digest:
            loader.known = -1  # as where the number of the epoch was set after the look
            while not loop.agree_on_batches() and not loader.static_because:
                pass
        if loader.static_because and (loader.known != loader.epoch or loader.is_left):
            self._become_static(loader.static_because)
            theirs = loader.theirs
            yield from torchs_iterator(self._in_current_world(theirs))
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
            self._was_found = True  # the next iteration is the others' next one
            self.begin_passing()  # the others had completed the code after this epoch before this worker came to it

    def _batches(self, loop: InPlaceLoop, loader: ScriptLoader) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, until a reason is found why the job has to become static, and the
        rest of them then."""
        # A newcomer that finds a reason in the state of the others does not wait for a step: they have left the loop.
        began_at = -1 if loader.static_because else self._began_at
        iterator, taken = iter(loader), 0
        try:
            while True:
                if self._static_because:  # since a step with samples of another loader
                    yield from self._rest(loader, loader.cursor)
                    return
                if taken:
                    loader.static_because = loader.static_because or self._reason_in_batches(loader, taken)
                if loader.static_because:
                    position = loop.become_static_in_batches(loader.static_because, began_at)
                    if position is not None:
                        self._be_static(loader.static_because)
                        self._is_in_batches = False
                        yield from self._rest(loader, position)
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

    def _reason_in_batches(self, loader: ScriptLoader, taken: int) -> str:
        """Return the reason why the job has to become static, as far as it shows when the script asks for another batch
        than the first one of an iteration; empty: there is none."""
        if taken == 1 and (line := line_that_counts()):
            return (
                f"{line}: next() of the training loader is in a loop that counts its batches, and would end an epoch "
                f"too early when a batch comes again (write `for batch in loader`)"
            )
        is_first = not loader.batches_of_step
        if is_first and step.status() is StepStatus.OPEN and not step.is_noticed():
            return f"{line_of_script()}: the script takes a batch of its training loader before the last one is trained"
        return ""

    def _rest(self, loader: ScriptLoader, position: int) -> Iterator[Any]:
        """Return torch's iterator over the rest of an epoch."""
        here = world.current().placement
        rest = with_batches(loader.theirs, loader.rest(position, here.rank, here.size))
        with loader.draws_kept():  # torch has drawn at the beginning of the epoch
            return torchs_iterator(rest)

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
        current = self._in_current_world(theirs)
        if self.passes_over:
            return islice(torchs_iterator(current), 1)
        self._evaluations.compare(theirs, torchs_length(current), self._registry.loaders.line_of(theirs))
        return torchs_iterator(current)

    # Newcomers ---------------------------------------------------------------------------------------------

    def _is_done_already(self, loader: ScriptLoader, begun: int) -> bool:
        """Return whether the others had completed this epoch before this worker started, so that it can be passed over
        before they wait for this worker. A script that begins in the middle, from its own checkpoint, counts its
        iterations otherwise."""
        job = context.job()
        begins_anew = not loader.is_numbered() or loader.number() == begun
        return job is not None and begins_anew and sum(self._lengths) <= job.link.step

    def _join(self, loop: InPlaceLoop, loader: ScriptLoader) -> None:
        """Ask to be admitted, and get the state of the others."""
        assert self._state is not None
        for optimizer in self._state.optimizers():
            optimizer.zero_grad()
        loop.enter()
        self._has_to_join = False
        logger.warning("joined at %s; carried over: %s", loader, self._objects)
        self.begin_passing()

    def _arrives(self, loader: ScriptLoader, begun: int) -> bool:
        """Return whether this iteration of the script is the one in which the others are, or will be next."""
        if not self._was_found:
            is_here = loader.has_number() if loader.is_numbered() else begun == loader.epoch
            if not is_here:
                return False
            self._offset = loader.epoch - begun
            self._was_found = True
            return not loader.is_left
        return True

    def begin_passing(self) -> None:
        """Run code without effect from now on, until stop_passing()."""
        assert self._state is not None
        self._state.capture(is_whole=True)
        self._real = world.current()
        world.enter(self._passing(self._real))

    def stop_passing(self) -> None:
        """Restore what the code without effect has changed."""
        assert self._state is not None
        assert self._loader is not None
        assert self._real is not None
        real, self._real = self._real, None
        world.enter(real)
        self._state.put_back()
        self._loader.set_world(real.placement.rank, real.placement.size)

    def _passing(self, here: world.World) -> world.World:
        """Return the world of a worker whose collectives are answered locally: not rank 0, in a world of the size of
        the start."""
        size = max(2, self.workers)
        return echo_world(here, size - 1, size)

    def _transport(self, op: str) -> Transport:
        """Return the transport for a collective that the script calls."""
        if world.are_refused():
            world.raise_if_refused(op)
        if self._loop is None or self.passes_over:
            return world.current().transport
        return self._loop.transport_of_call()


def _parts_of(state: StepState) -> Iterator[object]:
    """Yield the parameters and buffers of a state."""
    for module in state.modules():
        yield from module.parameters()
        yield from module.buffers()


def with_batches(theirs: TorchDataLoader[Any], batches: list[list[int]]) -> TorchDataLoader[Any]:
    """Return a DataLoader like that of the script, with these batches."""
    return TorchDataLoader(
        theirs.dataset,
        batch_sampler=batches,
        num_workers=theirs.num_workers,
        collate_fn=theirs.collate_fn,
        pin_memory=theirs.pin_memory,
        timeout=theirs.timeout,
        worker_init_fn=theirs.worker_init_fn,
        multiprocessing_context=theirs.multiprocessing_context,
        generator=theirs.generator,
        prefetch_factor=theirs.prefetch_factor,
    )


torchs_iterator: Callable[[TorchDataLoader[Any]], Iterator[Any]] = TorchDataLoader.__iter__
torchs_length: Callable[[TorchDataLoader[Any]], int] = TorchDataLoader.__len__
"""DataLoader.__iter__ and __len__ as torch has them, whatever replaces them later."""
