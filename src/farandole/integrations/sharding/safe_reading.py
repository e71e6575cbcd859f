"""Reading of a sharded checkpoint without running what is in it. pieces.py uses it.

DCP's own reader unpickles the file `.metadata` and every value that is not a tensor, so that whoever may write into the
folder runs code in each worker: read_metadata() of torch/distributed/checkpoint/filesystem.py (torch 2.13), and
load_bytes() of torch/distributed/checkpoint/default_planner.py. Here the metadata may consist of DCP's own types only,
and values are read as by torch.load(weights_only=True): objects of the user's classes only where the script has asked
for that, with torch.serialization.add_safe_globals().
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from farandole.errors import ConfigError

_TYPES_OF_METADATA = {
    (metadata.__name__, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (filesystem.__name__, "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}

# Whatever the bytes of a damaged pickle make its reader call (CPython, Lib/pickle.py).
_ERRORS_OF_PICKLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
)

_ZIP = b"PK"  # the beginning of what torch.save() writes


class SafeReader(FileSystemReader):
    """Reads the files of a checkpoint of DCP in a folder. Raises ConfigError for metadata that DCP does not write."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Here, on each rank: DCP itself passes over an error of read_metadata(), and reports another one.
        self._metadata = _read_metadata(folder / ".metadata")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = self._metadata
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
    except _ERRORS_OF_PICKLE as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ConfigError(f"{path} cannot be read: it is not the metadata of a checkpoint of DCP")
    for stored in found.storage_data.values():
        name = str(stored.relative_path)
        if name in ("", ".", "..") or name != PurePath(name).name:
            raise ConfigError(f"{path} names the file {name!r}, which is not in the folder of the checkpoint")
    return found


class SafePlanner(DefaultLoadPlanner):
    """Loads values that are not tensors, such as the options of an optimizer, as torch.load(weights_only=True) does."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        checked = io.BytesIO()
        torch.save(_load(value.read(), f"the value {name}"), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TYPES_OF_METADATA:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # as Python 3.11.0 to 3.11.3 write members of an Enum
            return _member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it would call {module}.{name}, which is no part of the metadata of a checkpoint")


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(
            f"it would read {name} of {kind!r}, which is no part of the metadata of a checkpoint"
        )
    return kind[name]


# The values of a state, in one entry of the checkpoint ----------------------------------------------------------------


def pack_values(values: dict[str, Any]) -> bytes:
    """Return the values as bytes. Raises ConfigError for an object that unpack_values() would not load."""
    file = io.BytesIO()
    torch.save(values, file)
    unpack_values(file.getvalue())
    return file.getvalue()


def unpack_values(packed: bytes) -> dict[str, Any]:
    """Return the values again. Raises ConfigError for objects of classes that the script has not declared as safe."""
    if packed.startswith(_ZIP):
        found = _load(packed, "the values of the state")
    else:  # of a checkpoint that an earlier version wrote
        try:
            found = _PlainUnpickler(io.BytesIO(packed)).load()
        except ConfigError:
            raise
        except _ERRORS_OF_PICKLE as error:
            raise ConfigError(f"the values of the state in the checkpoint are damaged: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"the values of the state are a {type(found).__name__} in the checkpoint, not a dictionary")
    return found


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, None, and lists, tuples, sets and dictionaries of them."""

    def find_class(self, module: str, name: str) -> Any:
        raise ConfigError(
            f"the values of the state in the checkpoint contain {module}.{name}, and an earlier version wrote it in a "
            f"way in which it cannot be checked: it is not loaded, since that can run any code"
        )


def _load(data: bytes, what: str) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "it is damaged")
        raise ConfigError(
            f"{what} cannot be loaded from a checkpoint without running code of its own: {reason}. Use plain Python "
            f"values and tensors; or name the classes of your objects, in each process before the state is made: "
            f"torch.serialization.add_safe_globals([...])"
        ) from error
