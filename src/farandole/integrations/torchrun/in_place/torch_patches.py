"""The functions of torch that are replaced in a worker whose script is to be elastic in place.

The headings name their sources in torch 2.13. All are functions that scripts call or classes that they construct.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from farandole.base.env import read_job_env, read_worker_env, set_torchrun_world_size
from farandole.errors import ConfigError
from farandole.integrations.torchrun.in_place.script_objects import Noted, Registry
from farandole.integrations.torchrun.in_place.script_samplers import NUMBERED
from farandole.integrations.torchrun.in_place.torchs_loaders import torchs_iterator, torchs_length
from farandole.integrations.torchrun.in_place.training import Training
from farandole.integrations.torchrun.process_group.autoload import BACKEND
from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.registration import let_whole_groups_follow
from farandole.registry import factory
from farandole.training.worker import context

_training: Training | None = None


def install() -> bool:
    """Make the script of this process elastic in place, if its job was started so. Idempotent.

    Returns:
        Whether it is a worker of such a job.
    """
    global _training
    workers = read_job_env().in_place
    if _training is not None or not workers or read_worker_env() is None:
        return _training is not None
    set_torchrun_world_size(workers)
    registry = Registry()
    _training = Training(workers, registry)
    _note_constructions(registry)
    _replace_process_group(_training, registry)
    _replace_iteration(_training)
    return True


# torch/distributed/distributed_c10d.py --------------------------------------------------------------------------------


def _replace_process_group(training: Training, registry: Registry) -> None:
    let_whole_groups_follow()
    init, destroy = distributed_c10d.init_process_group, distributed_c10d.destroy_process_group
    new_group, broadcast_objects = distributed_c10d.new_group, distributed_c10d.broadcast_object_list
    new_signature = inspect.signature(new_group)
    monitored, signature = distributed_c10d.monitored_barrier, inspect.signature(init)
    requested: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # the backend of each group, as torch would name it

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        """Open the group of Farandole, whatever backend is requested. Rank and size are those of the job, which may
        change: an argument that states the rank is ignored.

        Raises ConfigError for another size than that of the start, and torch's own errors.
        """
        arguments = signature.bind(*args, **kwargs).arguments
        if dist.is_initialized() or not _is_known(arguments.get("backend")):
            init(*args, **kwargs)  # torch's own error
            return
        size = arguments.get("world_size", -1)
        if size not in (-1, training.workers):
            raise ConfigError(
                f"init_process_group(world_size={size}): this job was started with {training.workers} workers; leave "
                f"world_size out, or start {size} workers"
            )
        context.init()
        training.begin_world()
        hook = sys.excepthook
        init(BACKEND)
        requested[dist.group.WORLD] = _name_of(arguments.get("backend"))
        # See open_default_group() in integrations/torchrun/process_group/registration.py.
        sys.excepthook = hook
        _end_with_script(training)

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            training.end()
        destroy(group)

    @functools.wraps(new_group)
    def new_group_of(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a group of Farandole, whatever backend is requested: one that follows the world where it has all
        workers."""
        backend = new_signature.bind(ranks, *args, **kwargs).arguments.get("backend")
        if ranks is None or len(ranks) == dist.get_world_size():
            group = new_group()
        else:
            registry.note_obstacle(f"the script has a process group of ranks {list(ranks)}, which do not stay the same")
            group = new_group(ranks, *args, **{**kwargs, "backend": None})
        if isinstance(group, FarandoleGroup):  # this process is in it
            requested[group] = _name_of(backend) if backend else requested[dist.group.WORLD]
        return group

    @functools.wraps(broadcast_objects)
    def broadcast_object_list(object_list: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the objects where a worker passes over code: it cannot know those of the source."""
        if not training.passes_over:
            training.notes.note_broadcast(_source(args, kwargs))
            broadcast_objects(object_list, *args, **kwargs)

    @functools.wraps(monitored)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Call the method of Farandole's group: torch's function refuses all groups but Gloo's."""
        if dist.get_rank(group) < 0:
            return  # this process is not in the group, as in torch's function
        limit = timeout if timeout is None or isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        chosen: Any = dist.group.WORLD if group is None else group
        chosen.monitored_barrier(limit, wait_all_ranks)

    theirs = distributed_c10d.get_backend

    @functools.wraps(theirs)
    def get_backend(group: Any = None) -> str:
        """Return the backend that the script has requested: scripts tell from it whether and how to train together."""
        return requested.get(dist.group.WORLD if group is None else group, theirs(group))

    dist.get_backend = get_backend  # type: ignore[assignment]  # not in distributed_c10d, whose functions need to know the real one
    for replacement in (init_process_group, destroy_process_group, broadcast_object_list, monitored_barrier):
        _replace_function(replacement)
    new_group_of.__name__ = "new_group"
    _replace_function(new_group_of)
    for name, place in (("all_gather", 1), ("all_gather_into_tensor", 1), ("gather", 0)):
        _replace_function(_noting(training.notes.note_gather, getattr(distributed_c10d, name), place))
    theirs_of_tensors = distributed_c10d.broadcast

    @functools.wraps(theirs_of_tensors)
    def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        training.notes.note_broadcast(_source(args, kwargs))
        return theirs_of_tensors(tensor, *args, **kwargs)

    _replace_function(broadcast)
    for theirs_too in (distributed_c10d.all_reduce, distributed_c10d.reduce):
        _replace_function(_noting(training.notes.note_reduction, theirs_too, 0))


def _noting(note: Callable[[torch.Tensor], None], theirs: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a collective of torch that tells the training which tensor it is given: the argument at this place."""

    @functools.wraps(theirs)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = [*args[place:], *(kwargs[name] for name in ("tensor", "input_tensor", "input") if name in kwargs)]
        if given and isinstance(given[0], torch.Tensor):
            note(given[0])
        return theirs(*args, **kwargs)

    return collective


def _source(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the rank that a collective of torch sends from, of its arguments behind the first one."""
    given = args[0] if args else kwargs.get("src", kwargs.get("group_src"))
    return given if isinstance(given, int) else 0


def _is_known(backend: str | None) -> bool:
    """Return whether torch knows the backend, or all backends of a list such as "cpu:gloo,cuda:nccl"."""
    names = [] if backend is None else [each.rpartition(":")[2] for each in backend.lower().split(",")]
    return all(name in dist.Backend.backend_list for name in names)


def _name_of(backend: str | None) -> str:
    """Return the name that torch's get_backend() has for a requested backend."""
    return backend.lower() if backend else "undefined"


def _replace_function(replacement: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed, whose names are those of distributed_c10d."""
    setattr(distributed_c10d, replacement.__name__, replacement)
    setattr(dist, replacement.__name__, replacement)


def _end_with_script(training: Training) -> None:
    """End the training with the script; not when it has failed: then the other workers continue without this one."""
    show = sys.excepthook

    def hook(*error: Any) -> None:
        training.abandon()
        show(*error)

    sys.excepthook = hook
    atexit.register(training.end)


# torch/utils/data/dataloader.py and torch/utils/data/distributed.py ---------------------------------------------------


def _replace_iteration(training: Training) -> None:
    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        ours = training.batches(self)
        return torchs_iterator(self) if ours is None else ours

    def length(self: DataLoader[Any]) -> int:
        """Return torch's length, and note that the script knows it."""
        batches = torchs_length(self)
        training.note_length(self, batches)
        return batches

    def set_epoch(self: DistributedSampler[Any], epoch: int) -> None:
        setattr(self, NUMBERED, True)
        theirs(self, epoch)

    theirs = DistributedSampler.set_epoch
    DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
    DataLoader.__len__ = length  # type: ignore[method-assign]
    DistributedSampler.set_epoch = set_epoch  # type: ignore[method-assign]

    save = torch.save

    @functools.wraps(save)
    def save_unless_passing(*args: Any, **kwargs: Any) -> None:
        """Write nothing while a worker passes over code, which it does with a state that is not the job's."""
        if not training.passes_over:
            save(*args, **kwargs)

    torch.save = save_unless_passing


# Constructors: torch/nn/parallel/distributed.py, torch/optim, torch/amp/grad_scaler.py --------------------------------


def _note_constructions(registry: Registry) -> None:
    _note(DistributedDataParallel, registry.parallel, factory("note of a wrapped module"))
    _note(AveragedModel, registry.averages)
    _note(torch.optim.Optimizer, registry.optimizers)
    _note(DataLoader, registry.loaders)
    # Those that consist of other schedulers do not call the constructor of their base (torch 2.13).
    for kind in (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler, torch.amp.GradScaler):
        _note(kind, registry.others)
    register_optimizer_step_pre_hook(_before_step)


def _note(kind: type[Any], noted: Noted[Any], further: Callable[[Any], None] | None = None) -> None:
    """Note each object of a class when it is constructed; call `further` with it."""
    construct = kind.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        construct(self, *args, **kwargs)
        noted.add(self)
        if further is not None:
            further(self)

    kind.__init__ = __init__


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _training is not None:
        _training.before_step(optimizer)
