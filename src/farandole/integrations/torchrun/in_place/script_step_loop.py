"""The step loop of a script of torchrun that is elastic in place. training.py enters and leaves it; its requests come
from the iterator of the script's DataLoader (script_loader.py)."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import msgspec
import torch

from farandole.base.liveness.status_reporting import InPhase
from farandole.base.membership import Phase, Placement
from farandole.errors import RecoverableError
from farandole.integrations.torchrun.in_place.number_of_workers import NumberOfWorkers
from farandole.integrations.torchrun.in_place.script_collectives import SurvivingTransport
from farandole.integrations.torchrun.in_place.script_exchanges import (
    ScriptExchanges,
    modules_as_a_whole,
    reason_of,
)
from farandole.integrations.torchrun.in_place.script_loader import ScriptHooks, ScriptLoader
from farandole.integrations.torchrun.in_place.script_search import some
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.integrations.torchrun.in_place.script_trials import ScriptTrials
from farandole.integrations.torchrun.in_place.scripted_state import ScriptedState
from farandole.integrations.torchrun.process_group.works import OF_SCRIPTS
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.worker.step_loop import StepLoop
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


_MOST_SUMMED = 4096  # values of a tensor in which sums of a meter are looked for


class InPlaceLoop(StepLoop, ScriptHooks):
    """The step loop of a script that is never called again: faults are absorbed wherever the script is.

    script         the values that only the script knows
    is_first_rank  the script was started as rank 0 of the job

    Attributes:
        number: What is known of the script's dependence on the number of workers.
    """

    def __init__(
        self,
        job: WorkerJob | None,
        state: ScriptedState,
        loader: ScriptLoader,
        script: ScriptState,
        is_first_rank: bool,
    ) -> None:
        super().__init__(job, state)
        state.script = self._script = script
        self._compared_at = (-1, -1)  # epoch and step at which the workers have compared the script's values last
        self.number = NumberOfWorkers(job, loader)
        self._trials = ScriptTrials(job, state, loader, script, self.number)
        self._exchanges = ScriptExchanges(job, state, loader, script, self.number, self._trials, self.record_batches)
        self._lacks_contribution = False  # a result that the script got in this loop body, or behind the batches
        self._seen: Placement | None = None  # rank and size for the rest of a loop body that has lost a worker
        self._is_first_rank = is_first_rank  # or the loss of that worker was reported
        self._script_loader = loader
        self._calls_in_batches = False  # the script calls collectives in its loop over the batches
        self._is_at_epoch_end = False
        self._has_stepped = False
        self._has_repeated = False  # a batch of this epoch came again
        self._has_left_body = False  # the script has left the loop in a body whose step is aborted, and has gone on
        self._stack = ExitStack()

    def install(self) -> None:
        """Receive requests. Raises ConfigError for objects that cannot be made elastic, with nothing changed."""
        self._stack.enter_context(self.installed())
        OF_SCRIPTS.placement = lambda: self._seen
        self._stack.callback(setattr, OF_SCRIPTS, "placement", None)
        self._stack.enter_context(InPhase(Phase.USER))

    def enter(self) -> None:
        """Enter the loop with all workers, or join them."""
        self._enter(lambda: None)
        self._exchanges.size = world.current().placement.size
        self.record_batches()

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
        if self._trials.apart is not None:
            return world.current().transport
        self._calls_in_batches |= step.batch() is not None
        return SurvivingTransport(
            self._calls, self._seen or world.current().placement, self._note_lack, self._look_at_sum
        )

    def reach_epoch(self, epoch: int) -> None:
        """Wait until all workers have ended the epochs before `epoch`, and have the same batches of it. They may
        regroup, and may find a reason to become static (`ScriptLoader.static_because`)."""
        loader = self._script_loader
        while loader.epoch < epoch and not loader.static_because:
            self._end_batches()
            self._is_at_epoch_end = True
            if self.reach_epoch_end() and loader.epoch < epoch and self.agree_on_batches():
                loader.advance()
                if loader.next_batches is not None:
                    loader.know(loader.next_batches)
                self.record_batches()
                self._refuse_unequal_parts()
                self.begin_epoch()
        self._is_at_epoch_end = False

    def record_batches(self) -> None:
        """Write to the sample ledger which samples the current epoch has."""
        loader = self._script_loader
        if self._records is not None and loader.known == loader.epoch:
            samples, listed = len(loader.dataset), loader.listed
            self._records.listed(loader.epoch, samples, listed.left_out(samples), listed.repeated())

    def agree_on_batches(self) -> bool:
        """Return whether all workers have listed the same batches for the next epoch. False: a reason to become static
        was found, or there was a regroup."""
        loader = self._script_loader
        digest = b"" if loader.next_batches is None else loader.next_batches.digest
        try:
            reason = reason_of(digest, loader.why_not_listed, loader.theirs)
        except RecoverableError as error:
            self._regroup_before_batch(error)
            return False
        loader.static_because = loader.static_because or reason
        return not reason

    def _end_batches(self) -> None:
        """End the epoch's batches, which the script may have left by `break`."""
        step.end_body()
        if step.is_aborted():
            left = step.batch() if step.is_noticed() else None
            self._has_left_body = True
            self.reach_boundary()
            self._has_left_body = False
            self._remark_left_step(left)
        loader = self._script_loader
        if self._has_repeated and loader.fraction < 1.0 and world.current().placement.rank == 0:
            logger.warning(
                "the script has left the loop over its batches at %s, in which batches came again because workers were "
                "lost: a loop that counts its batches ends too early then; write `for batch in loader`",
                loader,
            )
        self._has_repeated = False
        loader.end_epoch()

    def _remark_left_step(self, batch: Batch | None) -> None:
        """Say in the last line of the job that a step is missing: the script has left the loop over its batches, by
        `break`, in a body whose step was aborted, and cannot be brought back into it."""
        if batch is None or self._script_loader.is_over:
            return
        start, stop = batch.global_batch.start, batch.global_batch.stop
        text = (
            f"samples [{start}, {stop}) of epoch {batch.global_batch.epoch} are not trained: the script has left the "
            f"loop over its batches in the body of their step, which was to come again after a change of the workers"
        )
        world.remark("left step", text)

    def leave_batches(self) -> bool:
        self._state.capture()
        return True

    # The values of the script ------------------------------------------------------------------------------

    def reach_boundary(self) -> None:
        with self._signals.waiting:
            self._trials.come_back()
            super().reach_boundary()
            if not step.is_undecided():
                self._compare_at_boundary()

    def _compare_at_boundary(self) -> None:
        try:
            if self._trials.end_of_division():
                return
        except RecoverableError as error:
            self._regroup_before_batch(error)
        try:
            self._trials.judge_newcomers()
        except RecoverableError as error:
            self._regroup_before_batch(error)
        here = (self._script_loader.epoch, self._state.step)
        if not self._is_due(here):
            return
        try:
            self._compare_scripts()
        except RecoverableError as error:
            self._regroup_before_batch(error)
        self._compared_at = here

    def _is_due(self, here: tuple[int, int]) -> bool:
        """Return whether the workers compare what the script has changed: in steps 1, 2, 4, 8, ..., and in each epoch
        before its first batch."""
        decided = here[1]
        is_early = decided & (decided - 1) == 0
        is_new = here != self._compared_at and not self._script_loader.is_over
        return is_new and decided > 0 and (is_early or here[0] != self._compared_at[0])

    def _compare_scripts(self) -> None:
        if world.current().placement.size > 1:
            mine = msgspec.msgpack.encode(self._script.changed())
            by_rank = world.current().transport.all_gather(mine)
            self._script.compare([msgspec.msgpack.decode(each, type=dict[str, int]) for each in by_rank])

    def _pass_boundary(self) -> None:
        super()._pass_boundary()
        self._script.take(self._is_due((self._script_loader.epoch, self._state.step)))

    def _seed_body(self) -> None:
        """Leave the random numbers to the script, as torchrun does: ScriptState brings them back."""

    def _put_back(self) -> None:
        is_repeated = step.is_undecided()
        if step.is_rehearsal():
            self._trials.look()
        super()._put_back()
        if is_repeated:
            self._script.roll_back(self._has_left_body)
            self._lacks_contribution = False
            if self._job is not None and (gone_on := self._script.take_gone_on()):
                text = (
                    f"{some(gone_on)} of the script has gone on in a loop body that came again, and cannot be brought "
                    f"back: generators of Python have no state that can be set"
                )
                world.remark("generator of the script", text)

    def arrive(self) -> None:
        """Load the values of the others' script: this worker's script is where theirs was."""
        self._exchanges.arrive()

    def rehearses(self) -> bool:
        return self._trials.begin()

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

    def drop_bodies(self) -> None:
        with self._signals.waiting:
            self._put_back()
            step.close()

    def _note_step(self) -> None:
        self._has_stepped = True

    def _completes_calls(self) -> bool:
        return self._job is not None

    def _connect_in_body(self) -> None:
        self._seen = self._seen or world.current().placement
        super()._connect_in_body()

    def _note_lack(self) -> None:
        self._lacks_contribution = True

    def _look_at_sum(self, tensor: torch.Tensor) -> None:
        """Say in the last line of the job that a sum over the workers, behind the batches of an epoch, lacks what a
        lost worker has summed up in them."""
        is_behind_batches = step.batch() is None and self._exchanges.lost_in == self._script_loader.epoch
        if not is_behind_batches or not tensor.is_floating_point() or tensor.numel() > _MOST_SUMMED:
            return
        values = tensor.detach().double().flatten().tolist()
        if not self._script.sums(tensor.dtype).isdisjoint(values):
            text = (
                f"sums that the script keeps on each worker, and reduces at the end of epoch "
                f"{self._exchanges.lost_in}, lack those of a lost worker"
            )
            world.remark("sums of an epoch", text)

    def _tell_lack(self) -> None:
        """Say so in the last line of the job if a result without a contribution stays: no body with it comes again."""
        lacks, self._lacks_contribution = self._lacks_contribution, False
        if lacks and self._job is not None:
            text = "a collective of the script lacks the contribution of a lost worker"
            world.current().on_remark("collective of the script", text)

    def _regroup(self) -> None:
        with self._signals.waiting:
            self._has_repeated |= step.is_aborted()
            self._trials.end_of_newcomers()
            loader = self._script_loader
            place = () if self._exchanges.lacks_values else (self._state.step, loader.epoch, int(loader.is_left))
            is_in_batches = not (self._exchanges.lacks_values or self._is_at_epoch_end)
            while True:
                super()._regroup()
                self._seen = None
                self._tell_lack()
                try:
                    self._exchanges.batches()
                    self._exchanges.scripts(place)
                except RecoverableError:
                    continue
                break
            self._refuse_unequal_parts()
            self._compared_at = (loader.epoch, self._state.step)
            if is_in_batches and not loader.is_left:
                self.arrive()
            self._note_first_rank()

    def _note_first_rank(self) -> None:
        """Tell if this worker is rank 0 now, and was not at the start of the job."""
        if world.current().placement.rank == 0 and not self._is_first_rank:
            self._is_first_rank = True
            logger.warning(
                "the worker that was started as rank 0 is lost, and this worker is rank 0 now. Code of the script that "
                "only rank 0 runs is run by it where the script calls get_rank() each time; where it read the rank at "
                "its start, such code (checkpoints, output) may not run any more"
            )
            if gone := modules_as_a_whole(self._script.of_first):
                text = (
                    f"the worker that was started as rank 0 is lost, and with it {some(gone)}, which only it had in "
                    f"this form"
                )
                world.remark("first rank", text)

    def _refuse_unequal_parts(self) -> None:
        """Become static before the next batch, where the gradients of these workers would be others."""
        loader, size = self._script_loader, world.current().placement.size
        if size != loader.listed.workers and loader.batches_of_step > 1 and loader.listed.adds_unequal(loader.cursor):
            text = (
                f"batches of different sizes are added up in a step: their gradients count alike with "
                f"{loader.listed.workers} workers, and by their samples with {size}"
            )
            world.remark("unequal batches", text)
        if not loader.static_because:
            loader.static_because = self.number.why_static()
            loader.leaves_before_batch |= bool(loader.static_because)
