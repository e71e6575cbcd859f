"""A rehearsal of the effect of a fault on the loop body: the second batch of a job runs once with a step that is
aborted.

All values that the body has changed before optimizer.step(), or because step() returned False, have to be restored
before the batch is repeated. The rehearsal checks whether they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from farandole.errors import ConfigError
from farandole.state.metadata import is_same
from farandole.state.step_state import StepState
from farandole.state.watched_tensors import are_equal

_PARTS = {
    "buffers": "the buffers of state.{}",
    "extra": "the extra state of state.{}",
    "groups": "the options of the parameter groups of state.{}",
    "stateful": "state.{}",
    "values": "state.{}",
}


class Rehearsal:
    """The state at the beginning of the rehearsal, right after capture(). Needs as much memory as the parameters, for
    one run of the loop body."""

    def __init__(self, state: StepState) -> None:
        self._state, self._watched = state, state.watched()
        self._mark = self._watched.mark()
        self._copies = {name: each.detach().clone() for name, each in self._watched.items()}
        self._metadata = state.copy_of_metadata()
        self._before_step: set[str] | None = None

    def look(self) -> None:
        """Record the names changed so far as changing before a step. The loop body has called optimizer.step()."""
        if self._before_step is None:
            self._before_step = self._changed()

    def end_shard(self) -> None:
        """Compare, in strict mode, after a loop body that another one follows. How many of them a step has depends on
        the number of workers, so each must begin with the same values. Buffers and GradScalers are restored already.

        Raises:
            ConfigError: A parameter, an option of a parameter group or a scheduler has changed.
        """
        # An average of weights is still equal to them. Of an optimizer's parameters only other values count: a body may
        # clamp them each time.
        averages = set(self._watched.changed(self._mark)).intersection(self._watched.changing[1])
        live = self._watched.items()
        changed = [name for name, each in live if name in averages or not are_equal(each, self._copies[name])]
        if changed:
            raise ConfigError(_message_of_shard(f"state.{changed[0]}", len(changed) - 1))
        now = self._state.copy_of_metadata()
        schedulers = {name for name in now["stateful"] if isinstance(getattr(self._state, name), LRScheduler)}
        for part, names in (("stateful", schedulers), ("groups", now["groups"])):
            for name in names:
                if not is_same(self._metadata[part][name], now[part][name]):
                    raise ConfigError(_message_of_shard(_PARTS[part].format(name)))

    def end(self) -> None:
        """Restore everything after the loop body. Raises ConfigError, with its name, for a value that differs."""
        changed, watched = self._changed(), self._watched
        with torch.no_grad():
            for name, live in watched.items():
                if name in changed:
                    live.detach().copy_(self._copies[name])
        watched.trust([live for _, live in watched.items()])
        before_step = self._before_step or set()
        watched.add_changing(before_step)
        watched.add_changing_late(changed - before_step)
        self._state.put_back()
        metadata = self._state.copy_of_metadata()
        for part, what in _PARTS.items():
            for name, value in self._metadata[part].items():
                if not is_same(value, metadata[part][name]):
                    raise ConfigError(_message(what.format(name), value, metadata[part][name]))

    def _changed(self) -> set[str]:
        """Return the names of the changed tensors. Tensors written with the bytes that they had are included: the next
        loop body may write others."""
        others = {name for name, live in self._watched.items() if not are_equal(live, self._copies[name])}
        return others | (set(self._watched.changed(self._mark)) - self._watched.trusted)


def _message_of_shard(what: str, more: int = 0) -> str:
    further = f" and {more} more" if more else ""
    return (
        f"strict mode: {what}{further} changed in a run of the loop body whose optimizer.step() made no step, since "
        f"further shards of the global batch follow. It would change as often as a worker has shards, which depends on "
        f"the number of workers. Change it in TorchState(after_step=[...]), or where optimizer.step() returns True"
    )


def _message(what: str, before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in before if key not in after or not is_same(before[key], after[key])]
        if keys:
            what = f"{what} ({', '.join(map(str, keys[:3]))})"
    return (
        f"{what} changed in the loop body before optimizer.step() and is not restored: it differs after "
        f"load_state_dict() of the value that was saved before the loop body. When a worker is lost, the step would be "
        f"repeated with the changed value. Make its state_dict() and load_state_dict() save and load everything that "
        f"the loop body changes, change it in TorchState(after_step=[...]), or leave it out of the state"
    )
