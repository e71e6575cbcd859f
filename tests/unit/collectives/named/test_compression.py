"""Compression: what is sent, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.training.optim.compression import Compression

pytestmark = pytest.mark.core

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", FLOATING + OTHERS)
def test_none_gives_the_tensor_itself(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    sent, ctx = Compression.none.compress(tensor)
    assert sent is tensor
    assert Compression.none.decompress(sent, ctx) is tensor


@pytest.mark.parametrize(
    ("compressor", "wire"), [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)]
)
@pytest.mark.parametrize("dtype", FLOATING)
def test_floating_point_is_sent_in_16_bits_and_comes_back_as_it_was(
    compressor: Any, wire: torch.dtype, dtype: torch.dtype
) -> None:
    tensor = torch.tensor([1.0, -2.5, 0.0], dtype=dtype)
    sent, ctx = compressor.compress(tensor)
    assert sent.dtype == wire
    back = compressor.decompress(sent, ctx)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("dtype", OTHERS)
def test_other_dtypes_pass(compressor: Any, dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    sent, ctx = compressor.compress(tensor)
    assert sent is tensor
    assert torch.equal(compressor.decompress(sent, ctx), tensor)


def test_a_script_may_subclass_one_of_them() -> None:
    class Doubled(Compression.none):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor * 2, None

    sent, ctx = Doubled.compress(torch.ones(2))
    assert torch.equal(Doubled.decompress(sent, ctx), torch.full((2,), 2.0))
