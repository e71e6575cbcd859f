"""The conversion of a state's DistributedDataParallel modules into elastic ones. The optimizers of their parameters
then decide steps. The run loops call it when an elastic function is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from farandole.collectives import world
from farandole.errors import ConfigError
from farandole.optim.ddp.ddp_path import DdpPath
from farandole.optim.ddp.module import follow_world, path_of, refuse_static_graph
from farandole.optim.ddp.stepping import SteppingOptimizer, make_stepping
from farandole.optim.ddp.user_hook import registered_hook
from farandole.optim.optimizer_mixin import WrappedOptimizer
from farandole.optim.parameters import check_devices
from farandole.process_group.c10d_group import BACKEND, FarandoleGroup


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
    paths = [_adopted(each, accumulates) for each in _parallel(modules)]
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
    for each in _parallel(values):
        if isinstance(each.process_group, FarandoleGroup):
            _adopted(each, lambda: False)


def _parallel(values: Iterable[object]) -> list[DistributedDataParallel]:
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    found = {id(each): each for module in modules for each in module.modules()}
    return [each for each in found.values() if isinstance(each, DistributedDataParallel)]


def _adopted(ddp: DistributedDataParallel, accumulates: Callable[[], bool]) -> DdpPath:
    path = path_of(ddp)
    if path is None:
        _refuse(ddp)
        names = _names(ddp)
        check_devices(names)
        path = DdpPath(names, accumulates, registered_hook(ddp))
        follow_world(ddp, path)
    return path


def _names(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Return the names of the parameters that the module's reducer reduces, in its order: private in torch 2.13
    (torch/nn/parallel/distributed.py)."""
    parameters, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    named = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return {parameter: named[id(parameter)] for parameter in parameters}


def _refuse(ddp: DistributedDataParallel) -> None:
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
