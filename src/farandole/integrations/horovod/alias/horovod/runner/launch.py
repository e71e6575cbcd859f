"""The internals of horovodrun that programs call: parse its command line, and run the job."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from farandole.base.config import JobConfig
from farandole.base.env import read_start_timeout_s
from farandole.integrations.horovod.horovod_settings import SETTINGS, Given, check
from farandole.integrations.horovod.horovodrun import main as _horovodrun
from farandole.integrations.horovod.launcher_options import read_config_file
from farandole.job.engines.host_list import SshSettings, chosen_hosts
from farandole.job.launch.arguments import split_command
from farandole.job.launch.call_options import function_job
from farandole.job.launch.command import checked
from farandole.job.launch.run_function import FunctionFailed, run_and_wait, run_function
from farandole.job.launch.run_parser import run_parser
from horovod.common.util import gloo_built, mpi_built
from horovod.runner.common.util import config_parser
from horovod.runner.elastic import driver
from horovod.runner.mpi_run import mpi_run


def parse_args() -> Namespace:
    """Parse sys.argv as horovodrun does. Raises SystemExit for unknown arguments, ValueError for settings out of
    range."""
    parser, value_counts = run_parser("horovodrun")
    ours, command = split_command(sys.argv[1:], value_counts)
    args = parser.parse_args(ours)
    if args.num_proc is None:
        parser.error("the number of workers is missing: give -np N")
    args.command = command
    args.verbose = args.loudness == "VERBOSE"
    args.prefix_output_with_timestamp = args.prefix_timestamp
    if args.elastic_timeout == parser.get_default("elastic_timeout"):
        args.elastic_timeout = None
    if args.config_file is not None:
        _set_from_file(args)
    for setting in SETTINGS:
        if (value := getattr(args, setting.name)) is not None:
            check(setting, Given(value, setting.flag))
    args.run_func = args.executable = args.check_build = None
    return args


def _set_from_file(args: Namespace) -> None:
    file = read_config_file(args.config_file)
    for name, given in file.settings.items():
        if getattr(args, name) is None:
            setattr(args, name, given.value)
    args.use_gloo = args.use_gloo or (file.controller == "gloo" and not args.use_mpi)
    args.use_mpi = args.use_mpi or (file.controller == "mpi" and not args.use_gloo)


def run_commandline() -> int:
    """Run the command horovodrun and return its exit code."""
    return _horovodrun()


main = run_commandline


def run_controller(
    use_gloo: bool | None,
    gloo_run: Callable[[], object],
    use_mpi: bool | None,
    mpi_run: Callable[[], object],
    use_jsrun: bool | None,
    js_run: Callable[[], object],
    verbosity: int | None,
) -> None:
    """Call the requested one of the three; gloo_run by default. Raises ValueError when it is not available."""
    if not use_gloo and (use_mpi or use_jsrun):
        if not mpi_built():
            raise ValueError("Farandole does not use MPI: leave out --mpi and --jsrun")
        (mpi_run if use_mpi else js_run)()
    elif gloo_built():
        gloo_run()
    else:
        raise ValueError("no controller is available to start workers")


def _run(args: Namespace) -> Any:
    """Run the job of the arguments: a command, or `args.run_func`, whose results by rank are returned. Raises
    RuntimeError when the job fails."""
    if args.use_mpi:
        mpi_run()
    return _run_elastic(args) if _is_elastic(args) else _run_static(args)


def _is_elastic(args: Namespace) -> bool:
    return args.host_discovery_script is not None or args.min_num_proc is not None


def _run_static(args: Namespace, env: Mapping[str, str] | None = None) -> Any:
    """Run a job of fixed size: the loss of a worker ends it."""
    config = JobConfig(
        num_proc=args.num_proc,
        min_np=args.num_proc,
        max_np=args.num_proc,
        restarts=0,
        start_timeout_s=args.start_timeout or read_start_timeout_s(JobConfig.start_timeout_s),
        on_failure="host",
    )
    return _run_job(args, config, env)


def _run_elastic(args: Namespace) -> Any:
    """Run a job that follows its hosts, between the least and the largest number of workers."""
    config = JobConfig(
        num_proc=args.num_proc,
        min_np=args.min_num_proc or args.num_proc,
        max_np=args.max_num_proc,
        elastic_timeout_s=args.elastic_timeout or driver.ELASTIC_TIMEOUT_SECS,
        start_timeout_s=args.start_timeout or read_start_timeout_s(JobConfig.start_timeout_s),
        on_failure="host",
        cooldown_range_s=tuple(args.cooldown_range) if args.cooldown_range else None,
        reset_limit=args.reset_limit,
        fills_slots=True,
        waits_for_newcomers=True,
    )
    return _run_job(args, config)


def _run_job(args: Namespace, config: JobConfig, env: Mapping[str, str] | None = None) -> Any:
    spec = function_job(
        config,
        executable=args.executable,
        is_verbose=bool(args.verbose),
        hosts=chosen_hosts(
            args.hosts or None,
            str(args.hostfile) if args.hostfile else None,
            args.host_discovery_script or None,
            args.slots,
            driver.DISCOVER_HOSTS_FREQUENCY_SECS,
        ),
        ssh=SshSettings(args.ssh_port, args.ssh_identity_file or ""),
        interfaces=tuple(args.nics or ()),
        environment=config_parser.set_env_from_args(dict(env or {}), args),
        output_directory=None if args.output_filename is None else Path(args.output_filename),
        prefix_timestamp=bool(args.prefix_output_with_timestamp),
    )
    if args.run_func is not None:
        try:
            return run_function(args.run_func, spec)
        except FunctionFailed as error:
            raise RuntimeError(_failed(str(error))) from error
    outcome = run_and_wait(replace(spec, command=tuple(checked(args.command))))
    if outcome.exit_code != 0:
        raise RuntimeError(_failed(outcome.reason))
    return None


def _failed(reason: str) -> str:
    """Return the message by which programs recognize Horovod's failures."""
    return f"Horovod detected that one or more processes exited with non-zero status, so the job has ended: {reason}"
