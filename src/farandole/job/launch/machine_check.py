"""What `farandole doctor` looks at on one machine: the versions, and whether a job of some workers can run here. Judges
are pure functions of what was read; `examine` reads. Also the output of --check-build.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from farandole import __version__
from farandole.base.env import read_runtime_folder
from farandole.base.events.event import count
from farandole.base.liveness import exit_notice
from farandole.base.machine import affinity_cores, usable_cores
from farandole.base.membership import Address
from farandole.base.wire.user_secret import private_folder
from farandole.errors import ConfigError
from farandole.job.agent.host_resources import descriptors_needed
from farandole.job.agent.network_addresses import own_addresses
from farandole.job.agent.process import can_adopt_orphans

State = Literal["ok", "warning", "error"]

_REACH_S = 3.0
_PYTHON_S = 60.0
_MB, _GB = 1 << 20, 1 << 30
_OF_A_WORKER = 400 * _MB  # with torch and a small model; a CUDA context needs more
_LITTLE_SHARED_MEMORY = 1 * _GB  # a container of Docker has 64 MB unless told otherwise
_LITTLE_SCRATCH = 256 * _MB


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        topic: What was looked at, in one or two words.
        state: A warning may cost speed, or stop a larger job. With an error, no job runs.
        text: What was found, with the values.
        advice: What to do about it; empty when the state is ok.
    """

    topic: str
    state: State
    text: str
    advice: str = ""


class Examined(msgspec.Struct, frozen=True):
    """What was found on one machine.

    Attributes:
        host: Its name.
        versions: Those that have to be equal on all hosts of a job, by name.
        findings: In the order of the report.
        reached: Those of the requested addresses at which it reached a listener.
    """

    host: str
    versions: dict[str, str]
    findings: list[Finding]
    reached: list[Address]


def examine(workers: int, towards: Sequence[Address] = ()) -> Examined:
    """Look at this machine, for a job with so many workers here. `towards`: addresses to be reached. May take some
    seconds, for an import of torch."""
    asked = ask_torch()
    described = {"error": asked} if isinstance(asked, str) else asked
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    features = {
        "exits of other processes (pidfd_open)": hasattr(os, "pidfd_open"),
        "memory without a name (memfd_create)": hasattr(os, "memfd_create"),
        "adoption of orphans (prctl)": can_adopt_orphans(),
        "early notice of a death (futex_waitv)": exit_notice.is_supported(),
    }
    try:
        addresses, trouble = own_addresses(), ""
    except OSError as error:
        addresses, trouble = [], str(error)
    findings = [
        software(described),
        commands_python(shutil.which("python"), sys.executable, ask_python),
        devices(described, shutil.which("nvidia-smi") is not None),
        cores(workers, usable_cores(), affinity_cores()),
        memory(workers, psutil.virtual_memory().available),
        shared_memory(*_space("/dev/shm")),
        descriptors(workers, hard if hard != resource.RLIM_INFINITY else 1 << 30),
        kernel(sys.platform, features),
        scratch(tempfile.gettempdir(), _space(tempfile.gettempdir())[0]),
        _job_files(),
        network(addresses, _own_listeners(addresses), trouble),
    ]
    versions = {
        "Farandole": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(described.get("torch", "")).partition("+")[0],
    }
    return Examined(socket.gethostname(), versions, findings, [each for each in towards if not _why_unreachable(each)])


# The judges -----------------------------------------------------------------------------------------------------------


def software(described: Mapping[str, object]) -> Finding:
    """Judge the versions. `described`: as worker/capabilities.py prints it, or {"error": text}."""
    text = f"Farandole {__version__}, Python {platform.python_version()}"
    if "error" in described:
        advice = f"{sys.executable} -c 'import torch' shows the whole error; reinstall torch for this Python"
        return Finding("software", "error", f"{text}, and torch cannot be imported: {described['error']}", advice)
    return Finding("software", "ok", f"{text}, torch {described['torch']}")


def commands_python(found: str | None, own: str, ask: Callable[[str], str]) -> Finding:
    """Judge which interpreter `python` in the command of a job is. `found`: it, in PATH; `own`: that of Farandole;
    `ask`: what another one lacks, as ask_python() returns it."""
    advice = f"activate the environment of {own} before the job is started, or name {own} in its command"
    if found is None:
        return Finding("python", "warning", "there is no `python` in PATH", advice)
    if Path(found).parent == Path(own).parent:
        return Finding("python", "ok", f"`python` is {found}")
    if lacks := ask(found):
        return Finding("python", "warning", f"`python` is {found}, which lacks {lacks}", advice)
    return Finding("python", "ok", f"`python` is {found}, and Farandole runs under {own}")


def ask_python(python: str) -> str:
    """Return which of torch and Farandole an interpreter lacks; empty: neither. It takes some milliseconds."""
    code = "import importlib.util as u; print(*(n for n in ('torch', 'farandole') if u.find_spec(n) is None))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=_PYTHON_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"an answer: {error}"
    return " and ".join(done.stdout.split()) if done.returncode == 0 else f"an answer: exit code {done.returncode}"


def devices(described: Mapping[str, object], has_nvidia: bool) -> Finding:
    """Judge the devices. `has_nvidia`: NVIDIA's driver is installed."""
    number = int(str(described.get("devices", 0)))
    if number:
        found = count(number, "CUDA device")
        if described.get("nccl"):
            return Finding("devices", "ok", f"{found}, NCCL")
        advice = "install a build of torch with NCCL: gradients of devices travel through the hosts' memory without it"
        return Finding("devices", "warning", f"{found}, no NCCL", advice)
    if has_nvidia and "error" not in described:
        what = "torch finds none of them" if described.get("cuda") else f"torch {described.get('torch')} has no CUDA"
        advice = "see `nvidia-smi` and CUDA_VISIBLE_DEVICES, or install a build of torch with CUDA"
        return Finding("devices", "warning", f"the driver of NVIDIA devices is installed, and {what}", advice)
    return Finding("devices", "ok", "no CUDA device: workers train on the CPU")


def cores(workers: int, usable: int, seen: int) -> Finding:
    """Judge the cores. `usable`: within the CPU quota; `seen`: those of the affinity, which torch counts."""
    text = f"{usable} usable" + (f" of {seen} (a CPU quota)" if usable < seen else "")
    if workers > usable:
        advice = "workers that share a core slow each other down: start fewer here, or give the job more cores"
        return Finding("cores", "warning", f"{text}, for {workers} workers", advice)
    return Finding("cores", "ok", text)


def memory(workers: int, available: int) -> Finding:
    """Judge the memory, in bytes."""
    text = f"{available / _GB:.1f} GB available"
    if available < workers * _OF_A_WORKER:
        needed = f"{count(workers, 'worker')} with torch and a small model need"
        advice = f"{needed} {workers * _OF_A_WORKER / _GB:.1f} GB; the kernel kills workers when there is none left"
        return Finding("memory", "warning", text, advice)
    return Finding("memory", "ok", text)


def shared_memory(free: int, total: int) -> Finding:
    """Judge /dev/shm, in bytes; a total of 0: there is none."""
    if not total:
        advice = "mount a tmpfs there, or use num_workers=0 in data loaders"
        return Finding("/dev/shm", "warning", "there is none, and torch's loader processes pass batches there", advice)
    text = f"{free / _GB:.2f} of {total / _GB:.2f} GB free"
    if free < _LITTLE_SHARED_MEMORY:
        advice = (
            "torch's loader processes pass batches there (gradients do not): docker run --shm-size 2g, or remount it"
        )
        return Finding("/dev/shm", "warning", text, advice)
    return Finding("/dev/shm", "ok", text)


def descriptors(workers: int, hard: int) -> Finding:
    """Judge the hard limit of open files."""
    needed = descriptors_needed(workers)
    if hard < needed:
        advice = "raise it: ulimit -n, limits.conf, LimitNOFILE=, docker run --ulimit nofile="
        return Finding("open files", "error", f"at most {hard}, and {workers} workers need {needed}", advice)
    return Finding("open files", "ok", f"at most {hard}, needed {needed}")


def kernel(system: str, features: Mapping[str, bool]) -> Finding:
    """Judge the features of the kernel, by their description."""
    missing = [name for name, is_there in features.items() if not is_there]
    if system != "linux":
        return Finding("kernel", "error", f"{system} is not Linux", "run jobs on Linux: recovery needs its kernel")
    if missing:
        text = f"Linux {platform.release()} lacks: {', '.join(missing)}"
        return Finding("kernel", "warning", text, "recovery works without them, some milliseconds slower; 5.16 has all")
    return Finding("kernel", "ok", f"Linux {platform.release()}, with all features for a quick recovery")


def scratch(folder: str, free: int) -> Finding:
    """Judge the temporary folder, with so many free bytes."""
    text = f"{folder}: {free / _GB:.1f} GB free"
    if free < _LITTLE_SCRATCH:
        return Finding("scratch", "warning", text, "free some space there, or set TMPDIR to another folder")
    return Finding("scratch", "ok", text)


def network(addresses: Sequence[str], listening: Mapping[str, str], trouble: str = "") -> Finding:
    """Judge the addresses for other machines. `listening`: why this machine cannot reach itself there, by address, with
    loopback; `trouble`: why there are no addresses."""
    broken = [f"{address} ({reason})" for address, reason in listening.items() if reason]
    if broken:
        advice = "a firewall, or a sandbox, forbids connections of this machine to itself: allow them for all ports"
        return Finding("network", "error", f"connections to {', '.join(broken)} fail", advice)
    if trouble or not addresses:
        return Finding("network", "ok", f"loopback only{f' ({trouble})' if trouble else ''}: jobs of this machine run")
    return Finding("network", "ok", f"loopback, and {', '.join(addresses)} for other machines")


# Reading --------------------------------------------------------------------------------------------------------------


def _why_unreachable(address: Address) -> str:
    try:
        with socket.create_connection((address.host, address.port), timeout=_REACH_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _own_listeners(addresses: Sequence[str]) -> dict[str, str]:
    found = {}
    for address in ("127.0.0.1", *addresses):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            try:
                listener.bind((address, 0))
                listener.listen()
            except OSError as error:
                found[address] = error.strerror or str(error)
            else:
                found[address] = _why_unreachable(Address(address, listener.getsockname()[1]))
    return found


def _space(folder: str) -> tuple[int, int]:
    """Return the free and the total bytes; 0 and 0 where there is no such folder."""
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return found.free, found.total


def _job_files() -> Finding:
    folder = read_runtime_folder()
    try:
        private_folder(folder)
    except ConfigError as error:
        return Finding("job files", "warning", str(error), "`farandole status` does not find jobs of this machine")
    except OSError as error:
        text = f"{folder} cannot be made: {error.strerror}"
        return Finding("job files", "warning", text, "set XDG_RUNTIME_DIR to a folder of your own")
    return Finding("job files", "ok", str(folder))


# The output of --check-build: frameworks, controllers and tensor operations that are available here -------------------

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
