"""A rehearsal of the effect of a fault on the loop body: the second batch of a job runs once with a step that is
aborted.

All values that the body has changed before optimizer.step(), or because step() returned False, have to be restored
before the batch is repeated. The rehearsal checks whether they are.
"""

from __future__ import annotations

from typing import Any

import torch

from farandole.errors import ConfigError
from farandole.training.state.packed_metadata import is_same
from farandole.training.state.step_state import StepState
from farandole.training.state.watched_tensors import are_equal

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
        self._in_runs: set[str] = set()  # in strict mode, changed in runs of the loop body without a step

    def look(self) -> None:
        """Record the names changed so far as changing before a step. The loop body has called optimizer.step()."""
        if self._before_step is None:
            self._before_step = self._changed()

    def end_run(self) -> None:
        """Record the names changed so far, in strict mode, after a run of the loop body that another one follows: the
        state is about to put them back."""
        self._in_runs |= self._changed()

    def begin_run(self) -> None:
        """Note that the state has put them back, and another run of the loop body begins."""
        self._mark = self._watched.mark()

    def end(self) -> None:
        """Restore everything after the loop body. Raises ConfigError, with its name, for a value that differs."""
        changed, watched = self._changed() | self._in_runs, self._watched
        with torch.no_grad():
            for name, live in watched.items():
                if name in changed:
                    live.detach().copy_(self._copies[name])
        watched.trust([live for _, live in watched.items()])
        # In strict mode any change may come in a run of the loop body that makes no step, and has to be put back then.
        before_step = changed if self._state.is_strict else self._before_step or set()
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
