"""Restoration of a job's state from a checkpoint: checked against the script's objects, then loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from farandole.base.checkpoints.folder import CheckpointFolder, Found
from farandole.errors import ConfigError, DataError
from farandole.training.checkpoint.file_format import read_files
from farandole.training.state.packing import unpack
from farandole.training.state.sync import Kept


def read_newest(folder: CheckpointFolder, warn: Callable[[str], None]) -> tuple[Found, Any]:
    """Return the newest checkpoint with undamaged files, and its value; `warn` is called for each one passed over.
    Raises ConfigError when there is none, OSError when the store cannot be read."""
    found, damaged = folder.complete()
    why = [each.why for each in damaged]
    for each in found:
        try:
            return each, read_files(each)
        except ConfigError as error:
            why.append(str(error))
            warn(f"{error}; using the previous checkpoint")
    raise ConfigError(
        f"{folder.store.place} has no checkpoint that can be read ({'; '.join(why) or 'it is empty'}); to start from "
        f"the beginning, give an empty folder"
    )


def restore(state: Kept, found: Found, value: Any, run_id: int) -> None:
    """Make the state that of the checkpoint, under a new run id. `state.capture()` was called before.

    value  result of read_files()

    Raises ConfigError, naming the checkpoint's value and the script's, when they do not fit together.
    """
    metadata, tensors = {**value["metadata"], "run_id": run_id}, value["tensors"]
    ours = unpack(state.captured())
    _check_parameters(found, state.live_tensors()["parameters"], tensors["parameters"])
    for what, saved, here in (
        ("tracked values", _names(metadata), _names(ours)),
        ("buffers", _shapes(metadata["buffers"]), _shapes(ours["buffers"])),
        ("optimizer options", _options(metadata["groups"]), _options(ours["groups"])),
    ):
        if saved != here:
            raise _other(found, what, saved, here)
    try:
        state.load_metadata(metadata)
    except DataError as error:
        raise ConfigError(f"the checkpoint {found.place} belongs to other data: {error}") from error
    state.load_tensors(tensors)


def _check_parameters(found: Found, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    here, saved = _shapes(ours), _shapes(theirs)
    for name in [*here, *saved]:
        if here.get(name) != saved.get(name):
            raise _other(found, f"parameter {name}", saved.get(name, "missing"), here.get(name, "missing"))


def _other(found: Found, what: str, saved: object, here: object) -> ConfigError:
    return ConfigError(
        f"the checkpoint {found.place} was written by another model or script. {what}: {saved} in the checkpoint, "
        f"{here} in this script; resume with the script that wrote it, or give an empty folder to start from the "
        f"beginning"
    )


def _names(metadata: Mapping[str, Any]) -> list[str]:
    return sorted([*metadata["stateful"], *metadata["values"]])


def _shapes(groups: Mapping[str, Any]) -> dict[str, str]:
    """Return shapes and dtypes by name, for people."""
    return {
        f"{name}.{key}": f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, group in groups.items()
        for key, tensor in group.items()
        if isinstance(tensor, torch.Tensor)
    }


def _options(groups: Any) -> list[list[str]]:
    """Return the names of the options of each parameter group, of one optimizer or of several by name."""
    if isinstance(groups, Mapping):
        return [[name, *options] for name, each in sorted(groups.items()) for options in _options(each)]
    return [sorted(group) for group in groups]
