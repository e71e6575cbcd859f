"""The output of --check-build: frameworks, controllers and tensor operations that are available here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from farandole import __version__

_TORCH_IMPORT_LIMIT_S = 120.0  # a cold import of torch from a network disk can take a minute
_LAUNCHERS = ("torchrun", "mpirun", "srun")
_DEVICES = (("cuda", "CUDA"), ("rocm", "ROCm"))
_BACKENDS = (("gloo", "Gloo"), ("nccl", "NCCL"), ("mpi", "MPI"))


def describe_build() -> str:
    """Return the whole output. Imports torch in a separate process, which takes about a second."""
    beside_python = os.path.dirname(sys.executable)
    paths = {name: shutil.which(name) or shutil.which(name, path=beside_python) for name in _LAUNCHERS}
    return format_build(ask_torch(), paths)


def format_build(torch: Mapping[str, object] | str, launchers: Mapping[str, str | None]) -> str:
    """Format the output. `torch`: the report of worker/capabilities.py, or why there is none. `launchers`: their
    paths."""
    found: Mapping[str, object] = {} if isinstance(torch, str) else torch
    version = f" {found['torch']}" if found else f": {torch}"
    devices = ", ".join(["CPU", *(name for key, name in _DEVICES if found.get(key))])
    tensors = f"{devices} tensors"
    groups = {
        "Available Frameworks": [(bool(found), f"PyTorch{version}"), (False, "TensorFlow"), (False, "MXNet")],
        "Available Controllers": [(True, "Farandole's own"), (False, "MPI")],
        "Available Tensor Operations": [
            (bool(found), f"Farandole's own shared memory, on one host ({tensors})"),
            (bool(found), f"Farandole's own TCP ring ({tensors})"),
            (bool(found.get("nccl")), "NCCL"),
            (False, "DDL"),
            (False, "CCL"),
            (False, "MPI"),
            (False, "Gloo"),
        ],
        "Backends of the installed torch.distributed (NCCL is used for CUDA tensors)": [
            (bool(found.get(key)), name) for key, name in _BACKENDS
        ],
        "Launchers that init() supports, beside farandole run and horovodrun": [
            (path is not None, f"{name} ({path})" if path else name) for name, path in launchers.items()
        ],
    }
    lines = [f"Farandole v{__version__}:"]
    for title, entries in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for there, name in entries)]
    return "\n".join(lines)


def ask_torch() -> dict[str, object] | str:
    """Return what worker/capabilities.py says of torch, in a process of its own; or why torch cannot be imported."""
    command = [sys.executable, "-m", "farandole.training.worker.capabilities"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"import did not end within {_TORCH_IMPORT_LIMIT_S:g} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    answer: dict[str, object] = json.loads(done.stdout)
    return answer
