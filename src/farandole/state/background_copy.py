"""Copies of tensors that are made while training continues, and that complete before the tensors change.

A commit begins a copy. The step() of every optimizer and the load_state_dict() of every hooked module first wait for
it. A commit may also postpone its copy: as long as the tensors do not change, they are the commit. An optimizer's
step() then leaves no commit to return to, and until the next commit there must be no reason to: collectives, which may
fail, are refused.
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

# Below this size a thread costs more than the copy: some 0.1 ms.
_INLINE_BYTES = 1 << 20

_REFUSAL = (
    "between optimizer.step() and state.commit(): the state was made with commit_follows_step=True, so nothing is left "
    "to return to if another worker is lost now; put it before the step or behind the commit, or leave "
    "commit_follows_step out"
)


class BackgroundCopy:
    """Copies in the background, one set at a time. Only CPU tensors wait for the thread. Tensors on other devices are
    copied at once, in the caller's stream, which orders the copy after the operations queued before."""

    def __init__(self) -> None:
        self._todo: deque[TensorPair] = deque()
        self._postponed: list[TensorPair] = []
        self._was_passed = False  # an optimizer stepped: the postponed tensors cannot be copied any more
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _all.add(self)
        _hook_optimizers()

    def begin(self, pairs: Sequence[TensorPair]) -> None:
        """Start to copy each source to its target. Copies begun earlier are finished first."""
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
        # Not a daemon: the process waits for it at its end. A daemon thread inside torch would crash the process then.
        self._thread = threading.Thread(target=self._work_in_thread, name="farandole-commit")
        self._thread.start()

    def postpone(self, pairs: Sequence[TensorPair]) -> None:
        """Copy each source to its target on request, unless an optimizer steps first. All copies begun or postponed
        earlier are dropped."""
        self.forget()
        self._postponed = list(pairs)

    def forget(self) -> None:
        """Drop the copies that the last commit has postponed, since a new commit is being made."""
        self._postponed, self._was_passed = [], False
        world.refuse_collectives(None)

    def pass_by(self) -> None:
        """Prepare for an optimizer's step. Inside an elastic function postponed copies are given up, as the promise of
        the script allows. Copies that were begun are finished."""
        if self._postponed and loop_hooks.is_elastic():
            self._postponed, self._was_passed = [], True
            world.refuse_collectives(_REFUSAL)
        else:
            self.finish()

    def finish_to_restore(self) -> None:
        """Run finish(), and raise StepError when the targets do not hold a commit."""
        self.finish()
        if self._was_passed:
            raise StepError(f"returning to the last commit {_REFUSAL}")

    def finish(self) -> None:
        """Wait until all targets hold the values that their sources had at begin(). May be called from any thread;
        costs nothing when no copy is under way. Raises the error of a failed copy."""
        with self._lock:
            postponed, self._postponed = self._postponed, []
            for source, target in postponed:
                target.copy_(source)
            if self._thread is None:
                return
            try:
                self._work()  # helps the thread, which then has at most one tensor left
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
        except BaseException as error:  # noqa: BLE001 - finish() raises it in the caller's thread
            self._error = error


def finish_all() -> None:
    """Finish every copy that is under way, before code that does not know their owners changes tensors."""
    for each in list(_all):
        each.finish()


def finish_all_to_restore() -> None:
    """Run finish_all(), and raise StepError when the targets to restore from do not hold a commit."""
    for each in list(_all):
        each.finish_to_restore()


def finish_before_loading(module: torch.nn.Module) -> None:
    """Hook the module and its submodules, so that their load_state_dict() first finishes the copies."""
    for each in module.modules():
        if each not in _hooked:
            each.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
            _hooked.add(each)


_all: weakref.WeakSet[BackgroundCopy] = weakref.WeakSet()
_hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_has_hooked_optimizers = False


def _hook_optimizers() -> None:
    """Hook all optimizers, once per process: a state may hold another optimizer than the one that steps."""
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
