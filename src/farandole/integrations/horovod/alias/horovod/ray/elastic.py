"""ElasticRayExecutor: an elastic function on all nodes of a Ray cluster, which come and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from warnings import warn

from horovod.ray.runner import elastic_config, refuse_callbacks
from horovod.runner.common.util import timeout
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.settings import ElasticSettings

from farandole.base.config import JobConfig
from farandole.base.machine import now_s
from farandole.integrations.ray.ray_engine import RaySettings, hosts_of
from farandole.integrations.ray.ray_function import room_for_workers, run_on_ray
from farandole.job.launch.call_options import function_job


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster with room for workers."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu, self.cpus_per_slot, self.gpus_per_slot = use_gpu, cpus_per_slot, gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots by host."""
        import ray

        resources = RaySettings(self.cpus_per_slot, self.gpus_per_slot if self.use_gpu else 0)
        return {host.name: host.slots for host in hosts_of(ray.nodes(), resources, set())}


class TestDiscovery(RayHostDiscovery):
    """The nodes of the cluster, of which one is hidden, or shown again, from time to time.

    Args:
        min_hosts: With that many visible nodes a hidden one is shown again.
        max_hosts: With that many visible nodes one is hidden.
        change_frequency_s: The seconds between two changes.
        use_gpu, cpus_per_slot, gpus_per_slot: As those of RayHostDiscovery.
        verbose: Print the number of nodes at each call.
    """

    __test__ = False  # of the name pytest would make a test

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        if not _graceful:
            raise ValueError("TestDiscovery(_graceful=False): nodes are not killed here, only hidden")
        self._min_hosts, self._max_hosts = min_hosts, max_hosts
        self._change_frequency_s, self.verbose = change_frequency_s, verbose
        self._changed_s: float | None = None
        self._hidden: set[str] = set()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots by host, without the hidden ones."""
        hosts = super().find_available_hosts_and_slots()
        at_s = now_s()
        if self._changed_s is None:
            self._changed_s = at_s
        if at_s - self._changed_s >= self._change_frequency_s:
            self._change(hosts)
            self._changed_s = at_s
        visible = {host: slots for host, slots in hosts.items() if host not in self._hidden}
        if self.verbose:
            print(f"hosts: {len(hosts)}, of which {len(visible)} can be used")
        return visible

    def _change(self, hosts: Mapping[str, int]) -> None:
        self._hidden &= hosts.keys()
        visible = sorted(hosts.keys() - self._hidden)
        shows = len(visible) <= self._min_hosts
        if self._min_hosts < len(visible) < self._max_hosts:
            shows = random.random() < 0.5
        if shows and self._hidden:
            self._hidden.remove(random.choice(sorted(self._hidden)))
        elif not shows and visible:
            self._hidden.add(random.choice(visible))


class ElasticRayExecutor:
    """Runs an elastic function on the nodes of a Ray cluster.

    Args:
        settings: The result of create_settings().
        use_gpu: Whether workers need GPUs.
        cpus_per_slot: The CPUs that Ray reserves for each worker.
        gpus_per_slot: The GPUs that Ray reserves for each worker.
        env_vars: Variables of the workers.
        override_discovery: Accepted; the hosts are always the nodes of the cluster.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        nics: Any = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Return the settings of an executor."""
        for old, new, value in (("min_np", "min_num_proc", min_np), ("max_np", "max_num_proc", max_np)):
            if value is not None:
                warn(f"{old} is the old name of {new}", DeprecationWarning, stacklevel=2)
        fewest = min_num_proc if min_np is None else min_np
        return ElasticSettings(
            discovery=RayHostDiscovery(),
            min_num_proc=fewest,
            max_num_proc=max_num_proc if max_np is None else max_np,
            elastic_timeout=elastic_timeout,
            reset_limit=reset_limit,
            num_proc=fewest,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            start_timeout=timeout.Timeout(timeout_s, message="Timed out waiting for {activity}."),
            **kwargs,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot and not use_gpu:
            raise ValueError("gpus_per_slot is given, but use_gpu is False")
        gpus = gpus_per_slot or int(use_gpu)
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus or 1)
        self.settings, self.env_vars = settings, dict(env_vars or {})
        self.use_gpu, self.cpus_per_slot, self.gpus_per_slot = use_gpu, cpus_per_slot, gpus
        self._resources = RaySettings(cpus_per_slot, gpus)

    def start(self) -> None:
        """Check that the cluster has room for a worker. Raises ValueError when it has none."""
        room_for_workers(self._resources)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call the elastic function in each worker, and return the results of the workers that completed it, by
        rank."""
        refuse_callbacks(callbacks)
        settings = self.settings
        config = elastic_config(
            settings.min_num_proc,
            settings.max_num_proc,
            settings.reset_limit,
            settings.cooldown_range,
            settings.elastic_timeout,
            max(settings.start_timeout.remaining(), JobConfig.start_timeout_s),  # it may have begun long ago
        )
        environment = {name: str(value) for name, value in self.env_vars.items()}
        spec = function_job(config, interfaces=tuple(settings.nics or ()), environment=environment)
        return run_on_ray(worker_fn, spec, self._resources)
