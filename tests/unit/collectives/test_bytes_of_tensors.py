"""The bytes of a tensor, whatever its strides, its dtype, and what torch has postponed for it."""

from __future__ import annotations

import pytest
import torch

from farandole.training.collectives.connection_pair import as_bytes, byte_view, bytes_of, flat_view

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    whole = torch.arange(24).reshape(2, 3, 4).to(dtype)
    return [
        whole,
        whole.transpose(0, 2),
        whole[:, ::2],
        whole[:1, 1, 2],  # one element, with a stride
        whole[1:, :1, 3:],
        whole[0, 0, :1].expand(3),
        whole[0, 0, 0],
        whole[:0],
        whole[:, :0, ::2],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_are_those_of_its_values_in_their_logical_order(dtype: torch.dtype) -> None:
    for tensor in tensors(dtype):
        plain = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        expected = (plain.view(torch.int16) if dtype is torch.bfloat16 else plain).numpy().tobytes()
        assert bytes(byte_view(bytes_of(tensor))) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_are_its_own_memory_where_it_is_contiguous(dtype: torch.dtype) -> None:
    for tensor in tensors(dtype):
        if tensor.is_contiguous():
            as_bytes(tensor).zero_()
            assert not tensor.any()


def test_one_element_with_a_stride_is_flat_memory() -> None:
    column = torch.tensor([[2.0, 3.0]])[:, 1]
    flat = flat_view(column)
    assert flat.stride() == (1,)
    flat.fill_(5)
    assert column.tolist() == [5]


def test_what_torch_has_postponed_is_done_for_reading_and_refused_for_writing() -> None:
    negative = torch.tensor([complex(0, 2)]).conj().imag
    assert negative.is_neg()
    assert bytes(byte_view(bytes_of(negative))) == torch.tensor([-2.0]).numpy().tobytes()
    conjugate = torch.tensor([complex(1, 2)]).conj()
    assert bytes(byte_view(bytes_of(conjugate))) == torch.tensor([1.0, -2.0]).numpy().tobytes()
    for each in (negative, conjugate):
        with pytest.raises(ValueError, match="lazy conjugate or negative"):
            as_bytes(each)
