"""A checkpoint's files: written from a value, and read back to an equal one. checkpoint_writer.py writes them,
restore.py reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from farandole.checkpoint.folder import Found, write_file
from farandole.checkpoint.json_values import from_json
from farandole.checkpoint.manifest import FileSum
from farandole.checkpoint.store import Store
from farandole.checkpoint.tensor_file import read_tensors, write_tensors
from farandole.errors import ConfigError

STATE, TENSORS = "state.json", "tensors.safetensors"


def write_files(
    store: Store,
    name: str,
    plain: Any,
    tensors: Mapping[str, torch.Tensor],
    check: Callable[[], None] = lambda: None,
) -> dict[str, FileSum]:
    """Write the result of json_values.to_json() into the folder `name`. When this returns, it survives a power failure.
    `check` may raise at any call to give up. Raises OSError."""
    text = json.dumps(plain, indent=1, allow_nan=False).encode()
    return {
        STATE: write_file(store, f"{name}/{STATE}", text),
        TENSORS: write_tensors(store, f"{name}/{TENSORS}", tensors, check),
    }


def read_files(found: Found) -> Any:
    """Return the value. Raises ConfigError when a file is missing or damaged."""
    store, name, files = found.store, found.name, found.manifest.files
    try:
        text = store.read(f"{name}/{STATE}")
        if FileSum.of(text) != files[STATE]:
            raise ConfigError(f"{found.place}/{STATE} is not as it was written")
        return from_json(json.loads(text), read_tensors(store, f"{name}/{TENSORS}", files[TENSORS]))
    except (ConfigError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the checkpoint {found.place} cannot be read: {error}") from error
