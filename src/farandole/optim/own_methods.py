"""Methods that an optimizer's class adds to torch's: first_step() and second_step() of SAM, train() and eval() of a
schedule-free optimizer. Their changes are part of the step while a batch of a loader of Farandole is out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole.errors import StepError
from farandole.optim.scaled_step import STEPPED_TWICE, ScaledStep
from farandole.state import step
from farandole.state.background_copy import finish_all
from farandole.state.global_batch import Batch
from farandole.state.undo import Undo


class OwnMethods(ScaledStep):
    """A mixin that is put before the user's optimizer class, with overriding_methods() in the namespace of the new
    class."""

    farandole_attributes = frozenset({"_base_scales", "_is_inside"})
    """Names of attributes that belong to Farandole, and not to the optimizer's state."""
    _is_inside = False

    def _decide_within(self, batch: Batch) -> None:
        """Note that an optimizer has stepped inside a method: the step is applied. Raises StepError if it must not
        be."""
        raise NotImplementedError

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        before, self._is_inside = self._is_inside, True  # methods call each other: only the outermost call counts
        try:
            return super()._apply(*args, **kwargs)
        finally:
            self._is_inside = before

    def _run_own(self, name: str, method: Callable[[], Any]) -> Any:
        """Call a method of the user's class.

        Before it changes anything a copy is made, once for each global batch, so that a fault later in the loop body
        can undo its changes. A method in which an optimizer steps, such as second_step(), counts as step().
        """
        batch = step.batch()
        if self._is_inside:
            return method()
        finish_all()  # copies of parameters, for a commit or a checkpoint: otherwise only step() finishes them
        if batch is None:
            return method()
        if not step.is_undecided():
            with _watching() as watch:
                result = method()
            if watch.has_stepped:
                raise StepError(STEPPED_TWICE)
            return result
        return self._run_undecided(name, method, batch)

    def _run_undecided(self, name: str, method: Callable[[], Any], batch: Batch) -> Any:
        step.applying(self)
        undo = protect(self)
        refusal = (
            f"{type(self).__name__}.{name}() between the micro-batches of a global batch, whose gradients are not "
            f"added up yet; leave micro_batch_size out, or make it as large as the worker's local batch"
        )
        with _watching() as watch:
            before, self._is_inside = self._is_inside, True
            try:
                result = method()
            except Exception as error:
                if batch.global_batch.micro_batches > 1:
                    raise StepError(refusal) from error
                raise
            finally:
                self._is_inside = before
        if step.state() == "aborted":
            return result
        if batch.global_batch.micro_batches > 1 and (undo.has_moved() or watch.has_stepped):
            raise StepError(refusal)
        if watch.has_stepped:
            self._decide_within(batch)
        return result


def protect(optimizer: torch.optim.Optimizer) -> Undo:
    """Copy the values that the optimizer can change, once for each global batch: its step can be undone until it is
    decided."""
    undo = step.undo_of(optimizer)
    if undo is None:
        undo = Undo(optimizer)
        step.undo_by(optimizer, undo)
    assert isinstance(undo, Undo)
    return undo


def overriding_methods(base: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return a replacement for each public method that the user's classes add to torch's; it calls the method by
    _run_own()."""
    names = {
        name
        for kind in base.__mro__
        if not kind.__module__.startswith("torch.optim.") and issubclass(kind, torch.optim.Optimizer)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
    }
    return {name: _overriding(name, getattr(base, name)) for name in sorted(names)}


def _overriding(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: OwnMethods, *args: Any, **kwargs: Any) -> Any:
        return self._run_own(name, functools.partial(method, self, *args, **kwargs))

    return run


class _Watch:
    has_stepped = False


_watches: list[_Watch] = []


@contextmanager
def _watching() -> Iterator[_Watch]:
    """Return a context that notes whether any optimizer steps within it."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_note_step))
    watch = _Watch()
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


_hooks: list[Any] = []


def _note_step(*_: Any) -> None:
    for each in _watches:
        each.has_stepped = True
