"""Tensors in shared memory are known as such as long as their memory is theirs, and no longer."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from farandole.training.collectives import shared_memory_tensors

pytestmark = pytest.mark.core


def test_a_tensor_is_forgotten_before_its_memory_is_unmapped() -> None:
    """Another thread may be given the same address as soon as it is."""
    tensor = shared_memory_tensors.shareable_zeros(100_000, torch.float32)
    assert shared_memory_tensors.find_segment(tensor) is not None
    address = tensor.untyped_storage().data_ptr()
    views = (each for each in gc.get_objects() if isinstance(each, memoryview) and each.nbytes == tensor.nbytes)
    mapping = next(each.obj for each in views if isinstance(each.obj, ctypes.Array))
    known = []
    # The newest callback of an object is called first: right before the one that unmaps it.
    weakref.finalize(mapping, lambda: known.append(address in shared_memory_tensors._segment_refs))
    del mapping, views, tensor
    gc.collect()
    assert known == [False]
