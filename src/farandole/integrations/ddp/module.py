"""A DistributedDataParallel that follows the world: the user's object, with a class derived from its own and
ElasticModule.

After the first backward pass, its reducer cuts the gradients into buckets anew, in the order of their arrival, by a
collective in the next forward pass. A worker that joins would do so long after all others, and add up other gradients
than they until then. So the reducer is created once more, with buckets in the order of the parameters, and kept from
ever rebuilding them. All workers thus have the same buckets at all times.

torch has no public way to do that. The private methods and attributes are those of torch 2.13,
torch/nn/parallel/distributed.py: DistributedDataParallel._pre_forward (rebuilds the buckets), _ddp_init_helper (creates
the reducer), _distributed_broadcast_coalesced (buffers), _comm_hooks, _set_static_graph; and Reducer in
torch/_C/_distributed_c10d.pyi.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from farandole.errors import ConfigError, RecoverableError
from farandole.integrations.ddp.comm_hook import CommHook, registered_hook
from farandole.integrations.ddp.ddp_path import DdpPath
from farandole.integrations.ddp.stepping import SteppingOptimizer, make_stepping
from farandole.integrations.torchrun.process_group.autoload import BACKEND
from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.works import Done, Everybody, plain_collectives
from farandole.training.collectives import world
from farandole.training.optim.optimizer_mixin import WrappedOptimizer
from farandole.training.optim.step_agreement import absorb, check_devices
from farandole.training.state import step

ModuleT = TypeVar("ModuleT", bound=DistributedDataParallel)

_PATH = "_farandole_path"


class ElasticModule(DistributedDataParallel):
    """The mixin of an elastic DistributedDataParallel. follow_world() puts it before the user's class."""

    _farandole_path: DdpPath
    _farandole_world: world.World | None
    _farandole_group: ReducerGroup  # referenced here, since C++ keeps only the C++ half of it

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        is_after_training = not torch.is_grad_enabled() and not world.is_entered()
        if _PATH not in self.__dict__ or is_after_training:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        asked = self.require_backward_grad_sync
        self.require_backward_grad_sync = self._begin_forward(asked)
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_backward_grad_sync = asked

    # As DistributedDataParallel._pre_forward in torch 2.13: the graph must not contain it.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _begin_forward(self, asked: bool) -> bool:
        """Prepare a forward pass. Returns whether the backward pass reduces by the reducer."""
        path, here = self._farandole_path, world.current()
        if self._farandole_world is not here:
            self._farandole_world = here
            self._reset()
            self.require_forward_param_sync = True  # whatever operation was aborted
        if not torch.is_grad_enabled():
            return asked
        before = path.batch
        reduces = path.begin_forward(asked)
        if path.batch is not None and path.batch is not before:
            # Newcomers may run more or fewer of the loop bodies that do not count.
            self.require_forward_param_sync = path.batch.index == 0
        if path.has_passed or not (reduces or path.is_alone):
            self._reset()
        return reduces

    def _reset(self) -> None:
        """Reset the reducer's record of passes: the order of their gradients, and an unfinished pass."""
        self._farandole_path.has_passed = False
        self.reducer._reset_state()

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers, in forward(). A fault aborts the step, as in backward()."""
        if step.is_aborted():
            return
        if not step.is_undecided():
            super()._distributed_broadcast_coalesced(  # type: ignore[no-untyped-call]
                tensors, buffer_size, authoritative_rank
            )
            return
        try:
            with plain_collectives():
                super()._distributed_broadcast_coalesced(  # type: ignore[no-untyped-call]
                    tensors, buffer_size, authoritative_rank
                )
        except RecoverableError:
            if not absorb():
                raise

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook as torch does: once, and before the first backward pass."""
        if _PATH not in self.__dict__:
            super().register_comm_hook(state, hook)
            return
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        if self._farandole_path.hook is not None:
            raise RuntimeError("register_comm_hook can only be called once")
        self._comm_hooks.append((hook, state))
        self._farandole_path.hook = CommHook(state, hook)

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ConfigError in an elastic function."""
        if _PATH in self.__dict__:
            refuse_join()
        return super().join(*args, **kwargs)

    def _set_static_graph(self) -> None:
        if _PATH in self.__dict__:
            refuse_static_graph()
        super()._set_static_graph()  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the user's class: copies do not follow the world."""
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        for name in (_PATH, "_farandole_world", "_farandole_group"):
            state.pop(name, None)
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), state  # type: ignore[attr-defined]


def follow_world(ddp: DistributedDataParallel, path: DdpPath) -> None:
    """Make `ddp` reduce as `path` decides from now on, with the current workers."""
    base = type(ddp)
    ddp.__class__ = type(base.__name__, (ElasticModule, base), {"__module__": base.__module__})
    assert isinstance(ddp, ElasticModule)
    _make_reducer(ddp, path)
    object.__setattr__(ddp, _PATH, path)
    object.__setattr__(ddp, "_farandole_world", None)


def path_of(ddp: DistributedDataParallel) -> DdpPath | None:
    """Return the path that was given to follow_world()."""
    return ddp.__dict__.get(_PATH)


def paths_of(modules: Iterable[torch.nn.Module]) -> list[DdpPath]:
    """Return the paths of all elastic modules among these, or inside them."""
    return [path for each in parallel_modules(modules) if (path := path_of(each)) is not None]


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


@contextmanager
def _as_wrapped(ddp: Any) -> Iterator[None]:
    """Let the parameters require gradients as when the module was wrapped, if that was noted; all of them, where none
    does any more (a target encoder that was wrapped, and then frozen): torch makes no reducer for none."""
    wrapped: Iterable[torch.nn.Parameter] = ()
    if not any(each.requires_grad for each in ddp.module.parameters()):
        real = [each for each in ddp.module.parameters() if each.is_floating_point() or each.is_complex()]
        wrapped = ddp.__dict__.get("_farandole_wrapped", real)
    elif ddp.find_unused_parameters:
        wrapped = ddp.__dict__.get("_farandole_wrapped", ())
    frozen = [each for each in wrapped if not each.requires_grad]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)


def _make_reducer(ddp: Any, path: DdpPath) -> None:
    with _as_wrapped(ddp):
        _make_reducer_of_trained(ddp, path)


def _make_reducer_of_trained(ddp: Any, path: DdpPath) -> None:
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    theirs = ddp.process_group, ddp.__dict__.get("_bucket_config")
    del ddp.reducer  # this removes its hooks
    ddp.logger = None
    ddp._farandole_group = ddp.process_group = ReducerGroup(path.used_before)
    if theirs[1] is not None:
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        has_one = ddp.bucket_bytes_cap_default and nbytes < _SEVERAL_BYTES
        ddp._bucket_config = _FinalBuckets(theirs[1], has_one)
    try:
        ddp._ddp_init_helper(parameters, sparse, names, False)
    finally:
        ddp.process_group = theirs[0]
        if theirs[1] is not None:
            ddp._bucket_config = theirs[1]
    dist._register_comm_hook(  # type: ignore[attr-defined]
        ddp.reducer, None, path.on_bucket
    )


_SEVERAL_BYTES = 8 << 20
"""Size of a model from which several buckets are worth their latency. It depends on nothing that may differ between
workers: a worker that joins later has the same buckets."""


class _FinalBuckets:
    """The final limits of a DistributedDataParallel's buckets, from the beginning: those that the user has given, else
    torch's own, or one bucket for a small model. torch before 2.13 does not ask for limits: there is one bucket
    then."""

    def __init__(self, theirs: Any, has_one: bool) -> None:
        self._theirs, self._has_one = theirs, has_one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def compute_bucket_size_limits(self, static_graph: bool, find_unused_parameters: bool) -> Any:
        # Where unused parameters are searched for, buckets are never cut anew: the limits are the final ones.
        return self._theirs.compute_bucket_size_limits(static_graph=False, find_unused_parameters=not self._has_one)


# The process group that the reducer inside a DistributedDataParallel uses ---------------------------------------------


class ReducerGroup(FarandoleGroup):
    """A group of all workers. The reducer itself reduces only one tensor: the parameters that were used
    (find_unused_parameters).

    A fault in it must not pass through the reducer's C++, which would be left in the middle of a pass. It aborts the
    step, and the pass runs to its end without effect.

    used_before  places of the parameters that earlier micro-batches have used, unknown to the reducer
    """

    def __init__(self, used_before: Callable[[], Sequence[int]]) -> None:
        super().__init__(Everybody())
        self._used_before = used_before

    def allreduce(
        self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = ReduceOp.SUM, timeout: Any = None
    ) -> Done:
        """Reduce the one tensor of `tensors`: a number for each parameter, 0 if it was not used."""
        if step.is_aborted():
            return Done()
        for place in self._used_before():
            tensors[0][place] = 1
        try:
            with plain_collectives():
                return super().allreduce(tensors, opts, timeout)
        except RecoverableError:
            if not absorb():
                raise
            return Done()


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
    paths = [_adopted(each, accumulates) for each in parallel_modules(modules)]
    for optimizer in optimizers if paths else ():
        keys = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        of_this = [path for path in paths if not path.keys.isdisjoint(keys)]
        if not of_this:
            continue
        if isinstance(optimizer, WrappedOptimizer):
            raise ConfigError(
                "a DistributedOptimizer has parameters of a DistributedDataParallel: their gradients would be reduced "
                "twice. Pass torch's optimizer to the state, or do not wrap the model"
            )
        if not isinstance(optimizer, SteppingOptimizer):
            make_stepping(optimizer, of_this)
    return bool(paths)


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


def _adopted(ddp: DistributedDataParallel, accumulates: Callable[[], bool]) -> DdpPath:
    path = path_of(ddp)
    if path is None:
        refuse_configuration(ddp)
        names = _names(ddp)
        check_devices(names)
        path = DdpPath(names, accumulates, registered_hook(ddp), ddp.find_unused_parameters)
        follow_world(ddp, path)
    return path


def _names(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Return the names of the parameters that the module's reducer reduces, in its order: private in torch 2.13
    (torch/nn/parallel/distributed.py)."""
    with _as_wrapped(ddp):
        parameters, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    named = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return {parameter: named[id(parameter)] for parameter in parameters}


def refuse_configuration(ddp: DistributedDataParallel) -> None:
    """Raise ConfigError, with the reason, for a configuration that would be wrong in an elastic function.

    The private attributes are those of torch 2.13, torch/nn/parallel/distributed.py, DistributedDataParallel; none of
    these arguments has a public one.
    """
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
    _, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    if any(are_sparse):
        raise ConfigError(
            "DistributedDataParallel of an Embedding with sparse=True: its gradients cannot be weighted in "
            "buckets; pass sparse=False, or use fd.DistributedOptimizer"
        )
