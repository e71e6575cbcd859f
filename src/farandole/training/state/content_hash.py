"""A hash of what a sample holds, by which workers find out that their streams differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

_MOST_BYTES = 1 << 16
"""Of a larger value its beginning is hashed."""

_OTHER_KINDS = (TypeError, ValueError, RuntimeError, AttributeError, OSError)
"""Errors of values that have no bytes: their type counts."""


def content_hash(samples: Iterable[Any], *numbers: int) -> int:
    """Return 63 bits that depend on the samples and on these numbers; equal in every process, on every machine.

    Tensors, arrays, text, numbers and containers count, and so do objects that have tobytes(), such as images; of any
    other object only its type does.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8)
    for sample in samples:
        _add(digest, sample)
    return int.from_bytes(digest.digest(), "big") >> 1


def _add(digest: hashlib.blake2b, value: Any) -> None:
    digest.update(type(value).__qualname__.encode() + b":")
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        digest.update(repr(value).encode(errors="surrogatepass"))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            # webdataset's "__url__" and "__local_path__" differ between hosts.
            if key == "__key__" or not str(key).startswith("__"):
                _add(digest, key)
                _add(digest, each)
    elif isinstance(value, (list, tuple)):
        digest.update(str(len(value)).encode())
        for each in value:
            _add(digest, each)
    else:
        try:
            digest.update(_bytes_of(value))
        except _OTHER_KINDS:
            digest.update(b"?")


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        first = value.detach().reshape(-1)[: _MOST_BYTES // value.element_size()].cpu().contiguous()
        return f"{value.dtype}{tuple(value.shape)}".encode() + first.view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            return b"objects"
        return f"{array.dtype.str}{array.shape}".encode() + array.reshape(-1)[:_MOST_BYTES].tobytes()[:_MOST_BYTES]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value[:_MOST_BYTES])
    return bytes(value.tobytes()[:_MOST_BYTES])
