"""A SHA-256 of a state, by which runs are compared in strict mode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.state.state_digest import NamedTensor


def hash_of(tensors: Iterable[NamedTensor]) -> str:
    """Return 64 hexadecimal digits that depend on the tensors' names, shapes, dtypes and bytes, in their order."""
    found = hashlib.sha256()
    for each in tensors:
        tensor = each.find()
        if tensor is not None:
            found.update(f"{each.name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            found.update(bytes_of(tensor.detach().cpu()).numpy().data)
    return found.hexdigest()
