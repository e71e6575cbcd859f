"""Bytes that are no tensors are read, and written back in place."""

from __future__ import annotations

import array
import ctypes
import io
import multiprocessing
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch

from farandole.integrations.torchrun.in_place.script_memory import (
    as_tensor,
    is_memory,
    is_same,
    read_context,
    read_memory,
    shared_data,
    write_memory,
)

TABLE = [("count", "i4"), ("mean", "f8")]


def closed_file() -> io.BytesIO:
    file = io.BytesIO()
    file.close()
    return file


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"abc"),
        bytearray(),
        array.array("d", [1.5, 2.5]),
        array.array("l"),
        ctypes.c_long(7),
        ctypes.c_double(0.5),
        (ctypes.c_int * 3)(1, 2, 3),
        ((ctypes.c_int * 2) * 2)(),
        io.BytesIO(b"abc"),
        io.StringIO("a\r\n", newline="\r\n"),
    ],
    ids=["bytes", "no bytes", "doubles", "no longs", "a long", "a double", "ints", "rows of ints", "file", "text"],
)
def test_what_was_read_can_be_written_back(value: Any) -> None:
    assert is_memory(value)
    before = read_memory(value)
    if isinstance(value, bytearray):
        value += b"more"
    elif isinstance(value, array.array):
        value.append(1)
    elif isinstance(value, io.BytesIO | io.StringIO):
        value.seek(1)
        value.write("xyz" if isinstance(value, io.StringIO) else b"xyz")
    else:
        ctypes.memset(ctypes.addressof(value), 1, ctypes.sizeof(value))
    assert read_memory(value) != before
    write_memory(value, before)
    assert read_memory(value) == before


@pytest.mark.parametrize(
    "value", [ctypes.c_char_p(b"a"), ctypes.pointer(ctypes.c_int(1)), b"abc", [1], bytearray(65 << 20), closed_file()]
)
def test_pointers_what_cannot_change_and_large_ones_are_none_of_these(value: Any) -> None:
    assert not is_memory(value)


def test_shared_numbers_are_those_behind_the_lock() -> None:
    shared = multiprocessing.Value("l", 3)
    assert is_memory(shared_data(shared))
    before = read_memory(shared_data(shared))
    shared.value = 9
    write_memory(shared_data(shared), before)
    assert shared.value == 3


def test_a_context_variable_without_a_value_has_none() -> None:
    assert read_context(ContextVar("empty")) == {}
    assert read_context(ContextVar("number", default=2)) == {"": 2}


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(()),
        np.zeros(3),
        np.zeros((4, 5))[1:3, ::2],
        np.zeros(2, dtype="U3"),
        np.zeros(2, dtype="datetime64[s]"),
        np.zeros(4)[::-1],
        np.zeros((4, 5))[::-2, 1:3].T,
        np.zeros(3, dtype=TABLE)["mean"],
        np.zeros(4, dtype=[("at", "datetime64[s]"), ("text", "U3")])[::-2],
    ],
    ids=[
        "a number",
        "whole",
        "every second one",
        "texts",
        "dates",
        "backwards",
        "turned",
        "a column",
        "rows of a table",
    ],
)
def test_a_tensor_of_an_array_has_its_memory(value: Any) -> None:
    before, tensor = value.copy(), as_tensor(value)
    assert tensor is not None
    kept = tensor.clone()
    other = np.ones(1).astype("i8").astype(value.dtype)[0] if value.dtype.names is None else ("2020-01-01", "abc")
    value[...] = other
    assert not np.array_equal(value, before)
    tensor.copy_(kept)
    assert np.array_equal(value, before)
    again = as_tensor(value)
    assert again is not None
    assert is_same(tensor, again)
    assert not is_same(tensor, torch.zeros(1))


@pytest.mark.parametrize(
    "value", [np.zeros(0), np.array([None]), np.broadcast_to(np.zeros(1), (3,)), np.zeros(2, dtype=[("of", object)])]
)
def test_an_array_of_objects_or_that_nobody_can_write_is_left_out(value: Any) -> None:
    assert as_tensor(value) is None
