"""The step loop of a script of torchrun that is elastic in place. training.py enters and leaves it; its requests come
from the iterator of the script's DataLoader (script_loader.py)."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from contextlib import ExitStack

from farandole.collectives import world
from farandole.collectives.transport import Transport
from farandole.errors import RecoverableError
from farandole.in_place.script_collectives import SurvivingTransport
from farandole.in_place.script_loader import ScriptLoader
from farandole.liveness.status_reporting import InPhase
from farandole.membership import Phase
from farandole.optim.ddp.module import paths_of
from farandole.state import step
from farandole.state.step_state import StepState
from farandole.worker.context import WorkerJob
from farandole.worker.step_loop import StepLoop, reseed

logger = logging.getLogger("farandole")

_BODIES = struct.Struct("<q")


class InPlaceLoop(StepLoop):
    """The step loop of a script that is never called again: faults are absorbed wherever the script is.

    begin_passing, stop_passing  run code of the script without effect from now on, and no longer
    is_first_rank                the script was started as rank 0 of the job
    """

    def __init__(
        self,
        job: WorkerJob | None,
        state: StepState,
        loader: ScriptLoader,
        begin_passing: Callable[[], None],
        stop_passing: Callable[[], None],
        is_first_rank: bool,
    ) -> None:
        super().__init__(job, state)
        self._begin_passing, self._stop_passing = begin_passing, stop_passing
        self._is_first_rank = is_first_rank  # or the loss of that worker was reported
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

    def become_static(self, reason: str) -> None:
        """Leave the loop with all workers, between two iterations of the script over its batches. The script continues
        over the workers of this moment."""
        self._end_batches()
        self._is_at_epoch_end = True
        self._wait_to_become_static(reason)
        self._stack.close()

    def become_static_in_batches(self, reason: str, began_at: int = -1) -> int | None:
        """Leave the loop with all workers before a batch.

        Args:
            reason: Why; for the log.
            began_at: The position at which the iteration of the script has begun; -1: it does not matter.

        Returns:
            The position in the epoch behind the samples that the script has trained, or has gradients of. None: not
            here. All workers must leave at the same boundary, so a step has to be decided in this iteration; but the
            first step of the job is not waited for where the script adds up gradients of several batches, since the
            loader would have to find out how many (ScriptLoader.batches_of_step).
        """
        loader = self._script_loader
        step.end_body()
        if step.is_aborted():
            self.reach_boundary()
        batch = step.batch() if step.is_undecided() else None
        if batch is None and loader.cursor != began_at:
            self._wait_to_become_static(reason)
            position = loader.cursor
        elif batch is not None and not loader.batches_of_step:
            if self._has_to_regroup() or not self._has_finished(reason):
                self._regroup()  # the gradients are dropped, and the batch comes again
                return None
            position = batch.global_batch.stop
        else:
            return None
        self._stack.close()
        return position

    def _wait_to_become_static(self, reason: str) -> None:
        if self._connection is not None:
            self._regroup()
        while not self._has_finished(reason):
            self._regroup()

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
