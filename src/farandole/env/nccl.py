"""Variables that torch reads when a process makes a process group of NCCL's."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_OURS = {
    # A failed communicator is ours to deal with: otherwise torch ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Neither is the process to end because NCCL's abort takes long, nor is a store to be asked by threads of torch's
    # that may outlive Python.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # For a communicator that is being made, in seconds; 30 minutes otherwise.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
}

_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def prepare_for_nccl(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set those that are not set. Returns what is wrong with the ones that are; empty if nothing."""
    for name, value in _OURS.items():
        environ.setdefault(name, value)
    for name in _BLOCKING:
        if environ.get(name, "0").lower() not in ("0", "", "false", "n", "no"):
            return f"{name}={environ[name]} lets threads wait that nobody can wake; unset it"
    return ""
