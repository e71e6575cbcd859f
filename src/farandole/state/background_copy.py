"""Copies of tensors that are made while training goes on, and are through before anything changes the tensors.

A commit begins one. Every optimizer's step() and every hooked module's load_state_dict() ends it first. Or a commit
postpones one: as long as the tensors stay as they are, they are the commit. Then an optimizer's step() leaves nothing
to return to, and until the next commit there must be no reason to: collectives, which may fail, are refused.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.collectives import world
from farandole.errors import StepError
from farandole.state import loop_hooks
from farandole.state.deep_copy import TensorPair

# Below this a thread costs more than the copy: some 0.1 ms.
_INLINE_BYTES = 1 << 20

_REFUSAL = (
    "between optimizer.step() and state.commit(): the state was made with commit_follows_step=True, so nothing is left "
    "to return to if another worker is lost now; put it before the step or behind the commit, or leave "
    "commit_follows_step out"
)


class BackgroundCopy:
    """One set of copies at a time. Only tensors on the CPU wait for the thread: those on other devices are copied at
    once, in the caller's stream, which knows what was queued before."""

    def __init__(self) -> None:
        self._todo: deque[TensorPair] = deque()
        self._postponed: list[TensorPair] = []
        self._was_passed = False  # an optimizer stepped, and what was postponed cannot be copied any more
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _all.add(self)
        _hook_optimizers()

    def begin(self, pairs: Sequence[TensorPair]) -> None:
        """Copy each source to its target, from now on. What was begun before is finished first."""
        self.finish()
        self._was_passed = False
        on_cpu = [pair for pair in pairs if pair[0].device.type == "cpu"]
        for source, target in pairs:
            if source.device.type != "cpu":
                target.copy_(source)
        self._todo.extend(on_cpu)
        if sum(source.numel() * source.element_size() for source, _ in on_cpu) <= _INLINE_BYTES:
            self._work()
            return
        # No daemon: a process that ends must wait for it. A daemon inside of torch would take the process down.
        self._thread = threading.Thread(target=self._work_in_thread, name="farandole-commit")
        self._thread.start()

    def postpone(self, pairs: Sequence[TensorPair]) -> None:
        """Copy each source to its target when somebody asks for it, unless an optimizer steps first. All that was
        begun, or postponed, before is not needed any more."""
        self.forget()
        self._postponed = list(pairs)

    def forget(self) -> None:
        """A new commit is being made: what the last one has postponed is not needed."""
        self._postponed, self._was_passed = [], False
        world.refuse_collectives(None)

    def pass_by(self) -> None:
        """An optimizer steps now. Inside an elastic function what is postponed is given up, which is promised to be
        well; copies that were begun are finished."""
        if self._postponed and loop_hooks.is_elastic():
            self._postponed, self._was_passed = [], True
            world.refuse_collectives(_REFUSAL)
        else:
            self.finish()

    def finish_to_restore(self) -> None:
        """finish(), or StepError when the targets do not hold a commit."""
        self.finish()
        if self._was_passed:
            raise StepError(f"returning to the last commit {_REFUSAL}")

    def finish(self) -> None:
        """Return when all targets hold what their sources held at begin(). From any thread; free when there is
        nothing to do. Raises what a copy raised."""
        with self._lock:
            postponed, self._postponed = self._postponed, []
            for source, target in postponed:
                target.copy_(source)
            if self._thread is None:
                return
            try:
                self._work()  # helps: the thread has at most one tensor in its hands then
            finally:
                self._thread.join()
                self._thread = None
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            try:
                source, target = self._todo.popleft()
            except IndexError:
                return
            target.copy_(source)

    def _work_in_thread(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - finish() raises it where somebody can act
            self._error = error


def finish_all() -> None:
    """End every copy that is under way, before tensors are changed by somebody who does not know whose they are."""
    for each in list(_all):
        each.finish()


def finish_all_to_restore() -> None:
    """The same, and StepError when what would be restored is no commit."""
    for each in list(_all):
        each.finish_to_restore()


def finish_before_loading(module: torch.nn.Module) -> None:
    """From now on load_state_dict() of the module, or of a module in it, ends the copies first."""
    for each in module.modules():
        if each not in _hooked:
            each.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
            _hooked.add(each)


_all: weakref.WeakSet[BackgroundCopy] = weakref.WeakSet()
_hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_has_hooked_optimizers = False


def _hook_optimizers() -> None:
    """Once per process, for all optimizers: the one that steps need not be the one that a state was given."""
    global _has_hooked_optimizers
    if not _has_hooked_optimizers:
        register_optimizer_step_pre_hook(_before_step)
        _has_hooked_optimizers = True


# Functions of the module, without a state of their own: modules are copied and pickled with their hooks.


def _before_step(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for each in list(_all):
        each.pass_by()


def _before_loading(*_: Any) -> None:
    finish_all()
