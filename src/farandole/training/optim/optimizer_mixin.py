"""The common part of Farandole's optimizers: the user's class as base, its own methods, hooks on its parameters,
GradScaler's protocol, and the undoing of a step.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from farandole.errors import ConfigError, StepError
from farandole.training.collectives import world
from farandole.training.optim.options import check_passes, names_of
from farandole.training.optim.passes import Passes
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.deep_copy import deep_copy, finish_all
from farandole.training.state.optimizer_state import OptimizerState, is_shard, load_state_dict_in_place, with_inner
from farandole.training.state.session import SESSION

# The user's optimizer class: its step by GradScaler's rules, and the methods that it adds to torch's ------------------
#
# Examples are first_step() and second_step() of SAM, train() and eval() of a schedule-free optimizer. Their changes
# are part of the step while a batch of a loader of Farandole is out.


class OwnMethods(torch.optim.Optimizer):
    """A mixin that is put before the user's optimizer class, with overriding_methods() in the namespace of the new
    class."""

    farandole_attributes = frozenset({"_base_scales", "_is_inside"})
    """Names of attributes that belong to Farandole, and not to the optimizer's state."""
    # GradScaler then always calls step(), even when it would skip: a skipped step is decided too (torch 2.13,
    # torch/amp/grad_scaler.py, GradScaler.step).
    _step_supports_amp_scaling = True
    _base_scales: bool
    """True when the user's class unscales and skips by itself, as fused ones do."""
    _is_inside = False  # of one of its methods: they call each other, and only the outermost call counts

    def _apply(
        self,
        closure: Any = None,
        gradients: Iterable[torch.Tensor] = (),
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Run the step of the user's class, with its further `arguments` and `options`. If a GradScaler has called, its
        rules apply: `gradients` are unscaled before, and nothing happens on inf or NaN. The GradScaler sets
        `grad_scale` and `found_inf` on this object, which the user's class must not see, and removes them."""
        takes_none = closure is None and not arguments and not _demands_closure(super().step.__func__)  # type: ignore[attr-defined]
        first = () if takes_none else (closure, *arguments)  # a class may have step(self), without a closure
        found_inf = self.__dict__.get("found_inf")
        is_skipped = found_inf is not None and bool(found_inf)
        if found_inf is not None:
            step.refuse_unknown_scaler()
        step.facts().note_update(is_skipped)
        before, self._is_inside = self._is_inside, True
        names = () if self._base_scales else ("grad_scale", "found_inf")
        asked: dict[str, Any] = {name: self.__dict__.pop(name) for name in names if name in self.__dict__}
        scale = asked.get("grad_scale")
        try:
            if is_skipped and not self._base_scales:
                return None
            if scale is not None:
                inverse = scale.double().reciprocal().float()
                for gradient in gradients:
                    gradient.mul_(inverse.to(gradient.device, gradient.dtype))
            return super().step(*first, **options)
        finally:
            self.__dict__.update(asked)
            self._is_inside = before

    def _decide_within(self, batch: Batch) -> None:
        """Note that an optimizer has stepped inside a method: the step is applied. Raises StepError if it must not
        be."""
        raise NotImplementedError

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
        step.begin_applying(self)
        undo = protect(self)
        refusal = (
            f"{type(self).__name__}.{name}() between the micro-batches of a global batch, whose gradients are not "
            f"complete yet; leave micro_batch_size out, or make it as large as the worker's local batch"
        )
        with _watching() as watch:
            self._is_inside = True
            try:
                result = method()
            except Exception as error:
                if batch.global_batch.is_divided:
                    raise StepError(refusal) from error
                raise
            finally:
                self._is_inside = False
        if step.is_aborted():
            return result
        if batch.global_batch.is_divided and (undo.has_moved() or watch.has_stepped):
            raise StepError(refusal)
        if watch.has_stepped:
            self._decide_within(batch)
        return result

    def _all_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._all_parameters() if parameter.grad is not None]


@functools.lru_cache(maxsize=64)
def _demands_closure(step: Callable[..., Any]) -> bool:
    """Return whether the first argument of step(), after `self`, has no default."""
    first = next(iter(list(inspect.signature(step).parameters.values())[1:]), None)
    return (
        first is not None
        and first.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and first.default is inspect.Parameter.empty
    )


def closure_of(
    optimizer: OwnMethods, first: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Callable[[], Any] | None, Callable[..., Any]]:
    """Return the closure among the arguments of step(), and `apply` of the optimizer, with the other arguments: classes
    of one's own may have such, or others instead of a closure."""
    if first is not None and not callable(first):
        return None, lambda gradients=(): optimizer._apply(first, gradients, arguments, options)
    return first, functools.partial(optimizer._apply, arguments=arguments, options=options)


STEPPED_TWICE = "optimizer.step() was called twice for one batch of the loader; call it once in each loop body"


def zeroing(set_to_none: bool) -> dict[str, bool]:
    """Return arguments for zero_grad() of the user's class, which may take none."""
    return {} if set_to_none else {"set_to_none": False}


def as_schedulers_patch_it(optimizer: torch.optim.Optimizer) -> None:
    """Replace the patched step() on an optimizer by the current class's. A scheduler that was made before has set the
    step of the user's class on the object, to see its calls (torch 2.13, torch/optim/lr_scheduler.py,
    patch_track_step_called). Raises ConfigError for a step() that has another origin.
    """
    patched = optimizer.__dict__["step"]
    if not getattr(patched, "_wrapped_by_lr_sched", False):
        raise ConfigError(
            f"step() of this {type(optimizer).__name__} was replaced on the object; override step() in a subclass, so "
            f"that it can be called only when the step is applied"
        )
    reference = weakref.ref(optimizer)

    @functools.wraps(patched)
    def step(*args: Any, **kwargs: Any) -> Any:
        each: Any = reference()
        each._opt_called = True
        return type(each).step(each, *args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def protect(optimizer: torch.optim.Optimizer) -> Undo:
    """Copy the values that the optimizer can change, once for each global batch: its step can be undone until it is
    decided."""
    undo = step.undo_of(optimizer)
    if undo is None:
        _refuse_parts(optimizer)
        undo = Undo(optimizer)
        step.undo_by(optimizer, undo)
    assert isinstance(undo, Undo)
    return undo


def _refuse_parts(optimizer: torch.optim.Optimizer) -> None:
    if any(is_shard(each) for group in optimizer.param_groups for each in group["params"]):
        raise ConfigError(
            f"step(closure), or a method of {type(optimizer).__name__} besides step(), with a model that fully_shard() "
            f"has divided is not supported: call backward(), and then step() without arguments"
        )


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


_step_hooks: list[Any] = []
_watches: list[_Watch] = []


@contextmanager
def _watching() -> Iterator[_Watch]:
    """Return a context that notes whether any optimizer steps within it."""
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_post_hook(_note_step))
    watch = _Watch()
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


def _note_step(*_: Any) -> None:
    for each in _watches:
        each.has_stepped = True


# Wrapped optimizers ---------------------------------------------------------------------------------------------------

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_hook_of: Any = WeakTensorKeyDictionary()
"""The hook of Farandole on each parameter. A script that wraps anew leaves old optimizers behind, which must not reduce
too: the newest hook counts, and an old optimizer that is stepped nevertheless reduces in step()."""


def wrap(optimizer: OptimizerT, mixin: type[WrappedOptimizer]) -> OptimizerT:
    """Return an instance of a class made of `mixin` and the user's class. It shares all attributes with the given
    optimizer: functions that its class has bound to `self` see the same ones."""
    if isinstance(optimizer, WrappedOptimizer):
        raise StepError("this optimizer is already a DistributedOptimizer; wrap it once")
    if any(isinstance(each, WrappedOptimizer) for each in with_inner("optimizer", optimizer).values()):
        raise StepError(
            f"this {type(optimizer).__name__} contains a DistributedOptimizer: wrap only the outermost optimizer"
        )
    world.current()  # NotInitialized is clearer here than in the first backward pass
    wrapped: OptimizerT = object.__new__(optimizer.__class__)
    # A dictionary of its own for the given optimizer, first: that of a new object is a view of values inside the object
    # since Python 3.13, whose garbage collector then counts a reference twice, and clears what is still in use.
    optimizer.__dict__ = dict(optimizer.__dict__)
    wrapped.__dict__ = optimizer.__dict__
    become(wrapped, mixin)
    return wrapped


def become(optimizer: torch.optim.Optimizer, mixin: type[OwnMethods]) -> None:
    """Change the class of an optimizer to one made of `mixin` and its own."""
    base = type(optimizer)
    namespace = {"__module__": base.__module__, **overriding_methods(base)}
    optimizer.__class__ = type(base.__name__, (mixin, base), namespace)
    if "step" in optimizer.__dict__:
        as_schedulers_patch_it(optimizer)


def counts_passes() -> bool:
    """Return whether there are, or may soon be, other workers to reduce with: otherwise any number of passes is
    allowed."""
    here = world.current()
    return here.placement.size > 1 or (SESSION.is_elastic and here.id.number > 0)


class WrappedOptimizer(OwnMethods):
    """Base of the mixins of Farandole. It is put before the user's optimizer class."""

    farandole_attributes = OwnMethods.farandole_attributes | {"_passes", "_parameter_names"}

    def _set_up(self, named_parameters: Iterable[Any] | None, passes_per_step: int) -> None:
        # Fused optimizers unscale and skip by themselves; they declare it on the instance or on their class
        # (torch 2.13, torch/optim/adam.py, Adam.__init__).
        self._base_scales = bool(self.__dict__.pop("_step_supports_amp_scaling", self.__dict__.get("_base_scales")))
        self._passes = Passes(check_passes(passes_per_step))
        self._parameter_names = names_of(self.param_groups, named_parameters)
        self._hook_parameters()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter, while the gradient is in the cache."""
        raise NotImplementedError

    def _hook_parameters(self) -> None:
        """Hook all parameters that can ever have a gradient: one that is frozen now may be trained later."""
        for parameter in self._all_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                _hook(parameter, self._on_gradient)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does; the new parameters are reduced from the next backward pass on."""
        super().add_param_group(param_group)
        self._parameter_names = {**names_of(self.param_groups, None), **self._parameter_names}
        self._hook_parameters()

    # Backward passes -------------------------------------------------------------------------------------

    @property
    def backward_passes_per_step(self) -> int:
        return self._passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect this number of passes from now on; those since the last step do not count. Raises ValueError."""
        self._passes.per_step = check_passes(passes)
        self._passes.restart()

    def abandon_step(self) -> None:
        """Drop the results of backward passes since the last step: gradients and the count of passes.

        For use after a failed collective, when gradients may be partly reduced. A TorchState calls it in restore().
        """
        self._passes.forget()
        for parameter in self._all_parameters():
            parameter.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does; backward passes are counted from zero again."""
        self._passes.forget()
        load_state_dict_in_place(self, super().load_state_dict, state_dict)


def _hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    old: RemovableHandle | None = _hook_of.get(parameter)
    if old is not None:
        old.remove()
    is_frozen = not parameter.requires_grad
    if is_frozen:
        # torch accepts hooks only then, and keeps them (torch 2.13, torch/_tensor.py,
        # Tensor.register_post_accumulate_grad_hook).
        parameter.requires_grad_(True)
    _hook_of[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    if is_frozen:
        parameter.requires_grad_(False)


# The end of a backward pass, for hooks --------------------------------------------------------------------------------


# As hooks in torch 2.13, torch/nn/parallel/distributed.py: inside of compiled autograd the hooks are compiled, too, and
# what is raised in code that is being compiled would not arrive.
@torch._disable_dynamo  # type: ignore[attr-defined]
def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Have `callback` called when the current backward() ends, on the thread that called it. Raises StepError inside of
    compiled autograd, which has no such end."""
    # It takes seconds to import, so `import torch` does not: who compiles has imported it.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        raise StepError(
            "compiled autograd (torch._dynamo.config.compiled_autograd) runs the hooks on gradients in a graph of its "
            "own, in which gradients cannot be reduced: leave it out; torch.compile() of the model works"
        )
    # Private, but the only hook at the end of backward(): torch 2.13 uses it in torch/nn/parallel/distributed.py.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# A copy of the values that one optimizer's step changes, to undo the step ---------------------------------------------
#
# It is made only where several parts form one step: several optimizers, or the methods of an optimizer that steps in
# two parts. A fault between them would leave the first one ahead.


class Undo:
    """A copy of parameters, optimizer state and group options. Needs as much memory as they do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._state = OptimizerState("optimizer", optimizer)
        self.parameters = self._state.parameters
        self._values = [parameter.detach().clone() for parameter in self.parameters]
        saved = {"entries": self._state.entries(), "options": self._state.options()}
        self._saved = deep_copy(saved, "optimizer")

    def put_back(self) -> None:
        """Restore the copied values. The same tensors stay in place."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self._values, strict=True):
                parameter.copy_(value)
        self._state.load(self._saved["entries"])
        self._state.load_options(self._saved["options"])

    def has_moved(self) -> bool:
        """Return whether a parameter has changed since."""
        return not all(map(torch.equal, self.parameters, self._values))
