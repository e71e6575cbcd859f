"""fd.elastic.run: calls the user's function, absorbs faults and planned changes, and decides when it is over."""

from __future__ import annotations

import functools
import logging
import signal
import struct
import threading
from collections.abc import Callable
from types import FrameType
from typing import Concatenate, ParamSpec, TypeVar

from farandole.collectives import world
from farandole.errors import CollectiveMismatch, ConfigError, RecoverableError
from farandole.messages import Elastic, Finished, Synced
from farandole.state import boundary, step
from farandole.state.sync import synchronize
from farandole.state.torch_state import TorchState
from farandole.worker import context
from farandole.worker.job import Job
from farandole.worker.randomness import reseed
from farandole.worker.recovery import regroup

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

logger = logging.getLogger("farandole")

_EPOCH_END = struct.Struct("<3q")  # epoch, decided steps, prepared


def run(
    function: Callable[Concatenate[TorchState, P], ResultT],
) -> Callable[Concatenate[TorchState, P], ResultT]:
    """Make a training function elastic: `function(state, ...)` trains with `state.loader`, and goes on in place
    when workers are lost, join or leave.

    - A fault in backward() or optimizer.step(), and every planned change, is absorbed where it happens.
    - A fault inside a collective that the function called itself (fd.mean, fd.any) leaves the function, which
      is then called again and continues at the same step, in the same epoch.
    - Returning is a barrier: it waits until the function has returned on every worker, and gives its value.

    Other exceptions leave as they are and end this worker. A worker that joins enters at the top of the function.
    """

    @functools.wraps(function)
    def elastic(state: TorchState, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        world.current()
        job = context.job()
        if job is not None and job.has_finished:
            raise ConfigError(
                f"{function.__name__} is the second elastic function of this script: a worker that joins begins at "
                f"the top, and cannot know which one the others are in; train in one elastic function"
            )
        return _RunLoop(job, state).run(lambda: function(state, *args, **kwargs))

    return elastic


class _RunLoop:
    """One call of an elastic function. What loader and optimizer ask at each boundary is answered here."""

    def __init__(self, job: Job | None, state: TorchState) -> None:
        self._job = job
        self._state = state

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        state = self._state
        boundary.install(self)
        if state.loader is not None:
            state.loader.boundary = self
        try:
            with _leaving_on_sigterm(self._job):
                self._enter()
                while True:
                    try:
                        result = call()
                    except RecoverableError as error:
                        if self._job is None:
                            raise
                        logger.info("leaving the elastic function to regroup: %s", error)
                    else:
                        if self._all_have_finished():
                            return result
                    self._regroup()
        finally:
            boundary.install(None)
            step.close()

    # Entering and returning ------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Everybody starts from the same state: the source's; at the start of the job, rank 0's."""
        job = self._job
        step.close()
        if self._state.loader is not None and not (job is not None and job.is_newcomer()):
            self._state.loader.limit_local_batch(world.current().placement.size)
        self._state.capture()
        if job is not None:
            job.link.send(Elastic())
        if job is not None and (job.is_newcomer() or job.has_to_regroup()):
            self._regroup()
            return
        here = world.current()
        try:
            synchronize(self._state, here.transport, founding=not self._state.is_holder)
        except RecoverableError:
            if job is None:
                raise
            self._regroup()
            return
        if job is not None:
            job.link.send(Synced(here.id.number))
        if self._state.loader is not None:
            self._state.loader.set_world(here.placement.rank, here.placement.size)

    def _all_have_finished(self) -> bool:
        """The barrier at the end. False: somebody was lost before everybody was through; regroup and call again,
        since the others may need this worker in the collectives of the function's last lines."""
        here = world.current()
        if self._job is None:
            here.transport.barrier()
            return True
        self._job.link.send(Finished(here.id.number))
        self._job.has_finished = self._job.link.wait_for_release(here.id.number)
        return self._job.has_finished

    # The loader asks (data/boundary.py) ------------------------------------------------------------------

    def reach(self) -> None:
        """A boundary: each next(loader). The only place in the middle of an epoch where workers regroup."""
        is_inside_ticket = step.state() == "open"
        if self._job is not None and (step.state() == "aborted" or self._job.has_to_regroup()):
            if step.is_undecided():
                step.aborted()
            self._regroup()
        elif is_inside_ticket or step.state() in ("reduced", "aborted"):
            return  # the next micro-batch, or a loop body that the loader is about to refuse
        self._pass_boundary()

    def reach_epoch_end(self) -> bool:
        """Every rank has resumed epochs(). False: there was a regroup instead, and the epoch is as it was, or
        as it is on the ranks that had passed already."""
        state = self._state
        epoch = state.progress.epoch
        try:
            notes = world.current().transport.all_gather(_EPOCH_END.pack(epoch, state.step, self.prepared()))
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            return False
        said = [_EPOCH_END.unpack(note) for note in notes]
        if any(each[:2] != said[0][:2] for each in said):
            raise CollectiveMismatch(
                f"workers ended different epochs; (epoch, step) by rank: {[each[:2] for each in said]}"
            )
        self.agree([each[2] for each in said])
        state.boundary += 1
        return True

    def _pass_boundary(self) -> None:
        """Remember the small state, and start the step's random numbers from (seed, step, rank): a step that
        is done again sees the same ones."""
        state = self._state
        state.boundary += 1
        state.capture()
        seed = state.loader.seed if state.loader is not None else 0
        reseed(seed, state.step, world.current().placement.rank)

    def _regroup(self) -> None:
        """From a fault or an agreed change to the same state on all members of the next generation."""
        assert self._job is not None
        state = self._state
        if step.is_undecided():
            state.put_back()  # the aborted pass has moved BatchNorm's statistics, and perhaps more
        else:
            state.capture()
        step.close()
        done = regroup(self._job, state)
        logger.info(
            "generation %d with %d workers, step %d: waited %.1f ms, connected %.1f ms, synced %.1f ms",
            done.number,
            done.size,
            state.step,
            done.waited_s * 1e3,
            done.built_s * 1e3,
            done.synced_s * 1e3,
        )

    # The optimizer asks (state/boundary.py) --------------------------------------------------------------

    def can_repeat(self) -> bool:
        return self._job is not None and step.batch() is not None

    def steps_decided(self) -> int:
        return self._state.step

    def prepared(self) -> int:
        return self._job.link.prepared if self._job is not None else 0

    def agree(self, prepared_by_rank: list[int]) -> None:
        if self._job is not None:
            self._job.agree(prepared_by_rank)


class _leaving_on_sigterm:  # noqa: N801 - reads as a statement
    """While an elastic function runs, SIGTERM means: leave at the next boundary, nothing is lost."""

    def __init__(self, job: Job | None) -> None:
        self._job = job
        self._is_installed = False

    def __enter__(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if self._job is not None and in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._is_installed = True

    def __exit__(self, *exc_info: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, _signum: int, _frame: FrameType | None) -> None:
        assert self._job is not None
        if self._job.link.is_over():
            raise SystemExit(128 + signal.SIGTERM)
        self._job.link.ask_to_leave()
