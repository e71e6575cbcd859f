"""A checkpoint's files: one value in, the same value out. writer.py writes them, restore.py reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from farandole.checkpoint.folder import Found, write_file
from farandole.checkpoint.manifest import FileSum
from farandole.checkpoint.tensor_file import read_tensors, write_tensors
from farandole.checkpoint.values import from_json
from farandole.errors import ConfigError

STATE, TENSORS = "state.json", "tensors.safetensors"


def write_files(
    path: Path, plain: Any, tensors: Mapping[str, torch.Tensor], check: Callable[[], None] = lambda: None
) -> dict[str, FileSum]:
    """What values.to_json() has made of a value, into the folder `path`; on the disk when this returns. `check` may
    raise now and then to give up. Raises OSError."""
    text = json.dumps(plain, indent=1, allow_nan=False).encode()
    return {STATE: write_file(path / STATE, text), TENSORS: write_tensors(path / TENSORS, tensors, check)}


def read_files(found: Found) -> Any:
    """The value. Raises ConfigError, saying what to do, when a file is missing or damaged."""
    try:
        text = (found.path / STATE).read_bytes()
        if FileSum.of(text) != found.manifest.files[STATE]:
            raise ConfigError(f"{found.path / STATE} is not as it was written")
        tensors = read_tensors(found.path / TENSORS, found.manifest.files[TENSORS])
        return from_json(json.loads(text), tensors)
    except (ConfigError, OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the checkpoint {found.path} cannot be read: {error}; move it away to go on from the one before"
        ) from error
