"""farandole.ray.run() runs a function as the workers of a job on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from farandole.base.config import JobConfig
from farandole.base.env import inherited_environment, read_start_timeout_s
from farandole.errors import ConfigError
from farandole.integrations.ray.ray_engine import RayEngine, RaySettings, name_of, slots_of
from farandole.job.launch.arguments import checkpoint_settings
from farandole.job.launch.output import output_options
from farandole.job.launch.run_function import StartSettings, encryption_of_call, run_function, strict_variables

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
    workers_per_node: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    network_interfaces: Iterable[str] | None = None,
    output_filename: str | None = None,
    prefix_output_with_timestamp: bool = False,
    verbose: bool = False,
    env: Mapping[str, str] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: str = "10m",
    checkpoint_keep: int = 2,
    tls: str | Path | None = None,
    strict: bool = False,
    shards: int | None = None,
    progress: str = "never",
) -> list[T]:
    """Call `func(*args, **kwargs)` in each worker of a job on a Ray cluster, and return their results, by rank.

    Uses the cluster to which this process is connected; without a connection it calls ray.init(). Nodes that join the
    cluster get workers, up to `max_num_proc`. The workers of a node that Ray drains leave at their next boundary.

    See the example of `run`.

    Args:
        func: The function for the workers. It travels as with farandole.run().
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of workers; None: as many as the cluster has room for now.
        min_num_proc: As in farandole.run().
        max_num_proc: As in farandole.run().
        cpus_per_worker: The CPUs that Ray reserves for each worker.
        gpus_per_worker: The GPUs that Ray reserves for each worker.
        workers_per_node: The most workers on each node; None: as many as it has room for.
        reset_limit: As in farandole.run().
        cooldown_range: Seconds, as in farandole.run().
        start_timeout: Seconds, as in farandole.run().
        elastic_timeout: Seconds, as in farandole.run().
        network_interfaces: As in farandole.run(). By default the address of a node in the cluster is tried first.
        output_filename: As in farandole.run().
        prefix_output_with_timestamp: As in farandole.run().
        verbose: As in farandole.run().
        env: As in farandole.run().
        checkpoint: As in farandole.run(); the place must be the same on all nodes.
        checkpoint_every: As --checkpoint-every.
        checkpoint_keep: As in farandole.run().
        tls: As in farandole.run().
        strict: As in farandole.run().
        shards: As in farandole.run().
        progress: As in farandole.run().

    Returns:
        The results of the workers, by rank.

    Raises:
        FunctionFailed: A worker raised; with the traceback of the first one. It is a RuntimeError.
        ConfigError: Ray is not installed, the cluster has no room for a worker, or the arguments cannot work. It is a
            ValueError.
        TypeError: `func` is not a function, or cannot be sent.
    """
    if not callable(func):
        raise TypeError(f"farandole.ray.run: the first argument must be the function for the workers, got {func!r}")
    settings = RaySettings(cpus_per_worker, gpus_per_worker, most_per_node=workers_per_node or 0)
    room = room_for_workers(settings)
    if num_proc is None:
        num_proc = min(room, max_num_proc or room)
    config = JobConfig(
        num_proc=num_proc,
        min_np=num_proc if min_num_proc is None else min_num_proc,
        max_np=max_num_proc,
        fills_slots=max_num_proc is not None and max_num_proc > num_proc,
        reset_limit=reset_limit,
        on_failure="host" if cooldown_range else "slot",
        cooldown_range_s=cooldown_range,
        start_timeout_s=read_start_timeout_s(JobConfig.start_timeout_s) if start_timeout is None else start_timeout,
        elastic_timeout_s=JobConfig.elastic_timeout_s if elastic_timeout is None else elastic_timeout,
        tls=encryption_of_call(tls),
    )
    return run_on_ray(
        lambda: func(*args, **(kwargs or {})),
        config,
        settings,
        interfaces=tuple(network_interfaces or ()),
        output=output_options(config, output_filename, prefix_output_with_timestamp),
        is_verbose=verbose,
        environment=strict_variables(strict, shards, config, env),
        checkpoint=checkpoint_settings(checkpoint, checkpoint_every, checkpoint_keep),
        progress=progress,
    )


def run_on_ray(
    call: Callable[[], T], config: JobConfig, settings: RaySettings, *, interfaces: tuple[str, ...] = (), **others: Any
) -> list[T]:
    """Run a function as run() does, for a job with this `config`. `others` are as in run_function()."""
    engine = ray_engine(config, settings)
    return run_function(
        call,
        config,
        hosts=engine,
        start=StartSettings(engine.report_to, interfaces, "" if interfaces else own_address()),
        **others,
    )


def ray_engine(config: JobConfig, settings: RaySettings) -> RayEngine:
    """Return the engine of a job with this `config`. Its agents find Farandole where this process does."""
    inherited = inherited_environment()
    environment = {"PYTHONPATH": inherited["PYTHONPATH"]} if "PYTHONPATH" in inherited else {}
    most = 0 if config.fills_slots and config.max_np is None else (config.max_np or config.num_proc) + config.spares
    return RayEngine(replace(settings, most_workers=most, environment=environment))


def room_for_workers(settings: RaySettings) -> int:
    """Return the number of workers for which the cluster has room now; at least 1.

    Raises:
        ConfigError: The cluster has no room for a worker, Ray is not installed, or the resources cannot work.
    """
    if settings.cpus_per_worker <= 0 or settings.gpus_per_worker < 0:
        raise ConfigError(
            "cpus_per_worker must be above 0 and gpus_per_worker at least 0, got "
            f"{settings.cpus_per_worker:g} and {settings.gpus_per_worker:g}"
        )
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed: pip install 'farandole[ray]'") from None
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            "farandole.ray.run cannot run in a process that is connected by Ray Client (ray://): its workers could not "
            "reach it. Start the program on a node of the cluster, for example with `ray job submit`"
        )
    if not ray.is_initialized():
        ray.init()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if room := sum(slots_of(node, settings) for node in nodes):
        return room
    have = ", ".join(
        f"{name_of(node)} has {node['Resources'].get('CPU', 0):g} CPUs and {node['Resources'].get('GPU', 0):g} GPUs"
        for node in nodes
    )
    raise ConfigError(
        f"no node of the Ray cluster has room for a worker with {settings.cpus_per_worker:g} CPUs and "
        f"{settings.gpus_per_worker:g} GPUs: {have}. Start nodes with more (ray start --num-cpus=N), or give smaller "
        "cpus_per_worker and gpus_per_worker"
    )


def own_address() -> str:
    """Return the address at which the nodes of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


__all__ = ["run"]
