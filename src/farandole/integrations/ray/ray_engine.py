"""The engine of a Ray cluster: on each node one actor that runs our agent as its child process, and ends with it. The
nodes of the cluster are the hosts of the job; ray_function.py starts a job on them.

Ray itself finds a dead node after 14 s, and a node that was cut off after a minute (ray 2.60). Here it only starts
agents: guards and the coordinator see sooner that workers are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from farandole.base.events.event import Event
from farandole.base.events.host_events import AgentPrinted
from farandole.job.engines.agent_process import exit_of_agent
from farandole.job.engines.discovery import DiscoveryFailed
from farandole.job.engines.engine_interface import AgentExit, AgentOrder, StartFailed
from farandole.job.engines.host_list import HostSlots

_POLL_S = 1.0
_PLACED_S = 20.0  # within which Ray starts an actor on a node with free resources
_END_S = 5.0
# What Ray sets for its own processes, and a worker must not take for its own.
_OF_AN_ACTOR = ["RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT"]
_NAME_DIGITS = 8  # of a node's identifier


@dataclass(frozen=True)
class RaySettings:
    """The resources that a job takes from the cluster.

    cpus_per_worker, gpus_per_worker  what Ray reserves for each worker; fractions are possible
    most_per_node                     the most workers on each node; 0: as many as it has room for
    most_slots                        the most slots of the job; 0: as many as the nodes have room for
    environment                       variables of the agents
    """

    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    most_per_node: int = 0
    most_slots: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


class RayEngine:
    """The nodes of the cluster to which this process is connected, and the agents on them. Also a HostDiscovery."""

    period_s = _POLL_S

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._on_event: Callable[[Event], None] = lambda event: None
        self._node_ids: dict[str, str] = {}  # by host name, in the order in which they were found
        self._draining: set[str] = set()

    def report_to(self, on_event: Callable[[Event], None]) -> RayEngine:
        """Return this engine, whose events go to `on_event` from now on."""
        self._on_event = on_event
        return self

    async def find(self) -> tuple[HostSlots, ...]:
        """Return the nodes that have room for workers, without those that Ray drains: their workers leave."""
        try:
            nodes, draining = await asyncio.to_thread(_nodes_of_the_cluster)
        except Exception as error:
            raise DiscoveryFailed(f"the Ray cluster does not answer: {error}") from error
        for node in nodes:
            if node["NodeID"] in draining and node["NodeID"] not in self._draining:
                self._draining.add(node["NodeID"])
                self._on_event(AgentPrinted(name_of(node), "Ray drains this node: its workers leave"))
        found = hosts_of(nodes, self._settings, draining, tuple(self._node_ids))
        self._node_ids |= {name_of(node): node["NodeID"] for node in nodes if name_of(node) in {h.name for h in found}}
        return found

    async def start(self, order: AgentOrder) -> RayAgent:
        """Start the agent on the node of this name. Raises StartFailed when the cluster does not have it any more."""
        settings = self._settings

        def create() -> tuple[Any, Any]:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            actor = (
                ray.remote(_agent_actor())
                .options(
                    num_cpus=order.slots * settings.cpus_per_worker,
                    num_gpus=order.slots * settings.gpus_per_worker,
                    max_restarts=0,
                    max_concurrency=3,  # serve() waits in one of its threads
                    scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_ids[order.host], soft=False),
                )
                .remote()
            )
            environment = {"OMP_NUM_THREADS": f"{max(1, int(settings.cpus_per_worker))}", **settings.environment}
            return actor, actor.serve.remote(order.arguments(), order.standard_input(), environment, _OF_AN_ACTOR)

        try:
            actor, ended = await asyncio.to_thread(create)
        except Exception as error:
            raise StartFailed(f"Ray cannot start an actor there: {_first_line(error)}") from error
        agent = RayAgent(actor, ended)
        agent.watch(lambda text: self._on_event(AgentPrinted(order.host, text)), order.slots * settings.cpus_per_worker)
        return agent

    async def close(self) -> None:
        """Do nothing: the agents are closed already, and the connection to the cluster belongs to the user."""


class RayAgent:
    """An agent that is the child of an actor. `ended` is the reference to the result of its serve()."""

    def __init__(self, actor: Any, ended: Any) -> None:
        self._actor = actor
        self._life = _future_of(ended)
        self._watch: asyncio.Task[None] | None = None

    def watch(self, on_line: Callable[[str], None], cpus: float) -> None:
        """Report once when Ray does not start the actor soon."""
        placed = _future_of(self._actor.is_placed.remote())

        async def report() -> None:
            await asyncio.wait({placed, self._life}, timeout=_PLACED_S, return_when=asyncio.FIRST_COMPLETED)
            if not placed.done() and not self._life.done():
                on_line(f"Ray has not started its actor for {_PLACED_S:g} s: are {cpus:g} CPUs free on this node?")

        self._watch = asyncio.create_task(report())

    async def wait(self) -> AgentExit:
        """Wait until the agent, or its actor, has ended."""
        import ray

        try:
            code, last_lines = await asyncio.shield(self._life)
        except ray.exceptions.RayError as error:
            return AgentExit(f"its actor has ended: {_first_line(error)}", are_workers_gone=False)
        return exit_of_agent(code, last_lines, "on this node", "install it on all nodes")

    def kill_workers(self) -> None:
        """End the agent and its workers at once."""
        with contextlib.suppress(Exception):  # the program has left the cluster, and the actors with it
            self._actor.end.remote()

    async def close(self) -> None:
        """End the agent and its actor."""
        import ray

        if not self._life.done():
            self.kill_workers()
            await asyncio.wait({self._life}, timeout=_END_S)
        with contextlib.suppress(Exception):  # as above
            await asyncio.to_thread(ray.kill, self._actor)
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        self._life.cancel()


def _future_of(reference: Any) -> asyncio.Future[Any]:
    """Return a future of this event loop for the result of a call. Its error may stay unread."""
    future: asyncio.Future[Any] = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _agent_actor() -> type:
    """Return the class of the actors. Ray pickles a class of a function by value: no module of this name is needed to
    report that Farandole is not installed on a node."""

    class FarandoleAgent:
        """Runs an agent as a child process, whose standard input ends with this process."""

        def __init__(self) -> None:
            self._input: Any = None

        def is_placed(self) -> bool:
            return True

        def serve(
            self, arguments: list[str], first_input: bytes, environment: dict[str, str], unset: list[str]
        ) -> tuple[int, str]:
            """Return the exit code of the agent and the last lines that it printed."""
            import collections
            import subprocess
            import sys

            words = [*(f"-u{name}" for name in unset), *(f"{name}={value}" for name, value in environment.items())]
            process = subprocess.Popen(
                ["env", *words, sys.executable, "-m", "farandole", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
            assert process.stdin is not None
            assert process.stderr is not None
            self._input = process.stdin
            self._input.write(first_input)
            lines: collections.deque[str] = collections.deque(maxlen=8)
            for line in process.stderr:
                lines.append(line.decode("utf-8", "backslashreplace").rstrip())
                sys.stderr.write(lines[-1] + "\n")
            return process.wait(), "; ".join(lines)

        def end(self) -> None:
            if self._input is not None:
                self._input.close()

    return FarandoleAgent


def _nodes_of_the_cluster() -> tuple[list[dict[str, Any]], set[str]]:
    """Return the nodes of the cluster, and the identifiers of those that Ray drains."""
    import ray
    from ray._private.state import state

    # Ray has no public function for it (ray 2.60: get_draining_nodes() of the module ray._private.state).
    draining = state.get_draining_nodes() if hasattr(state, "get_draining_nodes") else {}
    return ray.nodes(), set(draining)


def name_of(node: Mapping[str, Any]) -> str:
    """Return the host name of a node: several nodes may have one host name, or one address."""
    return f"{node['NodeManagerHostname'] or node['NodeManagerAddress']}-{node['NodeID'][:_NAME_DIGITS]}"


def slots_of(node: Mapping[str, Any], settings: RaySettings) -> int:
    """Return the number of workers for which a node has room, whether or not other jobs use a part of it."""
    resources = node["Resources"]
    slots = int(resources.get("CPU", 0) // settings.cpus_per_worker)
    if settings.gpus_per_worker:
        slots = min(slots, int(resources.get("GPU", 0) // settings.gpus_per_worker))
    return min(slots, settings.most_per_node) if settings.most_per_node else slots


def hosts_of(
    nodes: Iterable[Mapping[str, Any]], settings: RaySettings, draining: set[str], known: tuple[str, ...] = ()
) -> tuple[HostSlots, ...]:
    """Return the hosts of a job. The nodes that it has used before come first, and those with `most_slots` slots
    together are enough."""
    usable = {
        name_of(node): slots_of(node, settings) for node in nodes if node["Alive"] and node["NodeID"] not in draining
    }
    order = [name for name in known if name in usable] + [name for name in usable if name not in known]
    hosts: list[HostSlots] = []
    left = settings.most_slots or sum(usable.values())
    for name in order:
        if (slots := min(usable[name], left)) > 0:
            hosts.append(HostSlots(name, slots))
            left -= slots
    return tuple(hosts)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
