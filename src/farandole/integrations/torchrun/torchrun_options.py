"""The options of `farandole torchrun`, checked, and the user's script, whose own arguments are left as they are.

Used by torchrun_command.py. It loads no asyncio: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.base.command_parser import value_counts
from farandole.base.config import JobConfig
from farandole.base.env import TorchrunSettings, read_job_env, read_torchrun_settings
from farandole.base.machine import affinity_cores
from farandole.errors import ConfigError
from farandole.integrations.torchrun.torchrun_parser import (
    GRACE_S,
    PROGRAM,
    STATIC_PORT,
    WITHOUT_EFFECT,
    torchrun_parser,
)
from farandole.job.engines.host_list import HostSlots
from farandole.job.launch.arguments import split_command
from farandole.job.launch.command import checked
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.joining import STORE_IS_PLAIN, check_encryption, tls_folder
from farandole.job.launch.page_address import page_options

C10D_PORT = 29400
_LAST_CALL_S = 5.0  # torchrun waits 30 s; here a node that comes later costs no more than one that comes in time


@dataclass(frozen=True)
class Streams:
    """The standard streams of the workers that an option selects: torchrun's numbers 0 none, 1 stdout, 2 stderr, 3
    both; for all workers, or by local rank."""

    for_all: int = 0
    by_rank: Mapping[int, int] = field(default_factory=dict)

    def has(self, local_rank: int, stream: str) -> bool:
        """Return whether "stdout" or "stderr" of this local rank is selected."""
        chosen = self.by_rank.get(local_rank, 0) if self.by_rank else self.for_all
        return bool(chosen & (1 if stream == "stdout" else 2))

    def __bool__(self) -> bool:
        return bool(self.for_all or any(self.by_rank.values()))


@dataclass(frozen=True)
class Node:
    """The part of this machine in a job of several: the first node runs the coordinator, the others join it.

    rank       the number of this node; None where the order of joining counts
    is_first   whether this node is to run the coordinator; None: the node that has the address does
    host, port the address of the coordinator
    token_file the file with the job's token; None: the token is in FARANDOLE_TOKEN
    wait_s     how long nodes wait for each other
    last_call_s  how long enough nodes wait for further ones
    """

    rank: int | None
    is_first: bool | None
    host: str
    port: int
    token_file: Path | None
    wait_s: float
    last_call_s: float = 0.0


@dataclass(frozen=True)
class TorchrunOptions:
    """The options of a job of `farandole torchrun`, checked as far as the arguments alone allow.

    job          the job, in which the address of several nodes is still missing
    workers      on each node
    nodes        how many there are at least. More than one where `node` is given
    name         the script, as torchrun names it in its report of a failure
    log_dir      None: a folder below the system's temporary one, if any output goes to files
    prefix       the template of a line's prefix; it applies to output that is also written to files
    """

    job: JobSpec
    workers: int
    nodes: int
    name: str
    role: str
    run_id: str
    redirects: Streams
    tee: Streams
    only_ranks: frozenset[int] | None
    log_dir: str | None
    prefix: str | None
    node: Node | None = None


def parse_torchrun(arguments: Sequence[str], settings: TorchrunSettings | None = None) -> TorchrunOptions:
    """Parse the arguments after `farandole torchrun`. Raises SystemExit when they cannot work. `settings`: those of the
    environment, unless given."""
    settings = read_torchrun_settings() if settings is None else settings
    parser = torchrun_parser(settings.defaults)
    ours, command = split_command(arguments, value_counts(parser))
    options = parser.parse_args(ours)
    try:
        return _options(options, command, settings)
    except ConfigError as error:
        parser.error(str(error))


def _options(options: argparse.Namespace, command: Sequence[str], settings: TorchrunSettings) -> TorchrunOptions:
    nodes, most_nodes = (1, 1) if options.standalone else _node_counts(options.nnodes)
    workers = _worker_count(options.nproc_per_node, settings)
    notes = [
        f"--{name.replace('_', '-')} {getattr(options, name)} has no effect: {reason}"
        for name, default, _, reason in WITHOUT_EFFECT
        if getattr(options, name) != default
    ]
    environment = {"ROLE_NAME": options.role}
    if options.rdzv_id != "none":  # else the name of the job, which is unique
        environment["TORCHELASTIC_RUN_ID"] = options.rdzv_id
    if workers > 1 and not settings.has_threads:
        environment["OMP_NUM_THREADS"] = "1"
        notes.append(
            "OMP_NUM_THREADS=1 is set for each worker, as by torchrun, so that they do not overload this machine; set "
            "it yourself for the best performance of your script"
        )
    grace_s = settings.shutdown_timeout_s if options.shutdown_timeout is None else options.shutdown_timeout
    if grace_s is not None and grace_s < 0:
        raise ConfigError(f"--shutdown-timeout must not be negative, got {grace_s:g}")
    tls = tls_folder(options.tls)
    check_encryption(tls, read_job_env().transport)
    if tls and most_nodes > 1:
        notes.append(STORE_IS_PLAIN)
    run_command = _command(options, command, settings)
    node = None if most_nodes == 1 else _node(options, nodes, most_nodes, settings)
    job = JobSpec(
        config=JobConfig(
            num_proc=workers * nodes,
            min_np=workers * nodes if nodes != most_nodes else 1,
            max_np=workers * most_nodes,
            fills_slots=nodes != most_nodes,
            last_call_s=0.0 if node is None else node.last_call_s,
            max_restarts=options.max_restarts,
            grace_s=GRACE_S if grace_s is None else float(grace_s),
            takes_agents=node is not None,
            start_timeout_s=JobConfig.start_timeout_s if node is None else node.wait_s,
            tls=tls,
        ),
        command=run_command,
        environment=environment,
        hosts=(HostSlots("localhost", workers),),
        host="127.0.0.1",
        fork_server=options.fork_server or ("on" if options.max_restarts else "auto"),
        events=options.events,
        page=page_options(options.page, options.traces),
        loudness=options.loudness,
        progress=options.progress,
        notes=tuple(notes),
    )
    return TorchrunOptions(
        job=job,
        workers=workers,
        nodes=nodes,
        name=command[0],
        role=options.role,
        run_id=options.rdzv_id,
        redirects=_streams(options.redirects, "--redirects"),
        tee=_streams(options.tee, "--tee"),
        only_ranks=_ranks(options.local_ranks_filter),
        log_dir=_log_dir(options.log_dir),
        prefix=settings.line_prefix,
        node=node,
    )


def _node_counts(text: str) -> tuple[int, int]:
    counts = text.split(":")
    if len(counts) > 2 or not all(count.isascii() and count.isdigit() for count in counts):
        raise ConfigError(f"--nnodes must be a number, or MIN:MAX, got {text!r}")
    least, most = int(counts[0]), int(counts[-1])
    if not 0 < least <= most:
        raise ConfigError(f"--nnodes needs 0 < MIN <= MAX, got {text!r}")
    return least, most


def _worker_count(text: str, settings: TorchrunSettings) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return affinity_cores()
    if text in ("gpu", "auto"):
        gpus = count_gpus(settings.visible_gpus)
        if not gpus and text == "gpu":
            raise ConfigError(
                "--nproc-per-node gpu: this machine has no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides them; give a "
                "number, or cpu"
            )
        return gpus or affinity_cores()
    if text == "xpu":
        return _count_xpus()
    raise ConfigError(f"--nproc-per-node must be a number above 0, auto, gpu, cpu or xpu, got {text!r}")


def count_gpus(visible: str | None, dev: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that workers can use, without torch. `visible`: CUDA_VISIBLE_DEVICES; None: it
    is not set."""
    there = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in dev.glob("nvidia*"))
    if visible is None or not there:
        return there
    chosen = list[str]()
    for name in (each.strip() for each in visible.split(",")):
        # CUDA ignores all that follow an invalid one (CUDA C++ Programming Guide, CUDA Environment Variables).
        if not name or name in chosen or (name.lstrip("-").isdigit() and not 0 <= int(name) < there):
            break
        chosen.append(name)
    return len(chosen)


def _count_xpus() -> int:
    """Ask torch, in a process of its own: this one starts without it."""
    code = "import torch; print(torch.xpu.device_count() if torch.xpu.is_available() else 0)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120.0)
        count = int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        count = 0
    if not count:
        raise ConfigError("--nproc-per-node xpu: torch finds no XPU on this machine; give a number, or cpu")
    return count


def _streams(text: str, flag: str) -> Streams:
    if re.fullmatch(r"[0-3]", text):
        return Streams(int(text))
    if re.fullmatch(r"(\d+:[0-3],)*\d+:[0-3]", text):
        pairs = (pair.split(":") for pair in text.split(","))
        return Streams(by_rank={int(rank): int(value) for rank, value in pairs})
    raise ConfigError(
        f"{flag} must be 0, 1, 2 or 3 (none, stdout, stderr, both), or such a number for each local rank: 0:3,1:2; "
        f"got {text!r}"
    )


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    ranks = text.split(",")
    if not all(rank.strip().isascii() and rank.strip().isdigit() for rank in ranks):
        raise ConfigError(f"--local-ranks-filter must be numbers with commas, such as 0,1,2; got {text!r}")
    return frozenset(map(int, ranks))


def _log_dir(text: str | None) -> str | None:
    if text is not None and text != os.devnull and os.path.isfile(text):
        raise ConfigError(f"--log-dir {text} is a file; give a folder")
    return text or None


def _command(options: argparse.Namespace, command: Sequence[str], settings: TorchrunSettings) -> tuple[str, ...]:
    if not command:
        raise ConfigError(f"the script is missing; for example: {PROGRAM} --nproc-per-node 2 train.py")
    if options.no_python and options.module and not options.run_path:
        raise ConfigError("--no-python and --module contradict each other; give one of them")
    if options.no_python and not options.run_path:
        return tuple(checked(command))
    python = settings.python or sys.executable
    module = ["-m"] if options.module and not options.run_path else []
    return tuple(checked([python, "-u", *module, *command]))


def _node(options: argparse.Namespace, nodes: int, most_nodes: int, settings: TorchrunSettings) -> Node:
    conf = _conf(options.rdzv_conf)
    token_file = Path(conf["token_file"]) if "token_file" in conf else None
    if token_file is None and not settings.has_token:
        raise ConfigError(
            f"{most_nodes} nodes need a token, by which they prove that they belong to the job: give each node a copy "
            "of one file with --rdzv-conf token_file=FILE (made by: openssl rand -hex 32 > FILE; chmod 600 FILE), or "
            "set FARANDOLE_TOKEN"
        )
    wait_s = _seconds("join_timeout", conf.get("join_timeout", conf.get("timeout", "600")))
    last_call_s = _seconds("last_call_timeout", conf.get("last_call_timeout", f"{_LAST_CALL_S:g}"))
    if options.rdzv_backend == "static":
        if nodes != most_nodes:
            raise ConfigError(
                f"--nnodes {options.nnodes}: nodes can come and go only with --rdzv-backend c10d and --rdzv-endpoint "
                "HOST:PORT"
            )
        if not 0 <= options.node_rank < nodes:
            raise ConfigError(f"--node-rank must be below --nnodes {nodes}, and not negative, got {options.node_rank}")
        default = f"{options.master_addr}:{options.master_port or STATIC_PORT}"
        host, port = _endpoint(options.rdzv_endpoint or default, STATIC_PORT)
        return Node(options.node_rank, options.node_rank == 0, host, port, token_file, wait_s)
    if options.rdzv_backend != "c10d":
        raise ConfigError(
            f"--rdzv-backend {options.rdzv_backend}: Farandole's coordinator takes the place of the rendezvous; give "
            "static or c10d"
        )
    if not options.rdzv_endpoint:
        raise ConfigError(f"{most_nodes} nodes need --rdzv-endpoint HOST:PORT, the address of one of them")
    host, port = _endpoint(options.rdzv_endpoint, C10D_PORT)
    is_first = None if "is_host" not in conf else conf["is_host"].lower() in ("1", "true", "t", "yes", "y")
    return Node(None, is_first, host, port, token_file, wait_s, 0.0 if nodes == most_nodes else last_call_s)


def _conf(text: str) -> dict[str, str]:
    conf: dict[str, str] = {}
    for pair in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"--rdzv-conf must be KEY=VALUE pairs with commas, got {text!r}")
        conf[key] = value
    return conf


def _seconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--rdzv-conf: {key} must be a positive number of seconds, got {text!r}")
    return value


def _endpoint(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ConfigError(f"--rdzv-endpoint must be HOST:PORT, with a port between 1 and 65535, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
