"""The meetings of all workers outside of a step: at a batch that they leave out, at the end of an epoch, at a call of
epoch.once(), and at the end of the function. A worker that has come to another place shows an error of the script.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from farandole.base.events.job_events import TrainingCutShort
from farandole.base.liveness.status_reporting import InPhase
from farandole.base.membership import Phase, Shortfall
from farandole.base.wire.link_messages import Finished
from farandole.errors import CollectiveMismatch, RecoverableError, StepError
from farandole.training.collectives import world
from farandole.training.collectives.agreement import DECIDE_TOGETHER, LEAVE_TOGETHER
from farandole.training.collectives.world import World
from farandole.training.data.elastic_loader import without_step
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import SESSION
from farandole.training.state.step_state import StepState
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")

LEFT_OUT = struct.Struct("<6qQ")
"""Decided steps, epoch, start, stop, samples of the rank, prepared, and hash of its samples: what workers exchange."""

EPOCH_END = struct.Struct("<3qQ")
"""Epoch, decided steps, prepared, digest: what workers exchange at the end of an epoch."""

_ONCE = struct.Struct("<3q")  # epoch, decided steps, number of the call

_MOST_AT_START = 16
"""Batches that may be left out before the first one is trained."""


def _exchange(layout: struct.Struct, *mine: int) -> list[tuple[int, ...]]:
    """Return what each worker says, by rank; nothing of one that is elsewhere, and says something else."""
    trailers = world.current().transport.all_gather(layout.pack(*mine))
    return [layout.unpack(each) if len(each) == layout.size else () for each in trailers]


@contextmanager
def _explained(text: str) -> Iterator[None]:
    """Say what it means that workers were in different collectives: `text` has {} for the error that shows it."""
    try:
        yield
    except CollectiveMismatch as error:
        raise CollectiveMismatch(text.format(error)) from error


# A batch for which the loop body makes no step: all workers leave it out together, or the script has an error ---------


class LeftOutBatches:
    """Those of one worker.

    has_foreign_step  since the last boundary, an optimizer has stepped that is not Farandole's
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self.has_foreign_step = False
        self._hook: RemovableHandle | None = None

    def watch(self) -> None:
        """Note the steps of all optimizers from now on, until close()."""
        self._hook = register_optimizer_step_post_hook(self._note_step)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def agree(self, batch: Batch, prepared: int) -> list[int]:
        """Return what `prepared` is on each rank, once all workers have shown that they leave out this batch.

        Raises:
            StepError: It is more likely that the script forgets its steps.
            CollectiveMismatch: Other workers do not, or leave out another one.
            RecoverableError: A worker is lost meanwhile.
        """
        whole = batch.global_batch
        self._refuse(whole)
        ids = SESSION.recorder.intend(batch)
        place = (self._state.step, whole.epoch, whole.start, whole.stop)
        with _explained(
            f"this worker has left out samples [{whole.start}, {whole.stop}) of epoch {whole.epoch}, by a loop body "
            f"without optimizer.step(), and other workers have not: {{}}. Decide it alike on all workers, as by "
            f"`if fd.any(is_bad): continue`"
        ):
            by_rank = _exchange(LEFT_OUT, *place, whole.samples, prepared, ids)
        if any(each[:4] != place for each in by_rank):
            raise CollectiveMismatch(f"workers left out different batches; (step, epoch, samples) by rank: {by_rank}")
        SESSION.recorder.agree(sum(each[4] for each in by_rank), sum(each[6] for each in by_rank) % 2**64)
        return [each[5] for each in by_rank]

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note that an optimizer of torch has stepped: it trains this worker's part only."""
        self.has_foreign_step |= not hasattr(optimizer, "abandon_step")

    def _refuse(self, global_batch: GlobalBatch) -> None:
        """Raise StepError where it is more likely that the script forgets its steps: no batch was trained yet."""
        record = getattr(self._state.loader, "record", None)
        left_out = 0 if record is None else record.skipped
        if self.has_foreign_step:
            raise StepError(without_step(global_batch, step.status()))
        if left_out < self._state.step:
            return
        samples = self._state.loader.epoch_samples
        is_epoch = 0 < samples <= global_batch.stop and not (global_batch.epoch or global_batch.start == 0)
        if left_out >= _MOST_AT_START or is_epoch or not step.is_noticed():
            raise StepError(without_step(global_batch, step.status()))


# The end of an epoch, and epoch.once() --------------------------------------------------------------------------------


def meet_at_epoch_end(epoch: int, decided: int, prepared: int, digest: int) -> tuple[list[int], list[int]]:
    """Meet all workers. Return what `prepared` and `digest` are on each rank. Raises CollectiveMismatch where they are
    not at the end of the same epoch, and RecoverableError when one is lost."""
    with _explained(
        f"this worker has ended epoch {epoch} after step {decided}, and another one has not ({{}}): all workers have "
        f"to leave the loop over the batches together. {DECIDE_TOGETHER}"
    ):
        by_rank = _exchange(EPOCH_END, epoch, decided, prepared, digest)
    if any(each[:2] != by_rank[0][:2] for each in by_rank):
        raise CollectiveMismatch(
            f"workers ended different epochs; (epoch, step) by rank: {[each[:2] for each in by_rank]}"
        )
    return [each[2] for each in by_rank], [each[3] for each in by_rank]


def meet_at_call(epoch: int, decided: int, call: int) -> None:
    """Meet all workers at the `call`-th epoch.once() of an epoch. Raises CollectiveMismatch where they are at another
    one."""
    here = (epoch, decided, call)
    by_rank = _exchange(_ONCE, *here)
    if any(each != here for each in by_rank):
        raise CollectiveMismatch(
            f"epoch.once() was called at different places; (epoch, step, number of the call) by rank: {by_rank}"
        )


# The end of an elastic function, under both rules ---------------------------------------------------------------------


def all_have_finished(job: WorkerJob | None, shortfall: Shortfall | None = None, static_because: str = "") -> bool:
    """Wait until the function has returned on every worker. Return False when a worker was lost before all had passed;
    regroup and call again, since the others may need this worker in the collectives of the function's last lines.

    shortfall  the part of its loader's promised work that the function did not do; for the job's report
    static_because  as in Finished
    """
    here = world.current()
    if job is None:
        _meet_at_end(here)
        if shortfall is not None and here.placement.rank == 0:  # there is no coordinator to report it
            logger.warning(TrainingCutShort.of(shortfall).line())
        return True
    with InPhase(Phase.FINISHED):
        job.link.send(Finished(here.id.number, shortfall, static_because))
        with suppress(RecoverableError):  # the coordinator's order says what to do
            _meet_at_end(here)
        job.has_finished = job.link.wait_for_release(here.id.number)
    return job.has_finished


def _meet_at_end(here: World) -> None:
    """Meet all workers. Raises CollectiveMismatch, on all of them, when another one waits for this one in a collective
    within the function: both would wait for ever."""
    ends = [each.begin_end() for each in here.extensions.values()]
    try:
        with _explained(f"this worker has left the elastic function, and another one has not ({{}}): {LEAVE_TOGETHER}"):
            here.transport.barrier()
    except RecoverableError:
        for each in ends:
            each.take()  # raises the mismatch that has made the other worker leave
        raise
    for each in ends:
        each.take()
