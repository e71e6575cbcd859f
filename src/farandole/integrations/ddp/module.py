"""A DistributedDataParallel that follows the world: the user's object, with a class derived from its own and
ElasticModule. It computes, and broadcasts buffers; its gradients go the way of a DistributedOptimizer (module_path.py).

torch's reducer is gone: it cannot weight gradients by the workers' shares, an error in C++ leaves it in the middle of a
pass, and it cuts its buckets anew after the first one, which a worker that joins would do alone. Forward passes run as
in no_sync(). The private methods and attributes are those of torch 2.13, torch/nn/parallel/distributed.py:
DistributedDataParallel._pre_forward, _distributed_broadcast_coalesced (buffers), _comm_hooks, _set_static_graph.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from farandole.errors import ConfigError, RecoverableError
from farandole.integrations.ddp.comm_hook import CommHook, registered_hook
from farandole.integrations.ddp.module_path import ModuleGradients
from farandole.integrations.torchrun.process_group.autoload import BACKEND
from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.works import plain_collectives
from farandole.training.collectives import world
from farandole.training.optim.optimizer_mixin import WrappedOptimizer
from farandole.training.optim.step_agreement import absorb, check_devices
from farandole.training.optim.stepping import SteppingOptimizer, make_stepping
from farandole.training.state import step
from farandole.training.state.batch import Batch

ModuleT = TypeVar("ModuleT", bound=DistributedDataParallel)

_GRADIENTS = "_farandole_gradients"
_OWN = (_GRADIENTS, "_farandole_world", "_farandole_batch", "_farandole_logged")


class ElasticModule(DistributedDataParallel):
    """The mixin of an elastic DistributedDataParallel. follow_world() puts it before the user's class."""

    _farandole_gradients: ModuleGradients
    _farandole_world: world.World | None
    _farandole_batch: Batch | None  # the last one
    _farandole_logged: Any

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        is_after_training = not torch.is_grad_enabled() and not world.is_entered()
        if _GRADIENTS not in self.__dict__ or is_after_training:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        asked = self.require_backward_grad_sync
        reduces = self._begin_forward(asked)
        self.require_backward_grad_sync = False
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_backward_grad_sync = asked
            self.require_forward_param_sync = reduces and torch.is_grad_enabled()

    # As DistributedDataParallel._pre_forward in torch 2.13: the graph must not contain it.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _begin_forward(self, asked: bool) -> bool:
        """Prepare a forward pass. Returns whether the backward pass reduces."""
        gradients, here = self._farandole_gradients, world.current()
        if self._farandole_world is not here:
            self._farandole_world = here
            self.require_forward_param_sync = True  # whatever operation was aborted
        if not torch.is_grad_enabled():
            return asked
        batch = gradients.begin_forward(asked)
        if batch is not None and batch is not self._farandole_batch:
            # Newcomers may run more or fewer of the loop bodies that do not count.
            self._farandole_batch, self.require_forward_param_sync = batch, batch.index == 0
        return gradients.reduces

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers, in forward(). A fault aborts the step, as in backward()."""
        if step.is_aborted():
            return
        is_in_step = step.is_undecided()
        try:
            with plain_collectives() if is_in_step else nullcontext():
                super()._distributed_broadcast_coalesced(  # type: ignore[no-untyped-call]
                    tensors, buffer_size, authoritative_rank
                )
        except RecoverableError:
            if not (is_in_step and absorb()):
                raise

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook as torch does: once, and before the first backward pass."""
        if _GRADIENTS not in self.__dict__:
            super().register_comm_hook(state, hook)
            return
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        if self._farandole_gradients.hook is not None:
            raise RuntimeError("register_comm_hook can only be called once")
        self._comm_hooks.append((hook, state))
        self._farandole_gradients.set_hook(CommHook(state, hook))

    def _get_ddp_logging_data(self) -> Any:
        """Return what torch knew of the module before it became elastic."""
        if _GRADIENTS in self.__dict__:
            return self._farandole_logged
        return super()._get_ddp_logging_data()  # type: ignore[no-untyped-call]

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ConfigError in an elastic function."""
        if _GRADIENTS in self.__dict__:
            refuse_join()
        return super().join(*args, **kwargs)

    def _set_static_graph(self) -> None:
        if _GRADIENTS in self.__dict__:
            refuse_static_graph()
        super()._set_static_graph()  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the user's class: copies do not follow the world."""
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        for name in _OWN:
            state.pop(name, None)
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), state  # type: ignore[attr-defined]


class NoReducer:
    """In the place of torch's reducer, which forward() asks whether it has rebuilt its buckets."""

    def _rebuild_buckets(self) -> bool:
        return False


def follow_world(ddp: DistributedDataParallel, gradients: ModuleGradients) -> None:
    """Let `gradients` reduce those of `ddp` from now on, with the current workers."""
    base = type(ddp)
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    ddp.__class__ = type(base.__name__, (ElasticModule, base), {"__module__": base.__module__})
    assert isinstance(ddp, ElasticModule)
    ddp.logger = None
    ddp.reducer = NoReducer()  # type: ignore[assignment]  # this removes the hooks of torch's, and releases its memory
    own = dict(zip(_OWN, (gradients, None, None, logged), strict=True))
    for name, value in own.items():
        object.__setattr__(ddp, name, value)


def refuse_static_graph() -> None:
    raise ConfigError(
        "DistributedDataParallel(static_graph=True) learns the order of the gradients in its first steps and relies on "
        "it afterwards; a worker that joins has not seen those steps, and would reduce other gradients than the "
        "others: leave static_graph out, and pass find_unused_parameters=True if parameters are not used in every step"
    )


def refuse_join() -> None:
    raise ConfigError(
        "DistributedDataParallel.join() is for workers with different numbers of batches; an elastic loader yields "
        "equally many on all workers, and weights them: leave it out"
    )


def note_wrapped(ddp: DistributedDataParallel) -> None:
    """Note which parameters require gradients where a module is wrapped: torch's reducer has these for ever, also where
    the script freezes some of them afterwards, and trains them later."""
    ddp._farandole_wrapped = [each for each in ddp.module.parameters() if each.requires_grad]  # type: ignore[assignment]


# The conversion of a state's DistributedDataParallel modules into elastic ones ----------------------------------------
#
# The optimizers of their parameters then decide steps.


def adopt(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    accumulates: Callable[[], bool] = lambda: False,
) -> bool:
    """Make each DistributedDataParallel among the modules, or inside them, elastic. Returns whether there is one. A
    second call for the same objects changes nothing.

    accumulates  returns whether the loop body may run without step(), between steps (the loader's micro_batch_size)

    Raises ConfigError for an object that cannot be made elastic, with nothing changed in it.
    """
    found = [_adopted(each, accumulates) for each in parallel_modules(modules)]
    for optimizer in optimizers if found else ():
        keys = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        of_this = [each for each in found if not each.keys.isdisjoint(keys)]
        if not of_this:
            continue
        if isinstance(optimizer, WrappedOptimizer):
            raise ConfigError(
                "a DistributedOptimizer has parameters of a DistributedDataParallel: their gradients would be reduced "
                "twice. Pass torch's optimizer to the state, or do not wrap the model"
            )
        if not isinstance(optimizer, SteppingOptimizer):
            make_stepping(optimizer, of_this)
    return bool(found)


def adopt_modules(values: Iterable[object]) -> None:
    """Make each DistributedDataParallel over a group of Farandole elastic, among the values or inside modules among
    them. Without a batch of a loader it takes the mean over all workers, and raises RecoverableError on a fault; its
    buckets are equal on all workers. Raises ConfigError as adopt() does."""
    for each in parallel_modules(values):
        if isinstance(each.process_group, FarandoleGroup):
            _adopted(each, lambda: False)


def parallel_modules(values: Iterable[object]) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel among the values, or inside modules among them."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    found = {id(each): each for module in modules for each in module.modules()}
    return [each for each in found.values() if isinstance(each, DistributedDataParallel)]


def _adopted(ddp: DistributedDataParallel, accumulates: Callable[[], bool]) -> ModuleGradients:
    gradients: ModuleGradients | None = ddp.__dict__.get(_GRADIENTS)
    if gradients is None:
        refuse_configuration(ddp)
        names = _names(ddp)
        check_devices(names)
        hook = registered_hook(ddp)
        gradients = ModuleGradients(names, accumulates, hook, ddp.find_unused_parameters, _bucket_mb(ddp, names))
        follow_world(ddp, gradients)
    return gradients


def _names(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Return the names of the parameters that the module reduces: those that require gradients, or did when the module
    was wrapped, if that was noted; all of them, where none does any more (a target encoder that was wrapped, and then
    frozen)."""
    parameters = list(ddp.module.parameters())
    reduced = [each for each in parameters if each.requires_grad]
    if not reduced:
        real = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        reduced = ddp.__dict__.get("_farandole_wrapped", real)
    elif ddp.find_unused_parameters:
        reduced += ddp.__dict__.get("_farandole_wrapped", ())
    keys, named = set(map(id, reduced)), ddp.module.named_parameters()
    return {each: name for name, each in named if id(each) in keys and name not in ddp.parameters_to_ignore}


_SEVERAL_BYTES, _BUCKET_MB = 8 << 20, 25.0


def _bucket_mb(ddp: DistributedDataParallel, names: Iterable[torch.Tensor]) -> float:
    """Return the size of the buckets that a communication hook gets: the user's, else torch's, or 0, for one bucket,
    for a small model. It depends on nothing that may differ between workers: what a hook keeps of a bucket has to be of
    the same one in each generation."""
    if not getattr(ddp, "bucket_bytes_cap_default", True):
        return ddp.bucket_bytes_cap / (1 << 20)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in names)
    return 0.0 if nbytes < _SEVERAL_BYTES else _BUCKET_MB


def refuse_configuration(ddp: DistributedDataParallel) -> None:
    """Raise ConfigError, with the reason, for a configuration that would be wrong in an elastic function. The private
    attributes are those of torch 2.13, torch/nn/parallel/distributed.py, DistributedDataParallel; none of these
    arguments has a public one."""
    group = ddp.process_group
    if not isinstance(group, FarandoleGroup) or group.size() != world.current().placement.size:
        raise ConfigError(
            f"DistributedDataParallel over a group of {group.size()} workers by {group.name()} cannot follow the "
            f"membership, which has {world.current().placement.size} workers: call "
            f'torch.distributed.init_process_group("{BACKEND}"), and leave process_group and device_mesh out'
        )
    if ddp.static_graph:
        refuse_static_graph()
    if ddp._join_config.enable:  # inside of join() or of torch's Join, which exchange the numbers of batches
        refuse_join()
    if ddp._delay_all_reduce_params:
        raise ConfigError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces gradients outside of its "
            "buckets, where they are not weighted by the workers' local batches; leave it out"
        )
    if ddp.mixed_precision is not None:
        raise ConfigError(
            "DistributedDataParallel(mixed_precision=...) has its own communication hook; use torch.autocast"
        )
    if ddp._use_python_reducer:
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp='python_reducer' reduces outside of the buckets of "
            "DistributedDataParallel; leave the default"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        raise ConfigError(
            "an optimizer that steps inside of backward() cannot skip a step when a worker is lost; call "
            "its step() after backward()"
        )
    embeddings = [each for each in ddp.modules() if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    if any(each.sparse for each in embeddings):
        raise ConfigError(
            "DistributedDataParallel of an Embedding with sparse=True: its gradients cannot be weighted in "
            "buckets; pass sparse=False, or use fd.DistributedOptimizer"
        )
