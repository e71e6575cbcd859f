"""A worker's piece of a sharded model and its optimizer: taken out of them, put into others that are divided in another
way, and stored in a folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from farandole.errors import ConfigError, FarandoleError
from farandole.integrations.horovod.named.objects import broadcast_object
from farandole.integrations.sharding.file_sums import damage, write_sums
from farandole.integrations.sharding.safe_reading import SafePlanner, SafeReader, pack_values, unpack_values
from farandole.integrations.sharding.shard_plan import ShardPlan, rows
from farandole.integrations.torchrun.process_group.works import failure
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport

logger = logging.getLogger("farandole")

TensorKey = tuple[str, str]
"""Key of a tensor: a parameter's name, and the name of a tensor of its optimizer state; "" for the parameter itself."""


@dataclass(frozen=True)
class Piece:
    """A copy of one worker's piece.

    shards  this worker's part of the divided tensors
    whole   the part that is equal on every worker: parameters that are not divided, buffers, the rest of the
            optimizer's state, and the dtypes of the shards
    """

    shards: dict[TensorKey, torch.Tensor]
    whole: dict[str, Any]


def take(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Piece:
    """Return a copy of this worker's piece. Raises ConfigError where the optimizer has parameters that the model
    lacks."""
    divide(model)
    shards: dict[TensorKey, torch.Tensor] = {}
    plain: dict[TensorKey, Any] = {}
    for key, value in _entries(model, optimizer):
        if isinstance(value, DTensor):
            shards[key] = value.to_local().detach().clone(memory_format=torch.contiguous_format)
        else:
            plain[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    whole = {
        "types": {key: value.dtype for key, value in shards.items()},
        "plain": plain,
        "buffers": {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }
    return Piece(shards, whole)


def divide(model: torch.nn.Module) -> None:
    """Reshard the model: after a forward pass without a backward pass FSDP leaves whole parameters in place of the
    shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def put_whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
    """Load the part that is equal on every worker, and allocate the optimizer's shards.

    Raises ConfigError where the model has other parameters than the one from which `whole` was taken.
    """
    parameters = dict(model.named_parameters())
    known = {name for name, _ in [*whole["types"], *whole["plain"]]}
    if known != set(parameters):
        raise ConfigError(
            f"the parameters of the model differ from those of the last commit: {sorted(known ^ set(parameters))[:5]} "
            f"exist in only one of them; every worker must always build the same model"
        )
    with torch.no_grad():
        for (name, key), value in whole["plain"].items():
            if key:
                optimizer.state[parameters[name]][key] = deepcopy(value)
            else:
                parameters[name].copy_(value)
        for name, buffer in model.named_buffers():
            buffer.copy_(whole["buffers"][name])
        for (name, key), dtype in whole["types"].items():
            if key:
                optimizer.state[parameters[name]][key] = torch.zeros_like(parameters[name].detach(), dtype=dtype)
    for group, saved in zip(optimizer.param_groups, whole["groups"], strict=True):
        group.update(deepcopy(saved))


def put_shards(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    mine: dict[int, dict[TensorKey, torch.Tensor]],
    plan: ShardPlan,
    awaited: set[int],
    place: tuple[int, int],
    transport: Transport,
) -> None:
    """Load the shards. A collective, after put_whole(): one shard of one tensor after the other is broadcast from its
    source, and each rank keeps the part that it needs. A rank has at most one shard of one tensor in memory besides its
    own.

    mine     the shards of the plan's commit that this rank holds, by their number
    awaited  shards that have to be broadcast
    place    number of this rank's new shard, and the number of shards
    """
    live = {key: value for key, value in _entries(model, optimizer) if isinstance(value, DTensor)}
    with torch.no_grad():
        for key, value in live.items():
            dim = _divided_dimension(key, value)
            local, length = value.to_local(), value.shape[dim]
            start, stop = rows(length, *place)
            if local.shape[dim] != stop - start:
                raise ConfigError(
                    f"{key[0]}: this worker has {local.shape[dim]} of {length} rows, where shard {place[0]} of "
                    f"{place[1]} has {stop - start}; use the mesh that is passed to build()"
                )
            for index, source in enumerate(plan.sources):
                first, last = rows(length, index, plan.count)
                if first == last:
                    continue
                if index in awaited:
                    shape = list(value.shape)
                    shape[dim] = last - first
                    part = mine[index][key] if transport.rank == source else local.new_empty(shape)
                    transport.broadcast(part, source)
                elif index == place[0]:
                    part = mine[index][key]
                else:
                    continue
                low, high = max(start, first), min(stop, last)
                if low < high:
                    local.narrow(dim, low - start, high - low).copy_(part.narrow(dim, low - first, high - low))


def _entries(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[TensorKey, Any]]:
    """Yield parameters and the optimizer's tensors for each, in an order that is equal on all ranks."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        yield (name, ""), parameter
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model does not have: "
                    f"create it after fully_shard(), from model.parameters()"
                )
            for key in sorted(optimizer.state.get(parameter, {})):
                yield (names[parameter], key), optimizer.state[parameter][key]


def _divided_dimension(key: TensorKey, value: DTensor) -> int:
    """Return the dimension in which a tensor is divided. Of the mesh's two dimensions the first replicates and the
    second divides."""
    placement = value.placements[-1]
    if len(value.placements) != 2 or not placement.is_shard() or not value.placements[0].is_replicate():
        raise ConfigError(
            f"{key[0]}: placements {value.placements} are not (Replicate, Shard): pass the whole mesh of build() to "
            f"fully_shard()"
        )
    return int(placement.dim)  # type: ignore[attr-defined]


# Storage of a sharded state in a folder, by torch's distributed checkpoints (DCP) -------------------------------------
#
# Any number of workers can read it, whatever number wrote it.

_COMPLETE = ".metadata"  # DCP writes it last
_KEPT = 2


def write_stored(
    folder: Path, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]
) -> None:
    """Write the state as folder/number-generation; of the older ones all but the newest are removed. A collective.

    Raises ConfigError for values that read_stored() would not load.
    """
    here = world.current()
    packed = pack_values(values)
    divide(model)
    with _type_of_errors():
        parameters, moments = get_state_dict(model, optimizer)
        # As bytes: DCP divides containers, and reads only the parts of them that the reader has already.
        state = {"model": parameters, "optimizer": moments, "number": number, "values": packed}
        path = folder / f"{number:010d}-{here.id.number:06d}"
        save(state, checkpoint_id=path)
    write_sums(path, here.placement.rank, here.transport)
    if here.placement.rank == 0:
        for old in _complete(folder)[:-_KEPT]:
            shutil.rmtree(old)


def newest_stored(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint, alike on all ranks; rank 0 warns of each one passed over. A collective.

    Raises ConfigError if all checkpoints are damaged.
    """
    here = world.current()
    found = _complete(folder)[::-1] if here.placement.rank == 0 else []
    wrong: list[str] = []
    for path in map(Path, broadcast_object(found, 0, "sharding.newest")):
        wrong = damage(path, here.transport)
        if not wrong:
            return path
        if here.placement.rank == 0:
            logger.warning("the checkpoint %s cannot be read: %s; using the previous checkpoint", path, wrong[0])
    if wrong:
        raise ConfigError(
            f"{folder} has no checkpoint that can be read ({wrong[0]}); to start from the beginning, give an empty "
            f"folder"
        )
    return None


def read_stored(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint into the model and the optimizer. Returns the number and the values with which it was written.
    A collective.

    Raises:
        ConfigError: The checkpoint is damaged, or has objects whose classes the script has not declared as safe.
    """
    divide(model)
    with _type_of_errors():
        parameters, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": parameters, "optimizer": moments, "number": 0, "values": b""}
        load(state, storage_reader=SafeReader(path), planner=SafePlanner())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["number"], unpack_values(state["values"])


def _complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{_COMPLETE}"))


@contextmanager
def _type_of_errors() -> Iterator[None]:
    """Return a context that raises the original error of a collective, or of safe_reading.py. DCP replaces it by an
    error of its own, not even an Exception, and the run loop needs the type."""
    try:
        yield
    except BaseException as error:
        lost: FarandoleError | None = failure()
        if lost is None and isinstance(error, CheckpointException):
            lost = next((each for each, _ in error.failures.values() if isinstance(each, FarandoleError)), None)
        if lost is None or lost is error:
            raise
        raise lost from error
