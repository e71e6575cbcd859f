"""Variables that torch reads when a process creates an NCCL process group."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_OURS = {
    # Farandole handles a failed communicator: otherwise torch ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The process must not end because NCCL's abort takes long, and threads of torch that may outlive Python must not
    # access a store.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Seconds for the creation of a communicator; 30 minutes otherwise.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
}

_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def prepare_for_nccl(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set the variables that are not set. Return the error in the others; empty if there is none."""
    for name, value in _OURS.items():
        environ.setdefault(name, value)
    for name in _BLOCKING:
        if environ.get(name, "0").lower() not in ("0", "", "false", "n", "no"):
            return f"{name}={environ[name]} lets threads wait that nobody can wake; unset it"
    return ""
