"""A command as the workers of a job: the function behind `horovodrun --gloo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod.runner.common.util.settings import BaseSettings


def gloo_run(
    settings: BaseSettings, nics: object, env: Mapping[str, str], server_ip: object, command: Sequence[str]
) -> None:
    """Run `command` as `settings.num_proc` workers, with `env` in addition to this process's environment. Raises
    RuntimeError when one fails."""
    from horovod.runner import _HorovodArgs
    from horovod.runner.launch import _run_static

    args: Any = _HorovodArgs()
    args.num_proc, args.hosts = settings.num_proc, getattr(settings, "hosts", None)
    args.output_filename, args.verbose = settings.output_filename, bool(settings.verbose)
    args.prefix_output_with_timestamp = settings.prefix_output_with_timestamp
    args.command = list(command)
    _run_static(args, env)


def _get_min_start_hosts(settings: object) -> int:
    """Return 1: Farandole needs no second host to examine the network."""
    return 1
