"""farandole.ray.run() runs a function as the workers of a job on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from farandole.base.config import JobConfig
from farandole.base.env import inherited_environment
from farandole.errors import ConfigError
from farandole.integrations.ray.ray_engine import RayEngine, RaySettings, name_of, slots_of
from farandole.job.launch.call_options import FunctionOptions, by_name, job_of
from farandole.job.launch.job_runner import Additions
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.run_function import run_function

T = TypeVar("T")


class RayOptions(FunctionOptions, total=False):
    """The further arguments of run()."""

    cpus_per_worker: float
    gpus_per_worker: float
    workers_per_node: int | None


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    **options: Unpack[RayOptions],
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
        options: The keyword arguments below; and, as in farandole.run(), reset_limit, cooldown_range, start_timeout,
            elastic_timeout, output_filename, prefix_output_with_timestamp, verbose, env, checkpoint_every,
            checkpoint_keep, tls, strict, shards and progress.

    Keyword Args:
        cpus_per_worker: The CPUs that Ray reserves for each worker; by default 1.
        gpus_per_worker: The GPUs that Ray reserves for each worker; by default none.
        workers_per_node: The most workers on each node; None: as many as it has room for.
        network_interfaces: As in farandole.run(). By default the address of a node in the cluster is tried first.
        checkpoint: As in farandole.run(); the place must be the same on all nodes.

    Returns:
        The results of the workers, by rank.

    Raises:
        FunctionFailed: A worker raised; with the traceback of the first one. It is a RuntimeError.
        ConfigError: Ray is not installed, the cluster has no room for a worker, or the arguments cannot work. It is a
            ValueError.
        TypeError: `func` is not a function, or cannot be sent.
    """
    given = by_name("farandole.ray.run", RayOptions, options)
    if not callable(func):
        raise TypeError(f"farandole.ray.run: the first argument must be the function for the workers, got {func!r}")
    settings = RaySettings(
        given.get("cpus_per_worker", 1.0), given.get("gpus_per_worker", 0.0), given.get("workers_per_node") or 0
    )
    room = room_for_workers(settings)
    if num_proc is None:
        num_proc = min(room, max_num_proc or room)
    sizes = JobConfig(
        num_proc,
        num_proc if min_num_proc is None else min_num_proc,
        max_num_proc,
        fills_slots=max_num_proc is not None and max_num_proc > num_proc,
    )
    return run_on_ray(lambda: func(*args, **(kwargs or {})), job_of(given, sizes), settings)


def run_on_ray(call: Callable[[], T], spec: JobSpec, settings: RaySettings) -> list[T]:
    """Run a function as run() does, as the workers of this job."""
    import ray

    engine = ray_engine(spec.config, settings)
    # By default the nodes of the cluster reach this one at the address that they know.
    spec = replace(spec, host="" if spec.interfaces else str(ray.util.get_node_ip_address()))
    return run_function(call, spec, Additions(make_engine=engine.report_to, finds_hosts=True))


def ray_engine(config: JobConfig, settings: RaySettings) -> RayEngine:
    """Return the engine of a job with this `config`. Its agents find Farandole where this process does."""
    inherited = inherited_environment()
    environment = {"PYTHONPATH": inherited["PYTHONPATH"]} if "PYTHONPATH" in inherited else {}
    is_unlimited = config.fills_slots and config.max_np is None
    return RayEngine(replace(settings, most_slots=0 if is_unlimited else config.most_slots, environment=environment))


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


__all__ = ["run"]
