"""Storage of a sharded state in a folder, by torch's distributed checkpoints (DCP). Any number of workers can read it,
whatever number wrote it. sharded_state.py uses it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from farandole.collectives import world
from farandole.collectives.named.objects import broadcast_object
from farandole.process_group import failure
from farandole.sharding import pieces

_COMPLETE = ".metadata"  # DCP writes it last
_KEPT = 2


def write(
    folder: Path, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]
) -> None:
    """Write the state as folder/number-generation; of the older ones all but the newest are removed. A collective."""
    here = world.current()
    pieces.divide(model)
    with _type_of_errors():
        parameters, moments = get_state_dict(model, optimizer)
        # As bytes: DCP divides containers, and reads only the parts of them that the reader has already.
        state = {"model": parameters, "optimizer": moments, "number": number, "values": pickle.dumps(values)}
        save(state, checkpoint_id=folder / f"{number:010d}-{here.id.number:06d}")
    if here.placement.rank == 0:
        for old in _complete(folder)[:-_KEPT]:
            shutil.rmtree(old)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint, alike on all ranks. A collective."""
    found = _complete(folder)[-1:] if world.current().placement.rank == 0 else []
    for path in broadcast_object(found, 0, "sharding.newest"):
        return Path(path)
    return None


def read(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint into the model and the optimizer. Returns the number and the values with which it was written.
    A collective."""
    pieces.divide(model)
    with _type_of_errors():
        parameters, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": parameters, "optimizer": moments, "number": 0, "values": b""}
        load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["number"], pickle.loads(state["values"])


def _complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{_COMPLETE}"))


@contextmanager
def _type_of_errors() -> Iterator[None]:
    """Return a context that raises the original error of a collective. DCP replaces it by an error of its own, not
    even an Exception, and the run loop needs the type."""
    try:
        yield
    except BaseException as error:
        lost = failure()
        if lost is None or lost is error:
            raise
        raise lost from error
