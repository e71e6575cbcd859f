"""run_fn: the elastic loop with the script's own reset, under Horovod's name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from farandole.errors import HorovodInternalError, HostsUpdatedInterrupt
from farandole.integrations.horovod.host_update_listeners import notification_manager
from farandole.integrations.horovod.object_state import State
from farandole.training.worker import context
from farandole.training.worker.run_loop import run

P = ParamSpec("P")
StateT = TypeVar("StateT", bound=State)
ResultT = TypeVar("ResultT")


def run_fn(
    function: Callable[Concatenate[StateT, P], ResultT], reset: Callable[[], object]
) -> Callable[Concatenate[StateT, P], ResultT]:
    """Make a function elastic as elastic.run does, for a world that `reset` recreates after each fault and host event.

    In a job with a coordinator this is elastic.run: workers regroup in place there, and `reset`, which would end this
    worker's membership by shutdown(), is not called.

    Args:
        function: The training function; its first argument is the state.
        reset: Called after each fault and host event.

    Returns:
        The elastic function.

    Raises:
        NotInitialized: As from run().

    Examples:
        >>> def train(state):
        ...     return "trained"
        >>> elastic = fd.elastic.run_fn(train, reset=lambda: None)
        >>> elastic(fd.elastic.ObjectState(fd.broadcast_object, fd.rank))
        'trained'
    """
    in_job = run(function)

    @functools.wraps(function)
    def elastic(state: StateT, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        if context.job() is not None:
            return in_job(state, *args, **kwargs)
        notification_manager.register_listener(state)
        try:
            while True:
                try:
                    state.sync()  # never skipped: a joining worker waits in it
                    return function(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                except HostsUpdatedInterrupt:
                    pass
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return elastic
