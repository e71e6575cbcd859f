"""Send parameters, optimizer state and Python values from one rank to all, or from all to all. Scripts call these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from farandole.integrations.horovod.named.asynchronous import broadcast_async_
from farandole.integrations.horovod.named.operations import allgather, broadcast_
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.tensor_queue import synchronize
from farandole.training.collectives import world


def broadcast_parameters(params: Mapping[str, torch.Tensor] | Sequence[Any], root_rank: int) -> None:
    """Overwrite tensors with those of rank `root_rank`, in place.

    See the example of `broadcast_optimizer_state`.

    Args:
        params: A dict of tensors (`model.state_dict()`), or a list of tensors or of (name, tensor). Tensors are matched
            over ranks by name, and without a name by their place in the list.
        root_rank: The global rank whose tensors are sent.

    Raises:
        ValueError: `params` is none of these.
        HorovodInternalError: Ranks differ in shape or dtype.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [
            each if isinstance(each, tuple) and len(each) == 2 else (f"parameter.{place}", each)
            for place, each in enumerate(params)
        ]
    else:
        raise ValueError(
            f"broadcast_parameters takes a dict of tensors, or a list of tensors or (name, tensor), got "
            f"{type(params).__name__}; pass model.state_dict() or list(model.named_parameters())"
        )
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is a {type(tensor).__name__}, not a tensor")
    handles = [broadcast_async_(tensor.detach(), root_rank, name) for name, tensor in named]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the `obj` of rank `root_rank`, on every rank of the process set.

    Args:
        obj: The value; ranks other than the root may pass anything, None for example.
        root_rank: A global rank.
        name: Needed only when several threads broadcast at once.
        process_set: The ranks that take part.

    Returns:
        The root's `obj`.

    Raises:
        TypeError: The root's value cannot be pickled.
        HorovodInternalError: As from `allreduce`.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.broadcast_object({"seed": 3}, root_rank=0)
        {'seed': 3}
    """
    name = name or "broadcast_object"
    is_root = world.current().placement.rank == root_rank
    payload = _to_bytes(obj) if is_root else None
    length = torch.tensor([payload.numel() if payload is not None else 0], device="cpu")
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if payload is None:
        payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, f"{name}.bytes", process_set)
    return obj if is_root else _from_bytes(payload)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gather every rank's `obj`.

    Args:
        obj: The value of this rank.
        name: Needed only when several threads gather at once.

    Returns:
        The values of all ranks, by rank.

    Raises:
        TypeError: The value cannot be pickled.
        HorovodInternalError: As from `allreduce`.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.allgather_object({"rank": fd.rank()})  # on one worker
        [{'rank': 0}]
    """
    name = name or "allgather_object"
    payload = _to_bytes(obj)
    lengths = allgather(torch.tensor([payload.numel()], device="cpu"), f"{name}.length").tolist()
    gathered = allgather(payload, f"{name}.bytes")
    return [_from_bytes(piece) for piece in torch.split(gathered, lengths)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Make the optimizer's state and options (lr, betas, ...) those of rank `root_rank`, on every rank.

    State that only the root has is created, state that the root lacks is dropped; options keep their Python types. No
    step is taken, so no parameter moves (Horovod takes a real step to create the state and moves a joining worker by
    one learning rate). Where the root has no state yet, parameters that require gradients are left with gradients of
    zeros, as in Horovod.

    Args:
        optimizer: The optimizer to overwrite.
        root_rank: The global rank whose state is sent.
        model: Unused; part of Horovod's signature.

    Raises:
        ValueError: The optimizer is LBFGS, or the optimizers differ in parameters or groups.
        HorovodInternalError: As from `allreduce`.

    Examples:
        >>> fd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> fd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "cannot broadcast the state of torch.optim.LBFGS: its state belongs to all parameters together; "
            "broadcast_object(optimizer.state_dict()) and load_state_dict() copy it as a whole"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    _refuse_other_optimizers(allgather_object(shapes, "optimizer.shapes"))
    outline = broadcast_object(_outline(optimizer, parameters), root_rank, "optimizer.outline")
    for group, options in zip(optimizer.param_groups, outline.options, strict=True):
        for key, value in options.items():
            _set(group, key, value)
    tensors = _follow(outline, optimizer, parameters)
    broadcast_parameters(tensors, root_rank)
    if not outline.states and not isinstance(optimizer, torch.optim.SparseAdam):  # SparseAdam refuses dense gradients
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor of the state, which is sent separately."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class _Outline:
    """The description that a root sends of its optimizer before the tensors.

    Attributes:
        options: Those of each parameter group, without the parameters.
        states: By index of the parameter over all groups, with a _Place for each tensor.
    """

    options: list[dict[str, Any]]
    states: dict[int, dict[Any, Any]]


def _outline(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> _Outline:
    # On the CPU: another rank may not have the device of a tensor.
    options = [
        {
            key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]
    states = {
        index: {key: _placed(value) for key, value in optimizer.state[parameter].items()}
        for index, parameter in enumerate(parameters)
        if parameter in optimizer.state
    }
    return _Outline(options, states)


def _placed(value: Any) -> Any:
    return _Place(value.shape, value.dtype, value.device.type) if isinstance(value, torch.Tensor) else value


def _refuse_other_optimizers(by_rank: list[list[list[tuple[int, ...]]]]) -> None:
    """Raise on every rank, or on none: a rank that went on alone would wait for ever."""
    for rank, shapes in enumerate(by_rank):
        if shapes != by_rank[0]:
            raise ValueError(
                f"broadcast_optimizer_state: rank {rank}'s optimizer has parameters of shapes {shapes} by group, "
                f"rank 0's {by_rank[0]}; build the same optimizer on every rank"
            )


def _follow(
    outline: _Outline, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Give the state the root's structure. Return the tensors to be overwritten, in the same order on all ranks."""
    tensors = []
    for index, parameter in enumerate(parameters):
        wanted = outline.states.get(index)
        if wanted is None:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for key in set(state) - set(wanted):
            del state[key]
        for key, value in wanted.items():
            if not isinstance(value, _Place):
                state[key] = value
                continue
            if _placed(state.get(key)) != value:
                state[key] = _room(value, parameter)
            tensors.append((f"optimizer.{index}.{key}", state[key]))
    return tensors


def _room(place: _Place, parameter: torch.Tensor) -> torch.Tensor:
    """Return memory for one tensor of the state: beside the parameter, or on the CPU (a step counter)."""
    device = parameter.device if parameter.device.type == place.device_type else torch.device("cpu")
    if place.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=place.dtype, device=device, requires_grad=False)
    return torch.empty(place.shape, dtype=place.dtype, device=device)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option. A learning rate may be a tensor that a captured graph reads, so that object is kept."""
    current = group.get(key)
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.shape == value.shape:
        current.detach().copy_(value)
    else:
        group[key] = value


def _to_bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _from_bytes(payload: torch.Tensor) -> Any:
    return cloudpickle.loads(payload.numpy().tobytes())
