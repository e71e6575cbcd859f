"""The engine of a Slurm allocation: `srun` starts one agent on each node, as a step of the job, and `squeue` tells
which nodes the job still has.

Each agent has an srun of its own, whose standard input is the agent's: srun passes its end on, which ends the agent. So
one node's agent can end, and be started again, while the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable

from farandole.base.env import slurm_client_environment
from farandole.base.events.event import Event
from farandole.base.events.host_events import AgentPrinted, HostDrained
from farandole.base.events.job_events import StopAsked
from farandole.base.machine import now_s
from farandole.errors import ConfigError
from farandole.integrations.slurm.slurm_allocation import SlurmAllocation, expand_nodes
from farandole.job.engines.agent_process import AgentProcess, exit_of_agent
from farandole.job.engines.discovery import DiscoveryFailed, HostsOver
from farandole.job.engines.engine_interface import AgentExit, AgentOrder, StartFailed
from farandole.job.engines.host_list import HostSlots

ANNOUNCEMENTS = ("SIGUSR1", "SIGUSR2")
"""The signals by which Slurm may announce the end of a job: sbatch(1), --signal."""

_LOOK_EVERY_S = 30.0  # the controller answers for the whole cluster; an agent's end is noticed at once without it
_FRESH_S = 5.0  # for which the answer is used again
_COMMAND_S = 30.0
_STEP_S = 60  # within which a node must have room for a step; without a limit srun waits for ever
_NO_BINDING = "lacks support for cpu binding"  # of srun, where there is nothing that --cpu-bind=none switches off
_NOT_FOUND = 2  # slurmstepd: execve(): No such file or directory
_KILLED = 128 + 9
# States in which a job has its nodes: squeue(1), JOB STATE CODES.
_HAS_NODES = ("RUNNING", "SUSPENDED", "RESIZING", "SIGNALING", "CONFIGURING", "STOPPED")


class SlurmEngine:
    """Starts agents in an allocation, and is the discovery of its nodes.

    python    the interpreter on the nodes; empty: the path of this one
    requeues  whether the job goes back into the queue when its end is announced
    """

    period_s = _LOOK_EVERY_S

    def __init__(self, allocation: SlurmAllocation, python: str, requeues: bool = False) -> None:
        self._allocation, self._keeps_growth = allocation, requeues
        self._on_event: Callable[[Event], None] = lambda event: None
        self._python = python or sys.executable
        self._lock = asyncio.Lock()
        self._found: tuple[HostSlots, ...] = ()
        self._found_s: float | None = None
        self.was_announced = False
        """Whether Slurm has announced the end of the job."""

    def report_to(self, on_event: Callable[[Event], None]) -> SlurmEngine:
        """Return this engine; `on_event` gets the lines that agents print from now on."""
        self._on_event = on_event
        return self

    async def find(self) -> tuple[HostSlots, ...]:
        """Return the nodes that the job has now. Raises HostsOver once it has none any more, and DiscoveryFailed when
        Slurm does not answer."""
        job = self._allocation.job
        code, output, error = await _run("squeue", "--noheader", "--jobs", job, "--format=%T|%N")
        if code != 0 and "Invalid job id" not in error:
            raise DiscoveryFailed(f"squeue --jobs {job} ended with exit code {code}: {error}")
        state, _, nodes = (output if code == 0 else "").partition("|")
        if state not in _HAS_NODES or not nodes:
            raise HostsOver(f"Slurm job {job} has no nodes any more ({state or 'it has ended'})")
        try:
            names = expand_nodes(nodes)
        except ConfigError as failure:
            raise DiscoveryFailed(f"squeue --jobs {job}: {failure}") from None
        self._found_s, self._found = now_s(), tuple(host for host in self._allocation.hosts if host.name in names)
        return self._found

    async def start(self, order: AgentOrder) -> AgentProcess:
        """Start the agent on the node of this name, or raise StartFailed."""
        async with self._lock:  # agents that start together ask once
            if self._found_s is None or now_s() - self._found_s > _FRESH_S:
                try:
                    await self.find()
                except DiscoveryFailed as error:
                    raise StartFailed(str(error)) from None
        if order.host not in [host.name for host in self._found]:
            raise StartFailed(f"it does not belong to Slurm job {self._allocation.job} any more")

        def on_line(line: str) -> None:
            if _NO_BINDING not in line:
                self._on_event(AgentPrinted(order.host, line))

        def judge(code: int, last_lines: str) -> AgentExit:
            lines = [each for each in last_lines.split("; ") if _NO_BINDING not in each]
            return exit_of_srun(code, "; ".join(lines), self._python)

        return await AgentProcess.start(self.command(order), order, on_line, judge, slurm_client_environment())

    async def close(self) -> None:
        """Cancel the jobs of `farandole slurm grow` that have not begun: they would find no job any more."""
        if self._keeps_growth and self.was_announced:
            return
        command = ("scancel", "--me", "--state=PENDING", f"--name={growth_name(self._allocation.job)}")
        with contextlib.suppress(DiscoveryFailed):
            await _run(*command)

    def command(self, order: AgentOrder) -> list[str]:
        """Return the command that runs the agent; it contains no secret."""
        return [
            *("srun", f"--jobid={self._allocation.job}", f"--nodelist={order.host}", "--nodes=1", "--ntasks=1"),
            # All of the node: by default a step has exclusively what it asks for.
            *("--overlap", "--mem=0", "--cpu-bind=none"),
            *(f"--immediate={_STEP_S}", "--kill-on-bad-exit=0", "--job-name=farandole-agent"),
            *(self._python, "-m", "farandole", *order.arguments()),
        ]

    def reason_to_end(self, event: Event) -> str:
        """Return why the job must end: a step of the allocation got the signal that announces its end, which all of its
        nodes share. Empty for other events."""
        if not isinstance(event, HostDrained) or event.host not in self._allocation.slots:
            return ""
        if event.reason.startswith(ANNOUNCEMENTS):
            self.was_announced = True
            return f"Slurm announced the end of job {self._allocation.job}: {event.reason} on {event.host}."
        return ""

    def watch(self, event: Event) -> None:
        """Note an announcement that this process got itself."""
        self.was_announced |= isinstance(event, StopAsked) and event.signal in ANNOUNCEMENTS

    async def requeue(self) -> str:
        """Put the job back into the queue. Return why that failed; empty when it did not."""
        try:
            code, _, error = await _run("scontrol", "requeue", self._allocation.job)
        except DiscoveryFailed as failure:
            return str(failure)
        return "" if code == 0 else f"scontrol requeue {self._allocation.job} ended with exit code {code}: {error}"


def exit_of_srun(code: int, last_lines: str, python: str) -> AgentExit:
    """Return what the exit code of srun and the last lines of its output mean."""
    if code == _KILLED:  # its guard has killed the workers, and told the coordinator
        return AgentExit(f"its agent was killed ({last_lines})", are_workers_gone=False)
    if "Node failure" in last_lines:
        return AgentExit(f"Slurm has lost the node ({last_lines})")
    if code == _NOT_FOUND and "execve" in last_lines:
        return AgentExit(f"{python} cannot be run there ({last_lines}): give --remote-python PATH", is_final=True)
    if code < 0:
        # The step lives on, and its agent serves until it is told that the job is over.
        return AgentExit(f"srun was killed by signal {-code}", are_workers_gone=False)
    return exit_of_agent(code, last_lines, f"for {python} there", "install it, or give --remote-python PATH")


def growth_name(job: str) -> str:
    """Return the name of the Slurm jobs that add nodes to this one."""
    return f"farandole-{job}"


async def _run(*command: str) -> tuple[int, str, str]:
    """Return exit code, output and error of one of Slurm's commands. Raises DiscoveryFailed when it cannot be run."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=slurm_client_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise DiscoveryFailed(
            f"{command[0]} cannot be run ({error.strerror}): --slurm needs Slurm's commands in PATH"
        ) from None
    try:
        async with asyncio.timeout(_COMMAND_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise DiscoveryFailed(f"{command[0]} did not answer within {_COMMAND_S:g} s") from None
    assert process.returncode is not None
    return process.returncode, _text(output), _text(errors)


def _text(data: bytes) -> str:
    return "; ".join(data.decode("utf-8", "backslashreplace").split("\n")).strip("; ")
