"""Copies of nested values, whose tensors may be filled in while training continues. Commits consist of them."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.errors import ConfigError, StepError
from farandole.training.collectives import world
from farandole.training.state.session import SESSION

TensorPair = tuple[torch.Tensor, torch.Tensor]
"""(source, target)"""

_CPU = torch.device("cpu")
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})


class ValueSnapshot:
    """A value as it was at the last commit; the next commit reuses the memory of its tensors. `is_on_host`: they are in
    host memory, on whatever device the value's are, for values that are copied back in place."""

    def __init__(self, is_on_host: bool = False) -> None:
        self._is_on_host = is_on_host
        self._value: Any = None
        self._targets: list[torch.Tensor] = []

    def take(self, value: Any, is_later: Callable[[torch.Tensor], bool] | None = None) -> list[TensorPair]:
        """Remember `value`. Containers and objects are copied now; so are tensors, except those for which `is_later`
        holds. Their copies are returned, for the caller to carry out."""
        walk = _Walk(self._targets, self._is_on_host)
        self._value = walk.copied(value)  # first, since it may raise
        self._targets = walk.targets
        later = []
        for source, target in zip(walk.sources, walk.targets, strict=True):
            detached = source.detach() if source.requires_grad else source
            if is_later is not None and is_later(source):
                later.append((detached, target))
            else:
                target.copy_(detached)
        return later

    def view(self) -> Any:
        """Return the value with the snapshot's own tensors in it, for callers that only copy out of them."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self._targets}
        return copy.deepcopy(self._value, memo)

    def copy(self) -> Any:
        """Return the value; no part of it is shared with the snapshot."""
        return copy.deepcopy(self._value)


class _Walk:
    """A pass over a value. It copies containers and objects as copy.deepcopy() does, several times as fast for the
    usual contents of states, and puts tensors into the copy that are to be filled in later.

    kept     target tensors of an earlier pass, which are reused where the layout is the same
    sources  tensors in the order in which they are found, each once; `targets` are the tensors in their places
    """

    def __init__(self, kept: Sequence[torch.Tensor], is_on_host: bool) -> None:
        self._kept, self._is_on_host = kept, is_on_host
        self._memo: dict[int, Any] = {}
        self.sources: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if kind in _TENSORS:
            return self._remember(value, self._target(value))
        if kind is dict or kind is OrderedDict:
            made = self._remember(value, kind())
            for key, each in value.items():
                made[key if type(key) in _LEAVES else self._otherwise(key)] = self.copied(each)
            if kind is OrderedDict and value.__dict__:  # the version numbers of a module's submodules
                made.__dict__.update(self.copied(value.__dict__))
            return made
        if kind is list:
            made = self._remember(value, [])
            made.extend(map(self.copied, value))
            return made
        return self._otherwise(value)

    def _otherwise(self, value: Any) -> Any:
        """Copy a value of any other type. Tensors that a pass finds in it are not cloned, either."""
        for tensor in tensors_in(value):
            self.copied(tensor)
        return copy.deepcopy(value, self._memo)

    def _target(self, source: torch.Tensor) -> torch.Tensor:
        place, device = len(self.targets), _CPU if self._is_on_host else source.device
        target = self._kept[place] if place < len(self._kept) else None
        if target is None or target.device != device or _layout(target) != _layout(source):
            # Pinned, so that the device copies asynchronously, at its full speed.
            is_pinned = source.is_cuda and device.type == "cpu"
            target = torch.empty_like(source, device=device, pin_memory=is_pinned, requires_grad=False)
        self.sources.append(source)
        self.targets.append(target)
        return target

    def _remember(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        return made


def deep_copy(values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Copy named values together, so that shared parts stay shared; tensors lose their graph. Raises ConfigError,
    naming the value, when one cannot be copied."""
    copied, memo = dict[str, Any](), dict[int, Any]()
    for name, value in values.items():
        try:
            memo |= {id(each): each.detach().clone() for each in tensors_in(value) if id(each) not in memo}
            copied[name] = copy.deepcopy(value, memo)
        except Exception as error:  # deepcopy raises any error of the value's own methods
            raise ConfigError(
                f"{owner}.{name} of type {type(value).__name__} cannot be copied ({error}), and so not committed: "
                f"use values in {owner} that can be copied and pickled, or objects with state_dict()"
            ) from error
    return copied


def refuse_learnable(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value with a tensor that an optimizer can train: values are copied and replaced, and the
    optimizer would go on with another tensor."""
    for name, value in values.items():
        if any(each.requires_grad and each.is_leaf for each in tensors_in(value)):
            raise ConfigError(
                f"state.{name} has a tensor that requires gradients: values of a state are copied, and the copies are "
                f"not those that an optimizer trains. Make it a parameter of a module, as in "
                f"torch.nn.ParameterList([tensor]), and pass the module to the state"
            )


def refuse_circles(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that contains itself: values are compared and restored part by part."""
    for name, value in values.items():
        if _has_circle(value, []):
            raise ConfigError(
                f"state.{name} is a {type(value).__name__} that contains itself: such a value cannot be compared and "
                f"restored part by part; keep the circle in an object of a class with state_dict()"
            )


def _has_circle(value: Any, within: list[int]) -> bool:
    if type(value) not in (dict, list, tuple, set):
        return False
    if id(value) in within:
        return True
    within.append(id(value))
    parts = value.values() if type(value) is dict else value
    found = any(_has_circle(each, within) for each in parts)
    within.pop()
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors in nested dicts, lists and tuples, each once, always in the same order."""
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    """Collect tensors. The type is checked first: each commit passes every number of every state."""
    kind = type(value)
    if kind in _LEAVES or id(value) in seen:
        return
    if kind in _TENSORS:
        seen.add(id(value))
        found.append(value)
    elif isinstance(value, Mapping):
        seen.add(id(value))
        for each in value.values():
            _collect(each, found, seen)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | range):
        seen.add(id(value))
        for each in value:
            _collect(each, found, seen)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


# Copies of tensors that are made while training continues, and that complete before the tensors change ----------------
#
# A commit begins a copy. The step() of every optimizer and the load_state_dict() of every hooked module first wait
# for it. A commit may also postpone its copy: as long as the tensors do not change, they are the commit. An
# optimizer's step() then leaves no commit to return to, and until the next commit there must be no reason to:
# collectives, which may fail, are refused.

# Below this size a thread costs more than the copy: some 0.1 ms.
_INLINE_BYTES = 1 << 20

_REFUSAL = (
    "between optimizer.step() and state.commit(): the state has commit_follows_step=True, so there is "
    "no commit to return to if another worker is lost now; call it before the step or after the commit, or leave "
    "commit_follows_step out"
)

_all: weakref.WeakSet[BackgroundCopy] = weakref.WeakSet()
_hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


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
        # Not a daemon: the process waits for it at its end. A daemon thread that returns from torch to Python then may
        # crash the process, before Python 3.14: https://github.com/python/cpython/issues/87135
        self._thread = threading.Thread(target=self._work_in_thread, name="farandole-commit")
        self._thread.start()

    def postpone(self, pairs: Sequence[TensorPair]) -> None:
        """Copy each source to its target on request, unless an optimizer steps first. Drops all earlier copies."""
        self.forget()
        self._postponed = list(pairs)

    def forget(self) -> None:
        """Drop the copies that the last commit has postponed, since a new commit is being made."""
        self._postponed, self._was_passed = [], False
        world.refuse_collectives(None)

    def pass_by(self) -> None:
        """Prepare for an optimizer's step. Inside an elastic function postponed copies are given up, as the promise of
        the script allows. Copies that were begun are finished."""
        if self._postponed and SESSION.is_elastic:
            self._postponed, self._was_passed = [], True
            world.refuse_collectives(_REFUSAL)
        else:
            self.finish()

    def finish_to_restore(self) -> None:
        """Run finish(), and raise StepError when the targets do not hold a commit."""
        self.finish()
        if self._was_passed:
            raise StepError(f"a return to the last commit is not possible {_REFUSAL}")

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


@functools.cache
def _hook_optimizers() -> None:
    """Hook all optimizers, once per process: a state may hold another optimizer than the one that steps."""
    register_optimizer_step_pre_hook(_before_step)


# A function of the module, without a state of its own, and so is the next one: modules are copied and pickled with
# their hooks.
def _before_step(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for each in list(_all):
        each.pass_by()


def _before_loading(*_: Any) -> None:
    finish_all()
