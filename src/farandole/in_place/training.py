"""The training of a script of torchrun, elastic in place: the step loop, driven by the iterator of its DataLoader.

    first batch          the objects are checked, and the step loop is entered; or the job stays static
    each batch           a boundary, as with a loader of Farandole
    after the batches    the code of the script; the remaining workers complete its collectives
    next iteration       the end of the epoch
    end of the script    the end of the elastic function, which is the rest of the script

A newcomer passes over the epochs that are done; docs/decisions/0038-elastic-in-place.md.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler

from farandole.collectives import world
from farandole.collectives.transport import Transport
from farandole.errors import ConfigError, FarandoleError, RecoverableError, StepError
from farandole.in_place.script_collectives import EchoTransport, SurvivingTransport
from farandole.in_place.script_loader import ScriptLoader, refuse_unsuitable
from farandole.in_place.script_objects import Objects, Registry, line_of_script, names_of_script, runs_in_lightning
from farandole.liveness.status_reporting import InPhase
from farandole.membership import Phase
from farandole.optim.ddp.module import paths_of
from farandole.process_group.works import set_transport_of_scripts
from farandole.state import step
from farandole.state.step import StepStatus
from farandole.state.step_state import StepState
from farandole.worker import context
from farandole.worker.context import WorkerJob
from farandole.worker.step_loop import StepLoop, reseed

logger = logging.getLogger("farandole")

_BODIES = struct.Struct("<q")


class InPlaceLoop(StepLoop):
    """The step loop of a script that is never called again: faults are absorbed wherever the script is."""

    def __init__(self, job: WorkerJob | None, state: StepState, loader: ScriptLoader, training: Training) -> None:
        super().__init__(job, state)
        self._begin_passing, self._stop_passing = training.begin_passing, training.stop_passing
        self._is_first_rank = training.is_first_rank  # or the loss of that worker was reported
        self._script_loader = loader
        self._calls_in_batches = False  # the script calls collectives in its loop over the batches
        self._is_at_epoch_end = False
        self._has_stepped = False
        self._has_repeated = False  # a batch of this epoch came again
        self._has_other_count = job is not None and job.is_newcomer()  # of the batches of this epoch
        self._missing_bodies = 0
        self._stack = ExitStack()

    def install(self) -> None:
        """Receive requests. Raises ConfigError for objects that cannot be made elastic, with nothing changed."""
        self._stack.enter_context(self.installed())
        for path in paths_of(self._state.modules()):
            path.mean_over = self._script_loader.batch_of_all
        self._stack.enter_context(InPhase(Phase.USER))

    def enter(self) -> None:
        """Enter the loop with all workers, or join them."""
        self._enter(lambda: None)
        self._has_other_count &= self._script_loader.cursor > 0

    def leave(self) -> None:
        """Wait until the script has ended on all workers, and leave the loop."""
        self._end_batches()
        self._is_at_epoch_end = True
        if self._connection is not None:
            self._regroup()
        while not self._has_finished():
            self._regroup()
        self._stack.close()

    def uninstall(self) -> None:
        """Leave the loop without waiting for anyone."""
        self._stack.close()

    def transport_of_call(self) -> Transport:
        """Return the transport for a collective that the script calls."""
        self._calls_in_batches |= step.batch() is not None
        return SurvivingTransport(self._calls, world.current().placement)

    def reach_epoch(self, epoch: int) -> None:
        """Wait until all workers have ended the epochs before `epoch`. They may regroup."""
        loader = self._script_loader
        while loader.epoch < epoch:
            self._end_batches()
            self._is_at_epoch_end = True
            if self.reach_epoch_end() and loader.epoch < epoch:
                loader.advance()
                self.begin_epoch()
                self._has_other_count = False
        self._is_at_epoch_end = False

    def _end_batches(self) -> None:
        """End the epoch's batches, which the script may have left by `break`."""
        step.end_body()
        if step.is_aborted():
            self.reach_boundary()
        loader = self._script_loader
        if self._has_repeated and loader.fraction < 1.0 and world.current().placement.rank == 0:
            logger.warning(
                "the script has left the loop over its batches at %s, in which batches came again because workers were "
                "lost: a loop that counts its batches ends too early then; write `for batch in loader`",
                loader,
            )
        self._has_repeated = False
        loader.end_epoch()

    def leave_batches(self) -> bool:
        self._missing_bodies = 0
        self._state.capture()
        return True

    # Loop bodies of an aborted step that this worker had not begun: calls of the loader --------------------------

    def missing_bodies(self) -> int:
        return self._missing_bodies

    def begin_missing_body(self) -> None:
        self._missing_bodies -= 1
        self._begin_passing()

    def end_missing_body(self) -> None:
        self._stop_passing()
        reseed(self._script_loader.seed, self._state.step, world.current().placement.rank)

    def prepared(self) -> int:
        """See StepLoop. A newcomer has not the script's count of batches: where collectives may depend on that count,
        newcomers join between epochs."""
        return 0 if self._calls_in_batches and not self._is_at_epoch_end else super().prepared()

    # Batches of a step: calls of the loader ----------------------------------------------------------------

    def begin_counting(self) -> None:
        """Note from now on whether the script calls step()."""
        self._has_stepped = False
        self._state.on_step = self._note_step

    def has_stepped(self) -> bool:
        return self._has_stepped

    def end_counting(self) -> None:
        self._state.on_step = None

    def _note_step(self) -> None:
        self._has_stepped = True

    def _completes_calls(self) -> bool:
        return self._job is not None

    def _regroup(self) -> None:
        self._has_repeated |= step.is_aborted()
        is_counted = not (self._is_at_epoch_end or self._has_other_count)
        while True:
            super()._regroup()
            try:
                bodies = self._script_loader.bodies if is_counted else -1
                by_rank = world.current().transport.all_gather(_BODIES.pack(bodies))
            except RecoverableError:
                continue
            break
        most = max(_BODIES.unpack(each)[0] for each in by_rank)
        self._missing_bodies = max(0, most - bodies) if is_counted else 0
        if world.current().placement.rank == 0 and not self._is_first_rank:
            self._is_first_rank = True
            logger.warning(
                "the worker that was started as rank 0 is lost, and this worker is rank 0 now. Code of the script that "
                "only rank 0 runs is run by it where the script calls get_rank() each time; where it read the rank at "
                "its start, such code (checkpoints, output) may not run any more"
            )

    def _warm_up(self, job: WorkerJob, call: Callable[[], object]) -> bool:
        """Do nothing: the first batch of the newcomer was one without effect."""
        return False


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
        self._loop: InPlaceLoop | None = None
        self._objects: Objects | None = None
        self._loader: ScriptLoader | None = None
        self._theirs: TorchDataLoader[Any] | None = None
        self._other: TorchDataLoader[Any] | None = None  # without a DistributedSampler, iterated last
        self.is_first_rank = False  # the script was started as rank 0 of the job
        self._begun = 0  # iterations of the script over its training loader
        self._began_at = 0  # the cursor at which the last one began
        self._offset = 0  # from these to the epochs of the training
        self._has_to_join = False
        self._was_found = False  # a newcomer has passed over the current epoch, whose batches and later code are done
        self._real: world.World | None = None  # while this worker, a member, passes over code
        self._is_over = False

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
        self.is_first_rank = not self._has_to_join and world.current().placement.rank == 0
        set_transport_of_scripts(self._transport)

    def batches(self, theirs: TorchDataLoader[Any]) -> Iterator[Any] | None:
        """Return an iterator over the batches of a DataLoader of the script; None: torch's own iterator is right."""
        if self._static_because or self._is_over or not world.is_entered():
            return None
        if self._loader is None and runs_in_lightning():
            self._stay_static(
                "Lightning's Trainer counts its batches itself: use the Trainer of farandole.frameworks.lightning"
            )
            return None
        if not isinstance(theirs.sampler, DistributedSampler):
            if not self._is_evaluating():
                self._other = theirs
            return None
        if self._is_evaluating() or (self._loader is not None and theirs is not self._theirs):
            return self._evaluation(theirs)
        if self._loader is None and not self._open(theirs):
            return None
        if self._has_only_looked():
            self._begun -= 1
        begun, self._begun = self._begun, self._begun + 1
        return self._epoch(begun)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle that an optimizer is about to apply its gradients.

        Raises:
            StepError: Its samples come from no batch of the training loader.
        """
        if self._static_because or self._is_over or self.passes_over or not world.is_entered():
            return
        if self._loop is None:
            self._stay_static(self._reason_without_loader())
        elif step.batch() is None:
            raise StepError(
                f"{line_of_script()}: {type(optimizer).__name__}.step() with samples that come from no batch of the "
                f"DataLoader that was iterated for training first; a job that is elastic in place has one training "
                f"loader, and steps inside the loop over its batches. Run this script without --in-place"
            )

    def end(self) -> None:
        """Handle the end of the script, or of its process group. Idempotent."""
        if self._is_over:
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

    def _open(self, theirs: TorchDataLoader[Any]) -> bool:
        """Enter the training with this DataLoader. False: the job stays static."""
        try:
            loader = ScriptLoader(theirs, self.workers)
            objects = self._registry.objects()
            state = StepState(
                **{"model": None, "optimizer": None, **objects.modules, **objects.optimizers, **objects.others},
                loader=loader,  # type: ignore[arg-type]  # as TorchState(loader=...) of each DataLoader
                rehearse=False,
            )
            loop = InPlaceLoop(context.job(), state, loader, self)
            loop.install()
        except FarandoleError as error:
            self._stay_static(str(error))
            return False
        self._loader, self._theirs, self._objects, self._loop, self._state = loader, theirs, objects, loop, state
        if not self._has_to_join:
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

    def _reason_without_loader(self) -> str:
        if self._other is not None:
            try:
                refuse_unsuitable(self._other)
            except ConfigError as error:
                return str(error)
        return "optimizer.step() trains samples of no DataLoader with a DistributedSampler"

    def _is_evaluating(self) -> bool:
        parallel = list(self._registry.parallel)
        return not torch.is_grad_enabled() or bool(parallel and not any(each.training for each in parallel))

    # Iterations --------------------------------------------------------------------------------------------

    def _epoch(self, begun: int) -> Iterator[Any]:
        """Yield the batches of the script's iteration number `begun`."""
        loop, loader = self._loop, self._loader
        assert loop is not None
        assert loader is not None
        has_yielded = False
        loader.end_rehearsal()
        if self._has_to_join:
            has_yielded = True
            yield loader.rehearse()
            loader.end_rehearsal()
            if self._is_done_already(loader, begun):
                return
            self._join(loop, loader)
        if self._real is not None:
            if not self._arrives(loader, begun):
                if not has_yielded:
                    yield loader.rehearse()
                    loader.end_rehearsal()
                return
            self.stop_passing()
        loop.reach_epoch(begun + self._offset)
        loader.begin_epoch()
        self._began_at = loader.cursor
        yield from loader
        if loader.is_left:  # the others had completed the code after this epoch before this worker came to it
            self.begin_passing()

    def _has_only_looked(self) -> bool:
        """Return whether the script has taken the first batch of its last iteration and no model has seen it, as in
        `len(next(iter(loader))[0])`: the next iteration is the same one."""
        is_first = self._loader is not None and self._loader.cursor == self._began_at
        is_unused = step.batch() is not None and not step.is_noticed()
        return bool(self._begun) and is_first and is_unused and step.status() in (StepStatus.OPEN, StepStatus.ABORTED)

    def _evaluation(self, theirs: TorchDataLoader[Any]) -> Iterator[Any]:
        """Return torch's iterator, over this worker's share in the current world; its first batch where this worker
        passes over code."""
        place(theirs.sampler)
        batches = torchs_iterator(theirs)
        return islice(batches, 1) if self.passes_over else batches

    # Newcomers ---------------------------------------------------------------------------------------------

    def _is_done_already(self, loader: ScriptLoader, begun: int) -> bool:
        """Return whether the others had completed this epoch before this worker started, so that it can be passed over
        before they wait for this worker. A script that begins in the middle, from its own checkpoint, counts its
        iterations otherwise."""
        job = context.job()
        begins_anew = not loader.is_numbered() or loader.number() == begun
        return job is not None and begins_anew and begun < job.link.step // len(loader)

    def _join(self, loop: InPlaceLoop, loader: ScriptLoader) -> None:
        """Ask to be admitted, and get the state of the others."""
        assert self._state is not None
        for optimizer in self._state.optimizers():
            optimizer.zero_grad()
        loop.enter()
        self._has_to_join = False
        names = names_of_script()
        logger.warning(
            "joined at %s; carried over: %s; not carried over: what the script keeps in variables%s",
            loader,
            self._objects,
            f" ({names})" if names else "",
        )
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
        placement = msgspec.structs.replace(here.placement, rank=size - 1, size=size)
        return replace(here, placement=placement, transport=EchoTransport(size - 1, size))

    def _transport(self, op: str) -> Transport:
        """Return the transport for a collective that the script calls."""
        if world.are_refused():
            world.raise_if_refused(op)
        if self._loop is None or self.passes_over:
            return world.current().transport
        return self._loop.transport_of_call()


def place(sampler: Any) -> None:
    """Give a DistributedSampler the current rank and size: it keeps those of its construction (torch 2.13,
    torch/utils/data/distributed.py, DistributedSampler.__init__)."""
    here = world.current().placement
    samples = len(sampler.dataset)
    sampler.rank, sampler.num_replicas = here.rank, here.size
    is_cut = sampler.drop_last and samples % here.size
    sampler.num_samples = samples // here.size if is_cut else -(-samples // here.size)
    sampler.total_size = sampler.num_samples * here.size


torchs_iterator: Callable[[TorchDataLoader[Any]], Iterator[Any]] = TorchDataLoader.__iter__
"""DataLoader.__iter__ as torch has it, whatever replaces it later."""
