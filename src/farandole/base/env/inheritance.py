"""The whole environment of this process: the part that its children get, and temporary changes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from farandole.base.env.agent_env import BUCKET_MB, EXIT_NOTICE, RECONFIGURE, HorovodPlace, TorchrunPlace

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


def read_terminal_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the kind of the terminal, $TERM; empty: unknown."""
    return environ.get("TERM", "")


def inherited_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this process's environment for its children, without the variables of an outer job."""
    return {
        name: value
        for name, value in environ.items()
        if name in _FOR_WORKERS or not (name.startswith(_OF_AN_OUTER_JOB) or name in _PLACES)
    }


def carried_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of it that goes with a job to other machines: without the values of this machine (paths of
    programs, devices, the session), and without values that look like a secret, because connections are authentic but
    not encrypted. The other machine's own values take their place."""
    return {
        name: value
        for name, value in inherited_environment(environ).items()
        if name not in _OF_THE_MACHINE
        and not name.startswith(_PREFIXES_OF_THE_MACHINE)
        and not _looks_like_a_secret(name)
    }


@contextlib.contextmanager
def changed_environment(**variables: str | None) -> Iterator[None]:
    """Add these variables to this process's environment inside the block, except those whose value is None."""
    new = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def replace_environment(variables: Mapping[str, str]) -> None:
    """Replace the whole environment of this process."""
    os.environ.clear()
    os.environ.update(variables)


def put_own_python_first() -> None:
    """Let `python` in the commands of this process's children be the one beside the interpreter of this process."""
    folder, found = os.path.dirname(sys.executable), shutil.which("python")
    if (found is None or os.path.dirname(found) != folder) and shutil.which("python", path=folder):
        os.environ["PATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PATH", "")]))


def differs_for_all(some: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Return whether two environments differ by more than the variables of a single worker."""
    names = {*some, *others} - _PLACES
    return any(some.get(name) != others.get(name) for name in names if not name.startswith(_FOR_ONE))


_PREFIX = "FARANDOLE_"

# The variables of an outer job, of its workers or its agents. torchrun's agents read some of their own.
_OF_AN_OUTER_JOB = (_PREFIX, "TORCHELASTIC_")

# Read in init() or init_process_group() at the earliest, as those of torchrun in _PLACES are; any other variable may be
# read by a library when it is loaded.
_FOR_ONE = (_PREFIX, "HOROVOD_", "TORCHELASTIC_")

# Variables for workers from a user, not from an outer job.
_FOR_WORKERS = frozenset({BUCKET_MB, EXIT_NOTICE, RECONFIGURE})

# The place of a process in one job, of Horovod or torchrun; not for the workers of another one.
_PLACES = frozenset((*HorovodPlace.__struct_encode_fields__, *TorchrunPlace.__struct_encode_fields__)) | {
    "HOROVOD_RENDEZVOUS_ADDR",
    "HOROVOD_RENDEZVOUS_PORT",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_SECRET_KEY",
}

_OF_THE_MACHINE = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME"),
        *("MANPATH", "INFOPATH"),
        *("HOME", "USER", "LOGNAME", "SHELL", "SHLVL", "MAIL", "HOSTNAME", "PWD", "OLDPWD", "_"),
        *("TMPDIR", "TEMP", "TMP", "TERM", "COLORTERM", "COLUMNS", "LINES", "DISPLAY", "WAYLAND_DISPLAY", "EDITOR"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("HIP_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "TMUX", "STY", "WINDOWID"),
    )
)
_PREFIXES_OF_THE_MACHINE = (
    *("SSH_", "XDG_", "DBUS_", "TERM_", "CONDA_", "PYENV_"),
    *("SLURM_", "PBS_", "LSB_", "KUBERNETES_"),
)
_WORDS_OF_SECRETS = frozenset(
    {"TOKEN", "TOKENS", "SECRET", "SECRETS", "CREDENTIAL", "CREDENTIALS", "KEY", "APIKEY", "PAT"}
)


def _looks_like_a_secret(name: str) -> bool:
    return "PASSW" in name.upper() or not _WORDS_OF_SECRETS.isdisjoint(name.upper().split("_"))
