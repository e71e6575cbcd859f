"""Copies of tensors that are made while training goes on, and are through before anything changes the tensors.

A commit begins one. Every optimizer's step() and every hooked module's load_state_dict() ends it first.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.state.deep_copy import TensorPair

# Below this a thread costs more than the copy: some 0.1 ms.
_INLINE_BYTES = 1 << 20


class BackgroundCopy:
    """One set of copies at a time. Only tensors on the CPU wait for the thread: on other devices a copy is queued in
    the order of the device's stream, and so is whatever changes the tensor afterwards."""

    def __init__(self) -> None:
        self._todo: deque[TensorPair] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _all.add(self)
        _hook_optimizers()

    def begin(self, pairs: Sequence[TensorPair]) -> None:
        """Copy each source to its target, from now on. What was begun before is finished first."""
        self.finish()
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

    def finish(self) -> None:
        """Return when all targets hold what their sources held at begin(). From any thread; free when there is
        nothing to do. Raises what a copy raised."""
        with self._lock:
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
    finish_all()


def _before_loading(*_: Any) -> None:
    finish_all()
