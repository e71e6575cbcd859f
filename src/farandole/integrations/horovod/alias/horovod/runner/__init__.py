"""horovod.run(), and the namespace of arguments that it fills in."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from warnings import warn

from farandole.integrations.horovod.horovod_settings import SETTINGS

T = TypeVar("T")

_ARGUMENTS = (
    "binding_args check_build command config_file cooldown_range disable_cache elastic_timeout executable "
    "host_discovery_script hostfile hosts max_num_proc min_num_proc mpi_args nics output_filename "
    "prefix_output_with_timestamp reset_limit run_func slots ssh_identity_file ssh_port start_timeout tcp_flag "
    "use_gloo use_jsrun use_mpi verbose"
)
"""The arguments beside the settings of horovod_settings.py."""


class _HorovodArgs(Namespace):
    """The result of launch.parse_args(), with the default of one worker."""

    def __init__(self) -> None:
        super().__init__(**dict.fromkeys([*_ARGUMENTS.split(), *(each.name for each in SETTINGS)]), num_proc=1)


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Call `func(*args, **kwargs)` in every worker of a job, and return the results of those that completed it, by
    rank. See farandole.run(), which has the same parameters. Raises RuntimeError when a worker fails, ValueError for
    arguments that exclude each other."""
    from horovod.runner.launch import _run

    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both")
    for old, new, value in (
        ("np", "num_proc", np),
        ("min_np", "min_num_proc", min_np),
        ("max_np", "max_num_proc", max_np),
        ("network_interface", "network_interfaces", network_interface),
    ):
        if value is not None:
            warn(f"{old} is the old name of {new}", DeprecationWarning, stacklevel=2)
    if network_interface is not None:
        network_interfaces = network_interface.split(",")
    asked = _HorovodArgs()
    asked.num_proc = num_proc if np is None else np
    asked.min_num_proc = min_num_proc if min_np is None else min_np
    asked.max_num_proc = max_num_proc if max_np is None else max_np
    asked.slots, asked.reset_limit, asked.cooldown_range = slots, reset_limit, cooldown_range
    asked.hosts, asked.hostfile, asked.host_discovery_script = hosts, hostfile, host_discovery_script
    asked.start_timeout, asked.output_filename, asked.verbose = start_timeout, output_filename, verbose
    asked.ssh_port, asked.ssh_identity_file, asked.disable_cache = ssh_port, ssh_identity_file, disable_cache
    asked.use_gloo, asked.use_mpi, asked.mpi_args = use_gloo, use_mpi, mpi_args
    asked.nics = set(network_interfaces) if network_interfaces else None
    asked.executable = executable
    asked.run_func = lambda: func(*args, **(kwargs or {}))
    results: list[T] = _run(asked)
    return results
