"""The warm-up: a newcomer runs its loop body before the others wait for it.

It covers the one-time work of a process that runs its code for the first time: torch.compile compiles, kernels are
chosen, memory and threads are created. The elastic function is called with batches whose steps are aborted, of each
size that the local batches of this worker may have, and it is left again before the worker asks to be admitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from farandole.base.machine import now_s
from farandole.training.collectives import world
from farandole.training.data.elastic_loader import LoaderHooks
from farandole.training.optim.buckets import reserve
from farandole.training.optim.distributed_optimizer import ReducingOptimizer
from farandole.training.state import step
from farandole.training.state.state_kinds import Loader
from farandole.training.state.step_state import StepState
from farandole.training.worker.process_setup import map_memory_ahead
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")

_WORTH_TELLING_S = 1.0


def reserve_memory(state: StepState) -> None:
    """Have the memory ready that a newcomer needs, before the others wait for it."""
    map_memory_ahead(state.modules())
    for optimizer in state.optimizers():
        if isinstance(optimizer, ReducingOptimizer):
            reserve(parameter for group in optimizer.param_groups for parameter in group["params"])
    if state.loader is not None:
        state.loader.warm_up()


def warm_up(job: WorkerJob, state: StepState, call: Callable[[], object]) -> bool:
    """Call the elastic function with batches without effect, and return the state to what it was. Return whether it was
    called. Raises JobEnded when the job is over.

    Meanwhile rank() and size() have the values of the last member of the next generation, so that this worker skips the
    work of rank 0; every collective is local. An exception of the function is ignored here: it is raised again after
    the admission, if its cause persists.
    """
    loader = state.loader
    if loader is None or not state.rehearse or not is_plain(state):
        return False
    began_s, metadata = now_s(), state.copy_of_metadata()
    hooks, loader.hooks = loader.hooks, _WarmUp(job, state, loader, metadata)
    with world.placed_as(job.link.members, job.link.members + 1):
        try:
            call()
        except _WarmedUp:
            took_s = now_s() - began_s
            level = logging.INFO if took_s > _WORTH_TELLING_S else logging.DEBUG
            logger.log(level, "the warm-up of the loop body before the admission took %.1f s", took_s)
        except Exception as error:
            logger.info(
                "the warm-up of the loop body failed, so that the other workers wait for its first run: %s: %s",
                type(error).__name__,
                error,
            )
            logger.debug("the traceback of the failed warm-up", exc_info=True)
        finally:
            loader.hooks = hooks
            step.close()
            loader.end_rehearsals()
    state.load_metadata(metadata)
    for optimizer in state.optimizers():
        optimizer.zero_grad(set_to_none=True)
    return True


class _WarmedUp(BaseException):
    """Leaves the elastic function, even one that catches every Exception."""


class _WarmUp(LoaderHooks):
    """The loader's hooks of a warm-up: one local batch after the other, and the end of the function after the last."""

    def __init__(self, job: WorkerJob, state: StepState, loader: Loader, metadata: dict[str, Any]) -> None:
        self._job, self._state, self._loader, self._metadata = job, state, loader, metadata
        self._local_batches = _local_batches(job.link.members)
        self._sizes = set[int]()
        self._is_due = False  # a local batch is prepared, and was not handed out yet

    def reach_boundary(self) -> None:
        if self._job.link.is_over:
            self._job.link.raise_if_over()
        if step.expects_micro_batch():
            self._state.begin_micro_batch()
            return
        if self._is_due:
            return
        step.close()
        self._state.load_metadata(self._metadata)
        for rank, size, is_at_tail in self._local_batches:
            samples = self._loader.start_rehearsal(rank, size, is_at_tail)
            if samples and samples not in self._sizes:
                self._sizes.add(samples)
                self._is_due = True
                return
        raise _WarmedUp

    def rehearses(self) -> bool:
        self._is_due = False
        return True

    def leave_batches(self) -> bool:
        raise _WarmedUp

    def reach_epoch_end(self) -> bool:
        raise _WarmedUp

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        """Do nothing: no effect is permanent yet."""


def _local_batches(members: int) -> Iterator[tuple[int, int, bool]]:
    """Yield rank, size and whether it is the epoch's last global batch, for the local batches that this worker may get.
    First those with this worker as an additional member; then those after the loss of another one. Two sizes are enough
    for a compiler that generalizes to any size after the second one."""
    for size in (members + 1, members):
        for is_at_tail in (False, True):
            for rank in (size - 1, 0):
                yield rank, size, is_at_tail


def is_plain(state: StepState) -> bool:
    """Return whether no parameter is divided among workers: a forward pass would be a collective then."""
    parameters = (each for module in state.modules() for each in module.parameters())
    return all(type(each) in (torch.nn.Parameter, torch.Tensor) for each in parameters)
