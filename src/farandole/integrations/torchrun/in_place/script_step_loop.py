"""The step loop of a script of torchrun that is elastic in place. training.py enters and leaves it; its requests come
from the iterator of the script's DataLoader (script_loader.py)."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from farandole.base.liveness.status_reporting import InPhase
from farandole.base.membership import Phase, Placement
from farandole.errors import RecoverableError, StepError
from farandole.integrations.torchrun.in_place.division_trial import DivisionTrial, Sizes
from farandole.integrations.torchrun.in_place.loop_shape import loop_variables
from farandole.integrations.torchrun.in_place.number_of_workers import NumberOfWorkers
from farandole.integrations.torchrun.in_place.script_collectives import SurvivingTransport, echo_world
from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.integrations.torchrun.in_place.script_samplers import names_of
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.integrations.torchrun.process_group.works import set_placement_of_scripts
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport
from farandole.training.data.listed_batches import ListedBatches
from farandole.training.state import packing, step
from farandole.training.state.batch import Batch
from farandole.training.state.step_state import StepState
from farandole.training.state.sync import receive
from farandole.training.worker.newcomer_trial import Trial, Tried, Verdict, judge
from farandole.training.worker.step_loop import StepLoop
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


class _ScriptStanding(msgspec.Struct, frozen=True):
    """What the others have to know of a worker's script at a regroup.

    place   decided steps, epoch, and whether it was left, that its values belong to; nothing where it has those of a
            newcomer
    size    bytes of its values: (skeleton, tensors)
    """

    place: tuple[int, ...]
    size: tuple[int, int]


class ScriptedState(StepState):
    """A StepState beside the values that only the script knows."""

    script: ScriptState | None = None

    def capture(self, is_whole: bool = False) -> None:
        if not self.step:
            self._watched.inspect()
        super().capture(is_whole)

    def _on_decided(self, batch: Batch | None) -> None:
        super()._on_decided(batch)
        self._watched.applied()

    def before_applying(self) -> None:
        super().before_applying()
        if self.script is not None:
            self.script.look()

    def aborted(self) -> None:
        super().aborted()
        if self.script is not None:
            self.script.save()


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What the members of a generation tell each other.

    known     the epoch whose batches are known; -1: none
    digest    of these batches
    gathers, differentiates, divides, trials, due  as in NumberOfWorkers
    static_because  why the job has to become static; empty: it has not
    is_on_trial  it is a newcomer that has not trained yet
    going_on  a generator of the script that goes on in the loop body; empty: there is none
    """

    known: int
    digest: bytes
    gathers: str
    differentiates: str
    divides: str
    trials: int
    due: int
    static_because: str
    is_on_trial: bool
    going_on: str


_MOST_SUMMED = 64  # values of a tensor in which sums of a meter are looked for
_MOST_LOOKS = 6000  # for the permission to leave, 10 ms apart


class InPlaceLoop(StepLoop):
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
        self._lacks_values = job is not None and job.is_newcomer()  # of the others' script
        self._has_to_seed = self._lacks_values  # its random numbers, where the others' are not the same on all of them
        self._received: dict[str, Any] | None = None  # these values, until the script is where theirs was
        self._lacks_contribution = False  # a result that the script got in this loop body, or behind the batches
        self._seen: Placement | None = None  # rank and size for the rest of a loop body that has lost a worker
        self._size = 0  # workers of the last generation
        self._lost_in = -1  # the epoch in which a worker was lost last
        self._is_first_rank = is_first_rank  # or the loss of that worker was reported
        self._script_loader = loader
        self._calls_in_batches = False  # the script calls collectives in its loop over the batches
        self._is_at_epoch_end = False
        self._has_stepped = False
        self._has_repeated = False  # a batch of this epoch came again
        self._has_left_body = False  # the script has left the loop in a body whose step is aborted, and has gone on
        self._is_on_trial = self._lacks_values
        self._trial: Trial | None = None  # it is under way
        self._on_trial: list[int] = []  # ranks of newcomers that have not trained yet
        self._going_on = ""  # a generator of the script: a trial would make it go on
        self.number = NumberOfWorkers(job, loader)
        self._division: DivisionTrial | None = None  # it is under way
        self._other_place = ""  # where a newcomer's script stands that is not where those of the others do
        self._apart: world.World | None = None  # the real world, while a body of it runs apart
        self._stack = ExitStack()

    def install(self) -> None:
        """Receive requests. Raises ConfigError for objects that cannot be made elastic, with nothing changed."""
        self._stack.enter_context(self.installed())
        set_placement_of_scripts(lambda: self._seen)
        self._stack.callback(set_placement_of_scripts, None)
        self._stack.enter_context(InPhase(Phase.USER))

    def enter(self) -> None:
        """Enter the loop with all workers, or join them."""
        self._enter(lambda: None)
        self._size = world.current().placement.size
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
        if self._apart is not None:
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
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            self._pass_boundary()
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
        self._return()
        super().reach_boundary()
        if step.is_undecided():
            return
        if self._division is not None and not self._go_on_dividing(self._division):
            return
        tried = self._end_trial()
        if tried is not None or (self._on_trial and self._going_on):
            self._judge_newcomers(tried)
        here = (self._script_loader.epoch, self._state.step)
        if not self._is_due(here):
            return
        try:
            self._compare_scripts()
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            self._pass_boundary()
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
        if self._division is not None and step.is_rehearsal():
            self._division.look()
        super()._put_back()
        if is_repeated:
            self._script.roll_back(self._has_left_body)
            self._lacks_contribution = False
            if self._job is not None and (gone_on := self._script.take_gone_on()):
                text = (
                    f"{_some(gone_on)} of the script has gone on in a loop body that came again, and cannot be brought "
                    f"back: generators of Python have no state that can be set"
                )
                world.remark("generator of the script", text)

    def arrive(self) -> None:
        """Load the values of the others' script: this worker's script is where theirs was."""
        received, self._received, self._lacks_values = self._received, None, False
        if self._has_to_seed:
            reseed(self._script_loader.seed, self._state.step, world.current().placement.rank)
            self._has_to_seed = False
        if received is None:
            return
        self._other_place = self._script.other_place(received, loop_variables())
        loaded, missing = self._script.apply(received)
        if loaded:
            logger.warning("carried over from the script's variables: %s", _some(loaded))
        if missing and self._job is not None:
            text = f"a newcomer lacks {_some(missing)}, which the others' script has"
            world.current().on_remark("newcomer", text)

    def _exchange_scripts(self, place: tuple[int, ...]) -> None:
        """Let workers whose script is behind that of the others receive its values."""
        transport = world.current().transport
        packed = packing.pack(self._script.pack() if place else None)
        size = (len(packed.skeleton), packing.total_bytes(packed.tensors))
        by_rank = transport.all_gather(msgspec.msgpack.encode(_ScriptStanding(place, size)))
        standings = [msgspec.msgpack.decode(each, type=_ScriptStanding) for each in by_rank]
        self._note_lost(sum(bool(each.place) for each in standings))
        self._size = len(standings)
        newest = max(each.place for each in standings)
        if all(each.place == newest for each in standings):
            return
        source = next(rank for rank, each in enumerate(standings) if each.place == newest)
        received = receive(transport, source, packed, standings[source].size, needed=place < newest)
        if place < newest:
            self._received, self._lacks_values = received, True

    def _note_lost(self, remaining: int) -> None:
        """Say in the last line of the job what is gone with a lost worker."""
        if remaining < self._size:
            self._lost_in = self._script_loader.epoch
        if remaining < self._size and (gone := _modules_as_a_whole(self._script.own())):
            world.remark("own values", f"what each worker has by itself is gone with a lost one: {_some(gone)}")

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
        is_behind_batches = step.batch() is None and self._lost_in == self._script_loader.epoch
        if not is_behind_batches or not tensor.is_floating_point() or tensor.numel() > _MOST_SUMMED:
            return
        values = tensor.detach().double().flatten().tolist()
        if not self._script.sums(tensor.dtype).isdisjoint(values):
            text = (
                f"sums that the script keeps on each worker, and reduces at the end of epoch {self._lost_in}, lack "
                f"those of a lost worker"
            )
            world.remark("sums of an epoch", text)

    def _tell_lack(self) -> None:
        """Say so in the last line of the job if a result without a contribution stays: no body with it comes again."""
        lacks, self._lacks_contribution = self._lacks_contribution, False
        if lacks and self._job is not None:
            text = "a collective of the script lacks the contribution of a lost worker"
            world.current().on_remark("collective of the script", text)

    def _regroup(self) -> None:
        self._has_repeated |= step.is_aborted()
        self._end_trial()
        loader = self._script_loader
        place = () if self._lacks_values else (self._state.step, loader.epoch, int(loader.is_left))
        is_in_batches = not (self._lacks_values or self._is_at_epoch_end)
        while True:
            super()._regroup()
            self._seen = None
            self._tell_lack()
            try:
                self._exchange_batches()
                self._exchange_scripts(place)
            except RecoverableError:
                continue
            break
        self._refuse_unequal_parts()
        self._compared_at = (loader.epoch, self._state.step)
        if is_in_batches and not loader.is_left:
            self.arrive()
        if world.current().placement.rank == 0 and not self._is_first_rank:
            self._is_first_rank = True
            logger.warning(
                "the worker that was started as rank 0 is lost, and this worker is rank 0 now. Code of the script that "
                "only rank 0 runs is run by it where the script calls get_rank() each time; where it read the rank at "
                "its start, such code (checkpoints, output) may not run any more"
            )
            if gone := _modules_as_a_whole(self._script.of_first):
                text = (
                    f"the worker that was started as rank 0 is lost, and with it {_some(gone)}, which only it had in "
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

    def _exchange_batches(self) -> None:
        """Have the batches of the current epoch from the lowest rank that knows them, where this worker does not: it is
        a newcomer. And learn what others have found out about the script."""
        loader, transport = self._script_loader, world.current().transport
        going_on = min(self._script.going_on, default="")
        told = _Told(
            loader.known,
            loader.listed.digest,
            self.number.gathers,
            self.number.differentiates,
            self.number.divides,
            self.number.trials,
            self.number.due,
            loader.static_because,
            self._is_on_trial,
            going_on,
        )
        packed = transport.all_gather(msgspec.msgpack.encode(told))
        by_rank = [msgspec.msgpack.decode(each, type=_Told) for each in packed]
        self._on_trial = [rank for rank, each in enumerate(by_rank) if each.is_on_trial]
        self._going_on = next((each.going_on for each in by_rank if each.going_on), "")
        ranks = [rank for rank, each in enumerate(by_rank) if each.known == loader.epoch]  # none: the epoch begins
        if ranks and any((each.known, each.digest) != (loader.epoch, by_rank[ranks[0]].digest) for each in by_rank):
            batches = transport.all_gather(loader.listed.pack() if transport.rank == ranks[0] else b"")[ranks[0]]
            if (loader.known, loader.listed.digest) != (loader.epoch, by_rank[ranks[0]].digest):
                loader.know(ListedBatches.unpack(batches))
                self.record_batches()
        loader.static_because = loader.static_because or next(
            (each.static_because for each in by_rank if each.static_because), ""
        )
        self.number.gathers = next((each.gathers for each in by_rank if each.gathers), "")
        self.number.differentiates = next((each.differentiates for each in by_rank if each.differentiates), "")
        self.number.divides = next((each.divides for each in by_rank if each.divides), "")
        self.number.trials = max(each.trials for each in by_rank)
        self.number.due = max(each.due for each in by_rank)
        self.number.fix()

    # The trial of a division -------------------------------------------------------------------------------

    def _divide_batch(self) -> None:
        """Begin the next body of the trial."""
        loader = self._script_loader
        if self._division is None:
            seed, number = loader.seed + self._state.step, world.current().id.number
            sizes = _sizes_of(loader.listed, world.current().placement)
            tensors = self._script.digests_of_tensors
            self._division = DivisionTrial(
                self._state, seed, sizes, loader.collated, loader.is_collated_by_script, tensors, number
            )
        if workers := self._division.workers_seen():
            here = self._apart = world.current()
            world.enter(echo_world(here, min(here.placement.rank, workers - 1), workers))
        self._division.begin_body()
        loader.change = self._division.batch

    def _return(self) -> None:
        """Return to the real world, at the end of a body of the trial that has run apart from it. Idempotent."""
        if self._apart is not None:
            world.enter(self._apart)
            self._apart = None

    def _go_on_dividing(self, trial: DivisionTrial) -> bool:
        """End a body of the trial; after the last one, leave for a regroup where more workers are needed. Return
        whether the boundary may be passed further."""
        self._division, self._script_loader.change = None, None
        if trial.generation != world.current().id.number:  # it begins anew, if it is still due
            trial.drop()
            return True
        trial.end_body()
        try:
            if not trial.is_over(world.current().transport):
                self._division = trial
                return False
            self.number.note_trial(trial.because, trial.is_open, self._state.step)
            if trial.is_open:
                text = (
                    "gradients of equal samples differ, so that it could not be shown whether fewer workers train alike"
                )
                world.remark("trial of a division", text)
            if not trial.because:
                return True
            self._wait_for_change(gives_up=True)
        except RecoverableError:
            if self._job is None:
                raise
        self._regroup()
        self._pass_boundary()
        return True

    def _wait_for_change(self, gives_up: bool) -> None:
        """Wait, in agreement with the others, until the coordinator has announced a change of the workers. Raises
        RecoverableError when a worker is lost, or the generation has ended, instead; with `gives_up` StepError after a
        minute."""
        job, here = self._job, world.current()
        assert job is not None
        looks = 0
        while not job.has_to_regroup():
            if gives_up and looks == _MOST_LOOKS:
                raise StepError("the coordinator has announced no change of the workers within a minute")
            looks += 1
            job.link.catch_up()
            prepared = here.transport.all_gather(job.link.prepared.to_bytes(8, "big"))
            job.agree([int.from_bytes(each, "big") for each in prepared])
            threading.Event().wait(0.01)

    # The trial of a newcomer -------------------------------------------------------------------------------

    def rehearses(self) -> bool:
        loader = self._script_loader
        if self.number.has_to_try(self._state.step) and not (self._on_trial or self._going_on):
            self._divide_batch()
            return True
        if not (self._on_trial and loader.batches_of_step) or loader.static_because:
            return False
        self._trial = Trial(self._state)
        self._state.on_step = self._trial.look
        loader.is_of_trial = True
        reseed(loader.seed, self._state.step, 0)  # as on the worker whose samples these are
        return True

    def _end_trial(self) -> Tried | None:
        """Return the result of the trial that is under way; None: there is none."""
        trial, self._trial = self._trial, None
        if trial is None:
            return None
        self._state.on_step, self._script_loader.is_of_trial = None, False
        return trial.end(self._is_on_trial, self._other_place)

    def _judge_newcomers(self, tried: Tried | None) -> None:
        """Let newcomers leave that do not train as the others do. `tried`: the result of a trial; None: there was none,
        since a generator would have gone on in it."""
        here = world.current()
        try:
            if tried is None:
                reason = f"{self._going_on}, a generator, goes on in the loop body, and cannot be carried over"
                verdict = Verdict(tuple(self._on_trial), reason)
            else:
                by_rank = here.transport.all_gather(msgspec.msgpack.encode(tried))
                verdict = judge([msgspec.msgpack.decode(each, type=Tried) for each in by_rank])
            if not verdict.refused:
                self._is_on_trial, self._on_trial = False, []
                self._remark_open(verdict)
                return
            self._let_leave(verdict)
        except RecoverableError:
            if self._job is None:
                raise
        self._regroup()
        self._pass_boundary()

    def _remark_open(self, verdict: Verdict) -> None:
        if verdict.is_open:
            text = (
                f"whether newcomers train as the others do could not be shown: with equal samples and random numbers, "
                f"{verdict.difference} on other workers, too"
            )
            world.remark("trial of newcomers", text)

    def _let_leave(self, verdict: Verdict) -> None:
        """Wait until the refused newcomers may leave. Raises RecoverableError when a worker is lost instead."""
        job, here = self._job, world.current()
        assert job is not None
        text = f"a newcomer was not admitted, since it would not train as the others do: {verdict.difference}"
        if verdict.difference.startswith("with"):
            text += "; the script has state that cannot be carried over"
        world.remark("refused newcomer", text)
        if here.placement.rank in verdict.refused:
            logger.error("this worker leaves: %s", text)
            job.link.ask_to_leave()
        self._wait_for_change(gives_up=here.placement.rank in verdict.refused)

    def _warm_up(self, job: WorkerJob, call: Callable[[], object]) -> bool:
        """Do nothing: the first batch of the newcomer was one without effect."""
        return False


def _sizes_of(listed: ListedBatches, here: Placement) -> Sizes:
    workers, last = (listed.workers, here.size), listed.last_global_batch
    is_smaller = listed.batches_of_step == 1 and here.size <= last < listed.largest_global_batch
    parts = (last // listed.workers, len(range(here.rank, last, here.size)))
    return Sizes(listed.largest, workers, parts if is_smaller else (0, 0))


_MOST_NAMES = 12


def _modules_as_a_whole(names: Iterable[str]) -> list[str]:
    """Return main().ema instead of main().ema._modules['0']._parameters['weight']."""
    return sorted({re.split(r"\._(?:modules|parameters|buffers)\[", each)[0] for each in names})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")


class _Listed(msgspec.Struct, frozen=True, array_like=True):
    """The digest of the batches that a worker has listed, or the reason why it has none."""

    digest: bytes
    reason: str


def reason_of(digest: bytes, reason: str, theirs: TorchDataLoader[Any]) -> str:
    """Return the reason, alike on all workers, why they do not have the same batches for an epoch; empty: they have.

    Args:
        digest: Of the batches that this worker has listed for all of them.
        reason: Why it has none.
        theirs: The DataLoader of the script.

    Raises:
        RecoverableError: A worker is lost.
    """
    packed = world.current().transport.all_gather(msgspec.msgpack.encode(_Listed(digest, reason)))
    by_rank = [msgspec.msgpack.decode(each, type=_Listed) for each in packed]
    found = next((each.reason for each in by_rank if each.reason), "")
    if not found and any(each.digest != by_rank[0].digest for each in by_rank):
        found = (
            f"its sampler {names_of(theirs)} does not tell which samples other workers have: they have listed other "
            f"batches than this one expected"
        )
    return found
