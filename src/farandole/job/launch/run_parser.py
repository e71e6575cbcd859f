"""The parser of our own options, in groups as `--help` shows them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from farandole import __version__
from farandole.base.command_parser import Parser, value_counts
from farandole.base.config import JobConfig
from farandole.job.launch.job_spec import PROGRESS
from farandole.registry import factory

STATE_PATIENCE_S = 600.0
"""Seconds for which agents keep their workers without a launcher, unless --patience is given."""

CHECKPOINT_DEFAULTS: tuple[str, int] = ("10m", 2)
"""Interval of checkpoints, and how many are kept."""

PREEMPTION_HELP = (
    "watch the notices by which a cloud announces that this machine will be taken away: aws, gcp, azure; auto: the "
    "cloud that the firmware names; CLOUD=URL: another address of its metadata service (default: none)"
)


def run_parser(program: str) -> tuple[argparse.ArgumentParser, Mapping[str, int]]:
    """Return the parser of `program`'s options, and the number of values of each flag that has values."""
    parser = Parser(
        prog=program,
        usage=f"{program} -np N [options] command ...",
        description="Run a command as N workers that train one model, and continue when workers are lost or join.",
        epilog=f"Example: {program} -np 3 --min-np 2 python train.py --epochs 10. Each worker also finds the variables "
        "of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so that a script that calls "
        "torch.distributed.init_process_group() runs unchanged.",
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=f"farandole {__version__}")
    parser.add_argument("-cb", "--check-build", action=_CheckBuild, nargs=0, help="show the available components")
    for add_options in (
        _sizes,
        _hosts,
        _remote,
        _failures,
        _clusters,
        _times,
        _strict,
        _balance,
        _checkpoints,
        _transport,
        _output,
        _address,
        factory("Horovod options"),
    ):
        add_options(parser)
    return parser, value_counts(parser)


class _CheckBuild(argparse.Action):
    """Print the information and end, as --version does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from farandole.job.launch.machine_check import describe_build  # here: no other option needs what it reads

        print(describe_build())
        parser.exit()


def _sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("number of workers").add_argument
    add("-np", "-n", "--num-proc", type=int, metavar="N", help="number of workers (required)")
    add(
        "--min-np",
        "--min-num-proc",
        type=int,
        dest="min_num_proc",
        metavar="N",
        help="minimum number of workers to continue training (default: 1; under horovodrun the value of -np)",
    )
    add(
        "--max-np",
        "--max-num-proc",
        type=int,
        dest="max_num_proc",
        metavar="N",
        help="maximum number of workers (default: the number of slots; without hosts the value of -np)",
    )


def _hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts of the workers (default: this machine, one slot for each worker)")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, each with its number of slots")
    hosts.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="lines such as: host slots=2")
    hosts.add_argument(
        "--host-discovery-script",
        metavar="FILE",
        help="a program that is run periodically, and prints a line HOST or HOST:SLOTS for each available host",
    )
    hosts.add_argument(
        "--slurm",
        action="store_true",
        help="all nodes of the Slurm job in which this command runs, with a worker for each task, or for each GPU if "
        "there is one task; nodes may be added (`farandole slurm grow`). Without -np it trains in all slots",
    )
    group.add_argument(
        "--slurm-requeue",
        action="store_true",
        help="when Slurm announces the end of the job (sbatch --signal=B:USR1@90), put it back into the queue after "
        "its checkpoint",
    )
    group.add_argument(
        "--slots-per-host",
        type=int,
        dest="slots",
        metavar="N",
        help="number of slots of a host that is given without :SLOTS, or of each node with --slurm",
    )


def _remote(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hosts that are other machines, on which agents are started by ssh").add_argument
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of their ssh servers (default: that of ssh_config)")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key (default: those of ssh_config)")
    add("--remote-python", metavar="PATH", help="the interpreter with Farandole there (default: the path of this one)")
    add(
        "--remote-folder",
        metavar="DIR",
        help="working directory of the workers there (default: the path of the current one)",
    )
    add(
        "--network-interfaces",
        "--network-interface",
        dest="nics",
        action="append",
        metavar="NAME,...",
        help="network interfaces between the hosts, for the coordinator and for tensors (default: all are tried, "
        "first those that lead to the other hosts)",
    )


def _failures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("loss of workers").add_argument
    add(
        "--restarts",
        type=int,
        metavar="N",
        help=f"how often a lost worker of a slot is replaced (default: {JobConfig.restarts})",
    )
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help="how often all workers are stopped and started again after one of them failed, where none has entered an "
        "elastic function, as under torchrun; no worker is then started before there are slots for all (default: such "
        "a failure ends the job)",
    )
    add(
        "--spares",
        type=int,
        metavar="N",
        default=JobConfig.spares,
        help="number of workers beyond -np that are started and wait, to replace a lost worker at once (default: "
        "%(default)s)",
    )
    add(
        "--in-place",
        action="store_true",
        help="make an unchanged script of torchrun elastic in place, if it has init_process_group(), a "
        "DistributedSampler and DistributedDataParallel; docs/scripts-of-torchrun.md says which scripts qualify",
    )
    add(
        "--fork-server",
        choices=("auto", "on", "off"),
        default="auto",
        help="start workers by forking a process that has imported torch: auto: replacements; on: all workers "
        "(default: %(default)s)",
    )
    add("--no-fork-server", dest="fork_server", action="store_const", const="off", help="same as --fork-server off")
    add(
        "--on-failure",
        choices=("slot", "host"),
        help="what is excluded after the loss of a worker: its slot, once --restarts is used up, or its "
        "host, as under Horovod (default: slot; with --blacklist-cooldown-range host)",
    )
    add(
        "--blacklist-cooldown-range",
        type=float,
        nargs=2,
        dest="cooldown_range",
        metavar=("MIN", "MAX"),
        help="seconds after which an excluded host may be used again (default: never)",
    )
    add(
        "--reset-limit",
        type=int,
        metavar="N",
        help="end the job when it has regrouped more often than this (default: no limit)",
    )


def _clusters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("clusters and clouds").add_argument
    add(
        "--kubernetes",
        metavar="LABELS",
        help="agents join from the pods with these labels, such as app=train,role=worker: watch the pods, so that "
        "their end and their eviction are known at once; needs --token-file, and the package extra "
        "farandole[kubernetes]",
    )
    add(
        "--kubernetes-namespace",
        metavar="NAME",
        help="namespace of these pods (default: that of this pod, or of the current context)",
    )
    add(
        "--preemption",
        default="none",
        metavar="CLOUD",
        help=f"{PREEMPTION_HELP}; agents that are started on other machines watch their own",
    )


def _times(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time limits, in seconds")
    for flag, default, text in (
        ("--elastic-timeout", JobConfig.elastic_timeout_s, "how long a job may have fewer than --min-np workers"),
        (
            "--detection-budget",
            JobConfig.detection_budget_s,
            "how long a silent host or a stopped worker may stay undetected; for one that hangs: --step-timeout",
        ),
        ("--grace", JobConfig.grace_s, "from SIGTERM to SIGKILL when a worker is stopped"),
    ):
        group.add_argument(flag, type=float, default=default, metavar="S", help=f"{text} (default: %(default)g)")
    group.add_argument(
        "--step-timeout",
        type=float,
        metavar="S",
        help="how long all workers may stay without progress in an elastic function: then the workers for which all "
        "others wait are stopped, and their stacks are shown (default: no limit)",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        metavar="S",
        help="from the first worker's init() to that of the last worker "
        f"(default: HOROVOD_START_TIMEOUT, or {JobConfig.start_timeout_s:g})",
    )


def _transport(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("transport of tensors").add_argument
    add(
        "--transport",
        choices=("auto", "shm", "tcp", "hierarchical", "nccl"),
        help="shm: through the memory that workers of one host share; tcp: over connections; hierarchical: through "
        "memory on each host, over connections between hosts; "
        "nccl: CUDA tensors through NCCL, or an error, and all others as with auto; auto: shm on one host, else "
        "hierarchical where hosts have several workers, else tcp; CUDA tensors through NCCL where each worker has a "
        "device of its own (default: FARANDOLE_TRANSPORT, or auto)",
    )


def _strict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "strict mode: the same model, to the last bit, for any number of workers"
    ).add_argument
    add(
        "--strict",
        action="store_true",
        help="every fd.elastic.DataLoader is strict: its global batches are cut into a fixed number of shards, which "
        "are computed one by one and added up in one order; workers compute with one thread, unless OMP_NUM_THREADS "
        "is set",
    )
    add(
        "--shards",
        type=int,
        metavar="V",
        help="number of these shards: a divisor of the global batch size, and at least the largest number of workers "
        "(default: --max-np, or -np); implies --strict",
    )
    add(
        "--audit",
        type=float,
        metavar="FRACTION",
        help="fraction of the shards that a second worker computes again; a worker whose results are wrong is named, "
        "ends, and is not replaced in its slot; 0: none (default: 0.01)",
    )
    add(
        "--hash-every",
        type=int,
        metavar="STEPS",
        help="hash the state each time that so many steps are decided, besides the end of each epoch",
    )


def _balance(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("machines of unequal speed").add_argument
    add(
        "--balance",
        choices=("auto", "off"),
        help="auto: local batches of every fd.elastic.DataLoader follow the measured speed of the workers, so that a "
        "slow one gets fewer samples of each global batch; off: all workers get equally many (default: "
        "FARANDOLE_BALANCE, or off)",
    )


def _checkpoints(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints, for the loss of the whole job").add_argument
    add(
        "--checkpoint",
        metavar="DIR",
        help="write the state to DIR, or to an address such as s3://bucket/job, periodically, and start from the "
        "newest checkpoint in it",
    )
    add(
        "--checkpoint-every",
        metavar="TIME",
        default=CHECKPOINT_DEFAULTS[0],
        help="interval of checkpoints: 30s, 10m, 1h, or 500steps (default: %(default)s)",
    )
    add(
        "--checkpoint-keep",
        type=int,
        metavar="N",
        default=CHECKPOINT_DEFAULTS[1],
        help="keep the newest N checkpoints (default: %(default)s)",
    )


def _output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-filename",
        type=Path,
        metavar="DIR",
        help="also write the output of the workers to DIR/rank.N/stdout and stderr",
    )
    group.add_argument(
        "-prefix-timestamp",
        "--prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="print the time before each line of a worker",
    )
    group.add_argument(
        "--events",
        type=Path,
        metavar="FILE",
        help="append every event of the job to FILE, one JSON object per line",
    )
    add_page(group)
    group.add_argument(
        "--sample-ledger",
        type=Path,
        metavar="DIR",
        help="record in DIR which samples each worker trains; see `farandole ledger check DIR`",
    )
    add_loudness(group)


def _state(text: str) -> Path | str:
    return text if text.startswith("etcd://") else Path(text)


def _address(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("address of the coordinator").add_argument
    add(
        "--host",
        default="",
        help="address at which other machines reach this one (default: loopback; with hosts that are other machines "
        "every address at which they may reach it)",
    )
    add("--port", type=int, default=0, help="default: a free port")
    add(
        "--state",
        type=_state,
        metavar="DIR",
        help="keep the state of the job in DIR, which only its owner can enter: when this command was killed, the same "
        "command, on this machine or another one that has DIR, continues the job with the agents of other machines. "
        "DIR/job is the --job-file unless another one is given. Instead of DIR, etcd://HOST[:PORT][,...]/PREFIX keeps "
        "the state in etcd, below the key PREFIX, with the identity in etcdctl's variables (ETCDCTL_USER, "
        "ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY); it needs --token-file",
    )
    add(
        "--patience",
        type=float,
        metavar="S",
        help="with --state: how many seconds agents of other machines keep their workers while this command does not "
        f"run (default: {STATE_PATIENCE_S:g})",
    )
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="allow agents of other machines to join that have a copy of this file; it is created if it does not exist",
    )
    add(
        "--job-file",
        type=Path,
        metavar="FILE",
        help="write addresses and token to FILE, which only its owner can read, and allow agents to join with it "
        "(`farandole agent --job-file FILE`); for a folder that the machines share (with --slurm: a file in "
        "~/.farandole)",
    )
    add(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt TCP connections with the certificates in DIR, which `farandole certificates DIR` makes; "
        "each machine of the job needs a copy, those of --hosts at the same path",
    )
    add(
        "--local-slots",
        type=int,
        metavar="N",
        help="with --token-file or --job-file: number of workers on this machine; 0: all workers run on machines "
        "that join (default: all workers)",
    )


# Options that other commands have, too --------------------------------------------------------------------------------


def add_page(group: argparse._ActionsContainer) -> None:
    """Add --page, --traces and --progress."""
    group.add_argument(
        "--page",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="serve the live page of the job, and metrics for Prometheus; --page=HOST:PORT: at that address (default: "
        "127.0.0.1:8470, or the next port that is free); needs the extra farandole[page]",
    )
    group.add_argument(
        "--traces",
        nargs="?",
        const="",
        metavar="URL",
        help="export regroups and checkpoints as spans of OpenTelemetry, over HTTP to the collector that its "
        "environment variables name (default: http://localhost:4318/v1/traces); --traces=URL: to that address. The "
        "process of the page does it, so the page is served, too; needs the extra farandole[traces]",
    )
    group.add_argument(
        "--progress",
        choices=PROGRESS,
        default=PROGRESS[0],
        help="a line at the bottom of the terminal with epoch, step, samples per second and workers; auto: where "
        "standard error is a terminal that can redraw it, and standard output is not a pipe, unless -q is given "
        "(default: auto)",
    )


def add_loudness(group: argparse._ActionsContainer, every_event: str = "show every event of the job") -> None:
    """Add --quiet and --verbose. `every_event`: the text of --verbose."""
    loudness = group.add_mutually_exclusive_group()
    group.set_defaults(loudness="NORMAL")
    for flags, name, text in (
        (("-q", "--quiet"), "QUIET", "show only warnings and the result"),
        (("--verbose",), "VERBOSE", every_event),
    ):
        loudness.add_argument(*flags, dest="loudness", action="store_const", const=name, help=text)
