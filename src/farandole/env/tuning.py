"""Variables by which a user tunes a process: gradients, memory allocation and NCCL; and the folder of running jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

BUCKET_MB = "FARANDOLE_BUCKET_MB"


def read_bucket_mb(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the least size of a bucket of gradients, in megabytes, as it was written; None: it is chosen
    automatically."""
    return environ.get(BUCKET_MB) or None


# Memory allocation ----------------------------------------------------------------------------------------------------

_MALLOC_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def has_malloc_settings(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a setting of the C library's malloc is in the environment."""
    return any(name in environ for name in _MALLOC_SETTINGS) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")


# NCCL -----------------------------------------------------------------------------------------------------------------
#
# Torch reads these variables when a process creates an NCCL process group: ProcessGroupNCCL.hpp of torch 2.13, in
# torch/csrc/distributed/c10d, documents them; the last one is that of
# nccl_nonblocking_timeout() in NCCLUtils.hpp.

_NCCL_DEFAULTS = {
    # Farandole handles a failed communicator: otherwise torch ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The process must not end because NCCL's abort takes long, and threads of torch that may outlive Python must not
    # access a store.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Seconds for the creation of a communicator; 30 minutes otherwise.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
}

_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def prepare_for_nccl(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set the variables that are not set. Return the error in the others; empty if there is none."""
    for name, value in _NCCL_DEFAULTS.items():
        environ.setdefault(name, value)
    for name in _BLOCKING_WAIT:
        if environ.get(name, "0").lower() not in ("0", "", "false", "n", "no"):
            return f"{name}={environ[name]} makes threads wait in a way that cannot be interrupted; unset it"
    return ""


# Files of running jobs ------------------------------------------------------------------------------------------------


def read_runtime_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for the files of this user's jobs, which may not exist yet: $XDG_RUNTIME_DIR/farandole, or
    /tmp/farandole-UID where there is no such variable (in containers, under ssh without a session)."""
    given = environ.get("XDG_RUNTIME_DIR", "")
    return Path(given) / "farandole" if given.startswith("/") else Path(f"/tmp/farandole-{os.geteuid()}")
