"""Memory of one process that others read."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farandole.training.collectives.shared_memory_tensors import (
    OtherTensors,
    TensorRef,
    create_segment,
    create_tensor,
    find_segment,
    open_segment,
    shareable_zeros,
)


def test_another_process_reads_what_is_written_and_cannot_write() -> None:
    memory, ref, _ = create_segment(4096)
    memory[:5] = b"hello"
    script = f"""
from farandole.training.collectives.shared_memory_tensors import SegmentRef, open_segment
theirs = open_segment(SegmentRef{tuple(ref)})
print(bytes(theirs[:5]).decode())
try:
    theirs[0] = 1
except TypeError as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["hello", "refused"]
    assert memory[:5] == b"hello"


def test_a_place_survives_packing() -> None:
    ref = TensorRef(create_segment(1).ref, 3, 1)
    assert TensorRef.unpack(memoryview(ref.pack())) == ref


def test_a_descriptor_that_is_another_file_by_now_is_not_taken_for_the_segment(tmp_path: Path) -> None:
    segment = create_segment(1)
    with (
        (tmp_path / "other").open("wb") as other,
        pytest.raises(FileNotFoundError, match="no longer its shared memory segment"),
    ):
        open_segment(segment.ref._replace(descriptor=other.fileno()))


def test_where_no_segment_can_be_had_tensors_are_ordinary_ones() -> None:
    script = """
import resource, torch
from farandole.training.collectives.shared_memory_tensors import create_segment
from farandole.training.collectives.shared_memory_tensors import shareable_zeros, find_segment
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
tensor = shareable_zeros(1 << 20, torch.float32)
print(tensor.numel(), find_segment(tensor))
try:
    create_segment(4 << 20)
except OSError as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(1 << 20), "None", "refused"]


def test_a_tensor_takes_its_memory_and_its_descriptor_with_it() -> None:
    gc.collect()  # what other tests have left has descriptors, too
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        tensor = shareable_zeros(100_000, torch.float32)
        view = tensor[10:20]
        assert find_segment(view) == (find_segment(tensor)[0], 40)  # type: ignore[index]
        del tensor, view
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mapping_keeps_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    own = create_segment(4096)
    assert len(os.listdir("/proc/self/fd")) == before + 1, "its own, by which others open it"
    theirs = open_segment(own.ref)
    own.hide()
    assert len(os.listdir("/proc/self/fd")) == before
    own.memory[:5] = b"hello"
    assert bytes(theirs[:5]) == b"hello"
    with pytest.raises(FileNotFoundError):
        open_segment(own.ref)


def test_memory_is_unmapped_with_the_last_view_of_it() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:farandole ")

    before, own = mapped(), create_segment(1 << 20)
    theirs = open_segment(own.ref)
    part = theirs[10:20]
    assert mapped() == before + 2
    del own
    gc.collect()
    assert mapped() == before + 1
    del theirs
    gc.collect()
    assert bytes(part) == bytes(10), "still there"
    del part
    gc.collect()
    assert mapped() == before


def test_small_tensors_are_ordinary_ones() -> None:
    assert find_segment(shareable_zeros(10, torch.float32)) is None
    assert find_segment(torch.zeros(1_000_000)) is None


def test_others_tensors_are_opened_once_and_forgotten_in_time() -> None:
    others, kept = OtherTensors(), [create_tensor(4096) for _ in range(70)]
    for each in kept:
        ref, _ = find_segment(each) or pytest.fail("not shared")
        each.fill_(7)
        assert others.find(ref) is others.find(ref)
        assert bool((others.find(ref) == 7).all())
    assert len(others._opened) == 64
