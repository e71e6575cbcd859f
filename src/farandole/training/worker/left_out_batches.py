"""Batches for which the loop body makes no step: all workers leave them out together, or the script has an error."""

from __future__ import annotations

import struct
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from farandole.errors import CollectiveMismatch, StepError
from farandole.training.collectives import world
from farandole.training.data.elastic_loader import without_step
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import SESSION
from farandole.training.state.step_state import StepState

LEFT_OUT = struct.Struct("<6qQ")
"""Decided steps, epoch, start, stop, samples of the rank, prepared, and hash of its samples: what workers exchange."""

_MOST_AT_START = 16
"""Batches that may be left out before the first one is trained."""


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

    def agree(self, batch: Batch, prepared: int, raise_if_interrupted: Callable[[str], None]) -> list[int]:
        """Return what `prepared` is on each rank, once all workers have shown that they leave out this batch.

        Raises:
            StepError: It is more likely that the script forgets its steps.
            CollectiveMismatch: Other workers do not, or leave out another one.
            RecoverableError: A worker is lost meanwhile.
        """
        global_batch = batch.global_batch
        self._refuse(global_batch)
        ids = SESSION.recorder.intend(batch)
        place = (self._state.step, global_batch.epoch, global_batch.start, global_batch.stop)
        try:
            raise_if_interrupted("leaving a batch out")
            mine = LEFT_OUT.pack(*place, global_batch.samples, prepared, ids)
            trailers = world.current().transport.all_gather(mine)
        except CollectiveMismatch as error:
            raise CollectiveMismatch(
                f"this worker has left out samples [{place[2]}, {place[3]}) of epoch {place[1]}, by a loop body "
                f"without optimizer.step(), and other workers have not: {error}. Decide it alike on all workers, as "
                f"by `if fd.any(is_bad): continue`"
            ) from error
        by_rank = [LEFT_OUT.unpack(each) if len(each) == LEFT_OUT.size else () for each in trailers]
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
