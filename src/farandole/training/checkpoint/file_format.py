"""A checkpoint's files: written from a value, and read back to an equal one. checkpoint_writer.py writes them,
restore.py reads them.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, BinaryIO

import msgspec
import torch

from farandole.base.checkpoints.folder import Found, write_file
from farandole.base.checkpoints.manifest import FileSum
from farandole.base.checkpoints.store import Store
from farandole.errors import ConfigError
from farandole.training.checkpoint.snapshot import from_json
from farandole.training.collectives.connection_pair import as_bytes, byte_view, bytes_of

STATE, TENSORS = "state.json", "tensors.safetensors"


def write_files(
    store: Store,
    name: str,
    plain: Any,
    tensors: Mapping[str, torch.Tensor],
    check: Callable[[], None] = lambda: None,
) -> dict[str, FileSum]:
    """Write the result of to_json() (snapshot.py) into the folder `name`. When this returns, it survives a power
    failure. `check` may raise at any call to give up. Raises OSError."""
    text = json.dumps(plain, indent=1, allow_nan=False).encode()
    return {
        STATE: write_file(store, f"{name}/{STATE}", [text]),
        TENSORS: write_tensors(store, f"{name}/{TENSORS}", tensors, check),
    }


def read_files(found: Found) -> Any:
    """Return the value. Raises ConfigError when a file is missing or damaged."""
    store, name, files = found.store, found.name, found.manifest.files
    try:
        text = store.read(f"{name}/{STATE}")
        if FileSum.of(text) != files[STATE]:
            raise ConfigError(f"{found.place}/{STATE} is damaged: its checksum differs from the manifest")
        return from_json(json.loads(text), read_tensors(store, f"{name}/{TENSORS}", files[TENSORS]))
    except Exception as error:  # data of any kind may be in the place of what was written
        raise ConfigError(f"the checkpoint {found.place} cannot be read: {error}") from error


# The file of tensors: the safetensors format --------------------------------------------------------------------------
#
# The format is a length, a JSON header, and raw memory, without any code. It is written here rather than by the
# safetensors package, in slices: training continues in between, a checksum is computed on the way, and the write can
# be aborted.
#
# https://github.com/huggingface/safetensors#format

_LENGTH = struct.Struct("<Q")
_HEADER_LIMIT = 100 << 20  # the format's own
_SLICE_BYTES = 1 << 22

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_EXACT = "farandole.dtype."  # + name: of a tensor whose dtype the format lacks; its bytes are stored as U8


def write_tensors(
    store: Store, name: str, tensors: Mapping[str, torch.Tensor], check: Callable[[], None] = lambda: None
) -> FileSum:
    """Write a new file; contiguous CPU tensors are written directly from their memory.

    check  called before each slice of 4 MB; may raise, to give up

    Raises OSError when there is no space; the part written until then is left behind.
    """
    return write_file(store, name, _slices(tensors, check))


def read_tensors(store: Store, name: str, expected: FileSum) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, each with memory of its own. Raises ConfigError when the file differs from the
    written one, OSError when it cannot be read."""
    path, size = f"{store.place}/{name}", store.size(name)
    if size is None:
        raise FileNotFoundError(f"{path} does not exist")
    with store.open(name) as file:
        if size != expected.size_bytes:
            raise ConfigError(f"{path} has {size} bytes, expected {expected.size_bytes}")
        prefix = bytes(_read_exactly(file, path, bytearray(_LENGTH.size)))
        (length,) = _LENGTH.unpack(prefix)
        if length > min(size - len(prefix), _HEADER_LIMIT):
            raise ConfigError(f"{path} is damaged: its header states a length of {length} bytes")
        text = _read_exactly(file, path, bytearray(length))
        crc = zlib.crc32(text, zlib.crc32(prefix))
        tensors = {}
        for key, dtype, shape in _layout(bytes(text), size - len(prefix) - length, path):
            tensors[key] = torch.empty(shape, dtype=dtype, device="cpu")
            crc = zlib.crc32(_read_exactly(file, path, byte_view(as_bytes(tensors[key]))), crc)
    if crc != expected.crc32:
        raise ConfigError(f"{path} is damaged: its checksum is {crc:08x}, expected {expected.crc32:08x}")
    return tensors


def _slices(tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> Iterator[bytes | memoryview]:
    # Large elements first: all of them are aligned then.
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    yield _header(tensors, keys)
    for key in keys:
        memory = byte_view(bytes_of(tensors[key].detach().cpu()))
        for start in range(0, len(memory), _SLICE_BYTES):
            check()
            yield memory[start : start + _SLICE_BYTES]


def _header(tensors: Mapping[str, torch.Tensor], names: list[str]) -> bytes:
    header: dict[str, object] = {}
    exact: dict[str, str] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        dtype, shape, size = _NAMES.get(tensor.dtype), list(tensor.shape), tensor.numel() * tensor.element_size()
        if dtype is None:
            exact[_EXACT + name] = str(tensor.dtype).removeprefix("torch.")
            dtype, shape = "U8", [*shape, tensor.element_size()]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    if exact:
        header["__metadata__"] = exact
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


def _layout(header: bytes, data_bytes: int, path: str) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return name, dtype and shape of each tensor of a header, in the order of their bytes, of which there are
    `data_bytes`.

    The checksum is known only after the tensors have been read. So memory is not allocated as a damaged header says.
    Raises ConfigError, or ValueError, for such a header.
    """
    entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    exact = msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str])
    found = [(key, msgspec.json.decode(each, type=_Entry)) for key, each in entries.items()]
    layout = []
    end = 0
    for key, entry in sorted(found, key=lambda item: item[1].data_offsets):
        name, shape = exact.get(_EXACT + key), entry.shape
        dtype = _DTYPES.get(entry.dtype) if name is None else getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{path} is damaged: the dtype of {key} is {name or entry.dtype!r}")
        nbytes = math.prod(shape) * (dtype.itemsize if name is None else 1)
        if (end, end + nbytes) != entry.data_offsets or (name is not None and shape[-1:] != [dtype.itemsize]):
            raise ConfigError(f"{path} is damaged: {key} has shape {shape} in bytes {entry.data_offsets}")
        layout.append((key, dtype, shape if name is None else shape[:-1]))
        end += nbytes
    if end != data_bytes:
        raise ConfigError(f"{path} is damaged: its header describes {end} of {data_bytes} bytes")
    return layout


def _read_exactly(file: BinaryIO, path: str, room: bytearray | memoryview) -> memoryview:
    rest = memoryview(room)
    while len(rest):
        count = file.readinto(rest)  # type: ignore[attr-defined]  # a raw file
        if not count:
            raise ConfigError(f"{path} is truncated")
        rest = rest[count:]
    return memoryview(room)
