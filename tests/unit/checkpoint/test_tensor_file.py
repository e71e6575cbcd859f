"""Tensors in files: exact, checked, in a format that others read too."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from farandole.base.checkpoints.manifest import FileSum
from farandole.base.checkpoints.store import LocalStore
from farandole.errors import ConfigError
from farandole.training.checkpoint.file_format import read_tensors, write_tensors

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"of.{dtype}": (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    return {
        **tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "complex": torch.complex(torch.ones(2), torch.zeros(2)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_every_tensor_comes_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = some_tensors()
    written = write_tensors(LocalStore(tmp_path), "file", tensors)
    back = read_tensors(LocalStore(tmp_path), "file", written)
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor.detach()), name


def test_the_file_is_laid_out_as_the_format_says(tmp_path: Path) -> None:
    write_tensors(LocalStore(tmp_path), "file", {"b": torch.tensor([1, 2], dtype=torch.int8), "a": torch.tensor([1.5])})
    data = (tmp_path / "file").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length]) == {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "I8", "shape": [2], "data_offsets": [4, 6]},
    }
    assert data[8 + length :] == struct.pack("<f", 1.5) + b"\x01\x02"


def test_a_changed_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = write_tensors(LocalStore(path.parent), path.name, some_tensors())
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged: its checksum"):
        read_tensors(LocalStore(path.parent), path.name, written)


def test_a_file_that_is_too_short_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = write_tensors(LocalStore(path.parent), path.name, some_tensors())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="expected"):
        read_tensors(LocalStore(path.parent), path.name, written)
    path.write_bytes(b"\xff" * 8)
    with pytest.raises(ConfigError, match="header states a length"):
        read_tensors(LocalStore(path.parent), path.name, FileSum(8, 0))


def test_a_writer_that_is_told_to_give_up_does_so_between_two_slices(tmp_path: Path) -> None:
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_tensors(LocalStore(tmp_path), "file", {"large": torch.zeros(5 << 20)}, check)
    assert (tmp_path / "file").stat().st_size < 9 << 20


@pytest.fixture
def small_disk() -> Iterator[None]:
    """As if there were room for 64 KiB in a file: the kernel refuses more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_disk")
def test_no_room_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="large"):
        write_tensors(LocalStore(tmp_path), "file", {"large": torch.zeros(1 << 16)})
