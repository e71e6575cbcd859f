"""The arguments of `farandole run` and `horovodrun`: options, which are checked, and a command, which is left as it is.
Used by cli.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farandole.base.config import JobConfig, parse_preemption
from farandole.base.env import (
    BALANCE,
    CheckpointEnv,
    JobEnv,
    environment_of,
    read_job_env,
    read_slurm_variables,
    read_start_timeout_s,
    read_timeline,
    strict_environment,
)
from farandole.errors import ConfigError
from farandole.job.engines.host_list import Hosts, HostSlots, PodSelection, SshSettings, chosen_hosts
from farandole.job.launch.command import alias_environment, checked
from farandole.job.launch.job_spec import PATIENCE_S, JobSpec
from farandole.job.launch.joining import (
    STORE_IS_PLAIN,
    check_address,
    check_encryption,
    joining,
    local_hosts,
    slurm_job_file,
    source_of_hosts,
    state_job_file,
    tls_folder,
)
from farandole.job.launch.page_address import page_options
from farandole.job.launch.run_parser import CHECKPOINT_DEFAULTS, STATE_PATIENCE_S, run_parser
from farandole.registry import factory


@dataclass(frozen=True)
class Program:
    """The name by which the command line was called.

    is_horovodrun  defaults are Horovod's: jobs are elastic only on request, the loss of a worker bans its host, and
                   scripts find `horovod`
    """

    name: str = "farandole run"
    is_horovodrun: bool = False


FARANDOLE_RUN = Program()
HOROVODRUN = Program("horovodrun", is_horovodrun=True)


def parse_run(arguments: Sequence[str], program: Program = FARANDOLE_RUN) -> JobSpec:
    """Parse the arguments after the program's name. From the first word on that is not one of our options, they are the
    user's command and are not parsed. Raises SystemExit when they cannot work."""
    parser, value_counts = run_parser(program.name)
    ours, command = split_command(arguments, value_counts)
    options = parser.parse_args(ours)
    try:
        return _job_spec(options, command, program)
    except ConfigError as error:
        parser.error(str(error))


def split_command(arguments: Sequence[str], value_counts: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Split our options from the user's command: it begins at the first word that is neither an option nor the value of
    one, or after `--`. `value_counts`: the number of values of each option; 0 if absent."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        if arguments[index] == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        index += 1 + value_counts.get(arguments[index], 0)
    return list(arguments[:index]), list(arguments[index:])


def _job_spec(options: argparse.Namespace, command: Sequence[str], program: Program) -> JobSpec:
    options.job_file = state_job_file(options) or options.job_file
    hosts = _hosts(options)
    slurm = factory("Slurm allocation")(read_slurm_variables(), options.slots) if options.slurm else None
    job_file = options.job_file
    if slurm is not None and job_file is None:
        job_file = slurm_job_file(slurm.job)
    listed = hosts if isinstance(hosts, tuple) else None
    config = _job_config(options, program, listed if slurm is None else slurm.hosts)
    has_hosts = hosts is not None
    check_address(options.host, options.port, takes_agents=has_hosts or config.takes_agents)
    environment, notes = factory("Horovod settings")(options)
    if program.is_horovodrun and options.max_num_proc is not None and not _asks_for_elasticity(options):
        notes.append(
            "--max-np has no effect: the size of the job is fixed, as under Horovod, without --min-np or "
            "--host-discovery-script"
        )
    notes += _in_vain(options)
    if options.horovod or program.is_horovodrun:
        environment |= alias_environment()
    run_command = tuple(checked(command))
    strict = _strict_shards(options, config)
    if strict:
        environment |= strict_environment()
        if config.max_np is None and config.fills_slots:
            config = dataclasses.replace(config, max_np=strict)
    ledger = ""
    if options.sample_ledger is not None:
        from farandole.job.launch.job_files import ready_ledger_folder

        # A job that may resume from a checkpoint may continue its ledger, too.
        ledger = str(ready_ledger_folder(options.sample_ledger, may_hold_records=options.checkpoint is not None))
    job_env = JobEnv(
        transport=options.transport or read_job_env().transport,
        sample_ledger=ledger,
        in_place=config.num_proc if options.in_place else 0,
        strict=strict > 0,
        shards=strict or (options.max_num_proc or 0),
        audit=JobEnv().audit if options.audit is None else options.audit,
        hash_every=options.hash_every or 0,
        balance=_balance(options),
    )
    check_encryption(config.tls, job_env.transport)
    if config.tls and (config.takes_agents or has_hosts):
        notes.append(STORE_IS_PLAIN)
    environment |= environment_of(job_env)
    if options.balance is not None:
        environment[BALANCE] = options.balance  # "off", too: the variable may be set outside
    if options.fork_server == "on":
        from farandole.job.agent.spawner import forkable

        if forkable(run_command) is None:
            notes.append(
                "--fork-server on has no effect: the command is not of the form python script.py or python -m module, "
                "or its Python is not that of Farandole"
            )
    timeline = environment.get("HOROVOD_TIMELINE") or read_timeline()
    return JobSpec(
        config=config,
        command=run_command,
        environment=environment,
        hosts=hosts,
        joining=joining(options.token_file, job_file, options.host_discovery_script),
        ssh=_ssh(options),
        slurm=slurm,
        requeues=options.slurm_requeue,
        pods=_pods(options),
        remote_folder=options.remote_folder or "",
        interfaces=tuple(name for each in options.nics or () for name in each.split(",") if name),
        host=options.host,
        port=options.port,
        preemption=parse_preemption(options.preemption),
        fork_server=options.fork_server,
        checkpoint=checkpoint_settings(options.checkpoint, options.checkpoint_every, options.checkpoint_keep),
        state=options.state,
        patience_s=options.patience or (PATIENCE_S if options.state is None else STATE_PATIENCE_S),
        output_directory=options.output_filename,
        prefix_timestamp=options.prefix_timestamp,
        events=options.events,
        timeline=None if timeline in ("", "DYNAMIC") else Path(timeline),
        page=page_options(options.page, options.traces),
        loudness=options.loudness,
        progress=options.progress,
        notes=tuple(notes),
    )


def _strict_shards(options: argparse.Namespace, config: JobConfig) -> int:
    """Return the number of shards of a strict job, 0 for other jobs. Raises ConfigError where it cannot be strict."""
    if options.audit is not None and not 0 <= options.audit <= 1:
        raise ConfigError(f"--audit is a fraction of the shards, from 0 to 1, got {options.audit:g}")
    if options.hash_every is not None and options.hash_every < 1:
        raise ConfigError(f"--hash-every is a number of steps, 1 or more, got {options.hash_every}")
    if not options.strict and options.shards is None:
        return 0
    flag = "--strict" if options.shards is None else f"--shards {options.shards}"
    why = "strict mode needs an fd.elastic.DataLoader, and adds up gradients in an order of its own"
    _refuse_others(options, flag, why)
    if options.transport == "nccl":
        raise ConfigError(f"{flag} and --transport nccl contradict each other: {why}; leave one of them out")
    most = config.most_workers
    if options.shards is not None and options.shards < most:
        raise ConfigError(
            f"--shards {options.shards} is below the largest number of workers, {most}: some would have nothing to "
            f"compute; give --shards {most} or more, or --max-np {options.shards}"
        )
    return most if options.shards is None else options.shards


def _balance(options: argparse.Namespace) -> Literal["auto", "off"]:
    """Return whether local batches follow the speed of the workers. Raises ConfigError where they cannot."""
    if options.balance != "auto":
        return options.balance or read_job_env().balance
    why = "only an fd.elastic.DataLoader can divide its global batches by the speed of the workers"
    _refuse_others(options, "--balance auto", why)
    return "auto"


def _refuse_others(options: argparse.Namespace, flag: str, why: str) -> None:
    """Raise ConfigError where an option is given, too, whose scripts have other loaders."""
    for is_given, what in ((options.horovod, "--horovod"), (options.in_place, "--in-place")):
        if is_given:
            raise ConfigError(f"{flag} and {what} contradict each other: {why}; leave one of them out")


def _pods(options: argparse.Namespace) -> PodSelection | None:
    if options.kubernetes is None:
        if options.kubernetes_namespace is not None:
            raise ConfigError("--kubernetes-namespace needs --kubernetes LABELS, the labels of the job's pods")
        return None
    if options.token_file is None:
        raise ConfigError("--kubernetes needs --token-file FILE, with which the agents in the pods join")
    return PodSelection(options.kubernetes, options.kubernetes_namespace or "")


def _ssh(options: argparse.Namespace) -> SshSettings:
    if options.ssh_port is not None and not 0 < options.ssh_port <= 65535:
        raise ConfigError(f"--ssh-port must be between 1 and 65535, got {options.ssh_port}")
    return SshSettings(options.ssh_port, options.ssh_identity_file or "", options.remote_python or "")


def _in_vain(options: argparse.Namespace) -> list[str]:
    """Return our options that have no effect without another one."""
    notes = []
    schedule = [(options.checkpoint_every, "--checkpoint-every"), (options.checkpoint_keep, "--checkpoint-keep")]
    given = [flag for value, flag in schedule if value not in CHECKPOINT_DEFAULTS]
    if given and options.checkpoint is None:
        have = "has" if len(given) == 1 else "have"
        notes.append(f"{' and '.join(given)} {have} no effect: no checkpoints are written without --checkpoint DIR")
    is_for_hosts = options.hosts is not None or options.host_discovery_script is not None or options.slurm
    if options.slots is not None and not is_for_hosts:
        notes.append(
            f"--slots-per-host {options.slots} has no effect: it applies to hosts without a number of slots, in "
            "--hosts or from --host-discovery-script, and to --slurm"
        )
    if _leaves_nodes_idle(options):
        notes.append("this Slurm job has several nodes, of which only this one is used: give --slurm to use them all")
    if options.slurm_requeue and not options.slurm:
        notes.append("--slurm-requeue has no effect without --slurm")
    if options.slurm_requeue and options.checkpoint is None:
        notes.append(
            "--slurm-requeue without --checkpoint DIR: after the announced end of the Slurm job the next run begins at "
            "the beginning"
        )
    return notes


def _leaves_nodes_idle(options: argparse.Namespace) -> bool:
    """Return whether the command runs once in a Slurm job of several nodes, and uses this one alone."""
    inside, has_agents = read_slurm_variables(), options.token_file is not None or options.job_file is not None
    if inside is None or inside.step_tasks or has_agents or source_of_hosts(options):
        return False
    return "," in inside.node_list or "[" in inside.node_list


def _job_config(options: argparse.Namespace, program: Program, hosts: tuple[HostSlots, ...] | None) -> JobConfig:
    num_proc = options.num_proc
    if num_proc is None and options.slurm and hosts:
        num_proc = sum(host.slots for host in hosts)
    if num_proc is None:
        slots = sum(host.slots for host in hosts) if hosts else 3
        raise ConfigError(f"the number of workers is missing: give -np, for example -np {slots}")
    has_script = options.host_discovery_script is not None
    is_elastic = _asks_for_elasticity(options)
    follows_horovod = program.is_horovodrun
    fewest, most, restarts = JobConfig.min_np, options.max_num_proc, JobConfig.restarts
    follows_hosts = has_script or options.kubernetes is not None
    # How many slots this machine has is known, so that all others are those of machines that join.
    grows_by_joining = options.local_slots is not None and most is not None and most > num_proc
    if not follows_horovod and follows_hosts and most is None:
        most = num_proc  # A job that follows its hosts has no other limit.
    if options.slurm and options.num_proc is not None and most is None:
        most = num_proc  # Without -np it trains on all nodes, also on those that join.
    if follows_horovod:
        fewest = num_proc
        if not is_elastic:
            most, restarts = num_proc, 0  # the loss of a worker ends the job
            if options.spares:
                raise ConfigError(
                    f"--spares {options.spares} needs a job that can continue when workers are lost: "
                    "give --min-np or --host-discovery-script"
                )
    config = JobConfig(
        num_proc=num_proc,
        min_np=fewest if options.min_num_proc is None else options.min_num_proc,
        max_np=most,
        restarts=restarts if options.restarts is None else options.restarts,
        spares=options.spares,
        elastic_timeout_s=options.elastic_timeout,
        start_timeout_s=start_timeout_s(options.start_timeout),
        detection_budget_s=options.detection_budget,
        grace_s=options.grace,
        step_timeout_s=options.step_timeout,
        on_failure=options.on_failure or ("host" if options.cooldown_range else "slot"),
        cooldown_range_s=tuple(options.cooldown_range) if options.cooldown_range else None,
        reset_limit=options.reset_limit,
        fills_slots=follows_hosts or grows_by_joining or options.slurm or (follows_horovod and is_elastic),
        takes_agents=options.token_file is not None or options.job_file is not None or options.slurm,
        max_restarts=options.max_restarts,
        tls=tls_folder(options.tls),
    )
    is_limited = hosts is not None and (options.slurm or not config.takes_agents)
    if hosts is not None and is_limited and (slots := sum(host.slots for host in hosts)) < num_proc:
        raise ConfigError(f"-np {num_proc} is above the {slots} slots of {', '.join(map(str, hosts))}")
    return config


def _asks_for_elasticity(options: argparse.Namespace) -> bool:
    """Return whether the options ask for elasticity, by Horovod's rules."""
    return options.host_discovery_script is not None or options.min_num_proc is not None


def start_timeout_s(given: float | None) -> float:
    """Return the time limit in seconds; None was given: that of the environment, or the default."""
    return read_start_timeout_s(JobConfig.start_timeout_s) if given is None else given


def _hosts(options: argparse.Namespace) -> Hosts:
    slots = 1 if options.slots is None else options.slots
    if slots < 1:
        raise ConfigError(f"--slots-per-host must be at least 1, got {slots}")
    if options.local_slots is not None:
        return local_hosts(options)
    if options.kubernetes is not None and options.token_file is not None:
        return ()  # all workers run in the pods
    return chosen_hosts(options.hosts, options.hostfile, options.host_discovery_script, slots)


def checkpoint_settings(place: str | Path | None, every: str, keep: int) -> CheckpointEnv | None:
    """Return the user's settings, checked; None for no checkpoints. Raises ConfigError."""
    from farandole.base.checkpoints.schedule import parse_every
    from farandole.base.checkpoints.store import normalized  # it takes time, for which --help need not wait

    parse_every(every)
    if keep < 1:
        raise ConfigError(f"--checkpoint-keep must be at least 1, got {keep}")
    return None if place is None else CheckpointEnv(normalized(str(place)), every, keep)
