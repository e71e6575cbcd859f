"""RayExecutor: functions as the workers of jobs on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.base.config import JobConfig
from farandole.integrations.ray.ray_engine import RaySettings
from farandole.integrations.ray.ray_function import room_for_workers, run_on_ray
from farandole.job.launch.call_options import function_job


@dataclass
class MiniSettings:
    """The result of RayExecutor.create_settings(). Values that Farandole does not use are kept and ignored."""

    nics: set[str] | None = None
    verbose: int = 1
    key: bytes | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False


class RayExecutor:
    """Runs functions as the workers of jobs on a Ray cluster.

    Each call of run(), execute() or execute_single() is a job with workers of its own, which end with it. Horovod keeps
    its workers until shutdown(). So an `executable_cls` serves a single call.

    Args:
        settings: The result of create_settings().
        num_workers: The number of workers; or num_hosts times num_workers_per_host.
        num_hosts: The number of nodes.
        num_workers_per_host: The number of workers on each of them.
        cpus_per_worker: The CPUs that Ray reserves for each worker.
        use_gpu: Whether workers need GPUs.
        gpus_per_worker: Their number.
        use_current_placement_group: Accepted, and ignored: workers are placed node by node.
        min_workers: For elastic functions: the fewest workers that may train, instead of num_workers.
        max_workers: The most workers; None: as many as the cluster has room for.
        reset_limit, cooldown_range, elastic_timeout: As the options of horovodrun.
        override_discovery: Accepted; the hosts are always the nodes of the cluster.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: set[str] | None = None,
    ) -> MiniSettings:
        """Return the settings of an executor. `ssh_str` is written to `ssh_identity_file`, as Horovod does."""
        if ssh_str and ssh_identity_file and not Path(ssh_identity_file).exists():
            descriptor = os.open(ssh_identity_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(ssh_str)
        return MiniSettings(
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            nics=nics,
        )

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers and (not min_workers or min_workers <= 0):
            raise ValueError("max_workers needs min_workers, which must be above 0")
        if min_workers and num_workers:
            raise ValueError("give min_workers, for an elastic function, or num_workers")
        if min_workers is None and num_workers is None and num_hosts is None:
            raise ValueError("give num_workers, num_hosts or min_workers")
        per_host = num_workers_per_host if num_hosts is not None else 0
        self.settings = settings
        self._resources = RaySettings(cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0.0, per_host)
        self._config = (
            elastic_config(min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout, settings.timeout_s)
            if min_workers is not None
            else fixed_config(num_workers or (num_hosts or 0) * num_workers_per_host, settings.timeout_s)
        )
        settings.elastic = min_workers is not None
        self._env: dict[str, str] = {}
        self._make_executable: Callable[[], Any] | None = None
        self._is_started = self._is_used = False

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Note the class of the object that each worker makes, and variables of the workers. Raises ValueError when the
        cluster has no room for a worker."""
        room_for_workers(self._resources)
        if executable_cls is not None:
            given, named = tuple(executable_args or ()), dict(executable_kwargs or {})
            self._make_executable = lambda: executable_cls(*given, **named)
        self._env = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        self._is_started, self._is_used = True, False

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call fn(object) in each worker, where the object is that of `executable_cls`, or None. Return the results by
        rank."""
        make = self._make_executable
        if make is not None and self._is_used:
            raise RuntimeError(
                "Farandole makes the object of executable_cls anew in each call, so what it kept is lost: do in one "
                "call of execute() what needs the same object"
            )
        self._is_used = True
        return self._run(lambda: fn(None if make is None else make()), callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call fn(*args, **kwargs) in each worker, and return the results by rank."""
        return self._run(lambda: fn(*(args or ()), **(kwargs or {})), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Do as run(), and return references at once. ray.get() waits for the results."""
        import ray

        size, run = self._config.num_proc, self._run
        job = ray.remote(num_cpus=0, max_retries=0, num_returns=size)(
            lambda: tuple(run(lambda: fn(*(args or ()), **(kwargs or {})), None))
        )
        references = job.remote()
        return [references] if size == 1 else list(references)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Do as execute(), in a job of one worker, and return its result."""
        before, self._config = self._config, fixed_config(1, self.settings.timeout_s)
        try:
            return self.execute(fn)[0]
        finally:
            self._config = before

    def shutdown(self) -> None:
        """Do nothing: no worker outlives its call."""
        self._is_started = False

    def _run(self, call: Callable[[], Any], callbacks: Sequence[Callable[..., Any]] | None) -> list[Any]:
        if not self._is_started:
            raise RuntimeError("call start() first")
        refuse_callbacks(callbacks)
        spec = function_job(self._config, interfaces=tuple(self.settings.nics or ()), environment=self._env)
        return run_on_ray(call, spec, self._resources)


def fixed_config(workers: int, start_timeout_s: float) -> JobConfig:
    """Return the configuration of a job of fixed size."""
    return JobConfig(
        num_proc=workers, min_np=workers, max_np=workers, restarts=0, start_timeout_s=start_timeout_s, on_failure="host"
    )


def elastic_config(
    fewest: int,
    most: int | None,
    reset_limit: int | None,
    cooldown_range: Sequence[float] | None,
    elastic_timeout_s: float | None,
    start_timeout_s: float,
) -> JobConfig:
    """Return the configuration of a job that follows the nodes of the cluster."""
    return JobConfig(
        num_proc=fewest,
        min_np=fewest,
        max_np=most,
        reset_limit=reset_limit,
        on_failure="host" if cooldown_range else "slot",
        cooldown_range_s=(cooldown_range[0], cooldown_range[1]) if cooldown_range else None,
        elastic_timeout_s=elastic_timeout_s or JobConfig.elastic_timeout_s,
        start_timeout_s=start_timeout_s,
        fills_slots=True,
    )


def refuse_callbacks(callbacks: Sequence[Callable[..., Any]] | None) -> None:
    """Raise ValueError when there are any."""
    if callbacks:
        raise ValueError(
            "callbacks, which get what workers log with horovod.ray.ray_logger, do not exist here; send values to the "
            "caller in the result of the function, or write them to a file"
        )
