"""fd.elastic.run makes a training function elastic, under the rule that its state follows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from farandole.base.env import read_job_env
from farandole.errors import ConfigError
from farandole.registry import factory
from farandole.training.collectives import world
from farandole.training.state.elastic_state import ElasticState
from farandole.training.state.step_state import StepState
from farandole.training.state.tracker import flush_trackers
from farandole.training.worker import context
from farandole.training.worker.step_loop import StepLoop
from farandole.training.worker.worker_job import WorkerJob

P = ParamSpec("P")
StateT = TypeVar("StateT", bound=ElasticState)
ResultT = TypeVar("ResultT")


class Loop(Protocol):
    """The elastic loop of one rule."""

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Call the function until it has returned on every worker, and return its value."""
        ...


def run(
    function: Callable[Concatenate[StateT, P], ResultT],
) -> Callable[Concatenate[StateT, P], ResultT]:
    """Make a training function elastic: `function(state, ...)` continues when workers are lost, join or leave.

    With a TorchState that has a loader (the step rule), in place:

    - A fault in backward() or optimizer.step(), and every planned change, is absorbed where it happens.
    - A fault inside a collective that the function called itself (fd.mean, fd.any) leaves the function, which
      is then called again and continues at the same step, in the same epoch.

    With every other state (the commit rule, as in Horovod), by calling the function again:

    - HorovodInternalError, which every failed collective raises, returns all workers to the newest commit.
    - HostsUpdatedInterrupt, from state.commit() or state.check_host_updates(), keeps the live state.

    Either way all workers have the same state before the function continues. Its return is a barrier: it waits until
    the function has returned on every worker. Other exceptions propagate unchanged and end this worker. A worker that
    joins enters at the top of the function.

    See the example of `DataLoader`.

    Args:
        function: The training function; its first argument is the state.

    Returns:
        The elastic function, which returns the value of `function`.

    Raises:
        NotInitialized: From the elastic function: `init()` was not called.
        ConfigError: From the elastic function: a second one is called in a job with a coordinator.
        StepError: From the elastic function: the loop broke a rule of the step.
        JobEnded: From the elastic function: the job is over, e.g. after Ctrl-C.
    """

    @functools.wraps(function)
    def elastic(state: StateT, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        world.current()
        job = context.job()
        if job is not None and job.has_finished:
            raise ConfigError(
                f"{function.__name__} is the second elastic function of this script: a worker that joins starts "
                f"at the first one, and cannot know which one the others are in; train in one elastic function"
            )
        try:
            return _loop(job, state).run(lambda: function(state, *args, **kwargs))
        finally:
            if not world.is_forked_child():  # the worker itself writes what was logged
                flush_trackers(state)

    return elastic


def _loop(job: WorkerJob | None, state: ElasticState) -> Loop:
    if isinstance(state, StepState):
        return StepLoop(job, state)
    if read_job_env().strict:
        raise ConfigError(
            "--strict: the state of this script has no fd.elastic.DataLoader, so batches cannot be cut into shards: "
            "write TorchState(model=..., optimizer=..., loader=fd.elastic.DataLoader(...)), or leave --strict out"
        )
    if read_job_env().balance == "auto":
        raise ConfigError(
            "--balance auto: the state of this script has no fd.elastic.DataLoader, and samplers give all workers "
            "equally many samples: write TorchState(model=..., optimizer=..., loader=fd.elastic.DataLoader(...)), or "
            "leave --balance out"
        )
    loop: Loop = factory("commit loop")(job, state)
    return loop
