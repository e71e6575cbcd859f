"""The allocation of a Slurm job: its nodes, and how many workers each of them gets. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.base.env import SlurmVariables, each_node
from farandole.errors import ConfigError
from farandole.job.engines.host_list import HostSlots


@dataclass(frozen=True)
class SlurmAllocation:
    """An allocation.

    job    the number of the Slurm job
    slots  the number of workers of each node
    why    how that number was determined, for the user
    """

    job: str
    slots: Mapping[str, int]
    why: str

    @property
    def hosts(self) -> tuple[HostSlots, ...]:
        """The nodes as hosts, in Slurm's order."""
        return tuple(HostSlots(node, slots) for node, slots in self.slots.items())

    def __str__(self) -> str:
        nodes = f"{len(self.slots)} nodes" if len(self.slots) != 1 else "1 node"
        counts = sorted(set(self.slots.values()))
        slots = "1 slot" if counts == [1] else f"{'-'.join(map(str, counts))} slots"
        return f"Slurm job {self.job}: {nodes} ({', '.join(self.slots)}), {slots} on each ({self.why})"


def allocation_of(variables: SlurmVariables | None, slots_per_host: int | None) -> SlurmAllocation:
    """Return the allocation of which the environment tells.

    Args:
        variables: Those of the environment.
        slots_per_host: The user's number of workers for each node; None: that of Slurm's variables.

    Raises:
        ConfigError: There is no allocation, or this process is one of several tasks of a step.
    """
    if variables is None or not variables.node_list:
        raise ConfigError(
            "--slurm needs an allocation of Slurm, and SLURM_JOB_ID is not set: submit the command with sbatch, or run "
            "it under salloc"
        )
    if variables.step_tasks > 1:
        raise ConfigError(
            f"this command is one of {variables.step_tasks} tasks of a Slurm step; run it once, without srun: it "
            "starts an agent on each node itself"
        )
    nodes = expand_nodes(variables.node_list)
    counts, why = _slots(variables, len(nodes), slots_per_host)
    return SlurmAllocation(variables.job, dict(zip(nodes, counts, strict=True)), why)


def own_slots(variables: SlurmVariables) -> int:
    """Return the number of workers for the one node of a job that runs only an agent."""
    return _slots(variables, 1, None)[0][0]


def own_name(variables: SlurmVariables) -> str:
    """Return the name of that node in the job that it joins: several such jobs may share a node."""
    task = f"{variables.array_job}_{variables.array_task}" if variables.array_job else variables.job
    return f"{variables.node}-{task}"


def _slots(variables: SlurmVariables, nodes: int, given: int | None) -> tuple[list[int], str]:
    if given is not None:
        return [given] * nodes, "--slots-per-host"
    tasks, gpus = variables.asked_tasks_per_node, _gpus_per_node(variables)
    if tasks > 1:
        return [tasks] * nodes, "--ntasks-per-node"
    if gpus:
        return [gpus] * nodes, "one for each GPU"
    if not variables.tasks or not variables.tasks_per_node:
        return [1] * nodes, "--ntasks was not given"
    counts = each_node(variables.tasks_per_node, "SLURM_TASKS_PER_NODE")
    counts = counts * nodes if len(counts) == 1 else counts
    if len(counts) != nodes:
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE={variables.tasks_per_node} is not about the {nodes} nodes of "
            f"SLURM_JOB_NODELIST={variables.node_list}: give --slots-per-host"
        )
    return counts, "the tasks of each node"


def _gpus_per_node(variables: SlurmVariables) -> int:
    """Return --gpus-per-node, or the number on this node: a100:2,v100:2 are 4."""
    total = 0
    for part in filter(None, variables.gpus_per_node.split(",")):
        count = part.partition("(")[0].rpartition(":")[2]
        total += int(count) if count.isdecimal() else 1
    return total or variables.gpus_here


# Slurm's lists of nodes -----------------------------------------------------------------------------------------------


def expand_nodes(text: str) -> list[str]:
    """Return the names in a list of nodes: "node[1-2,07],gpu5" gives node1, node2, node07, gpu5. A name may have
    several brackets. Raises ConfigError for anything else."""
    names: list[str] = []
    entries = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)
    if ",".join(entries) != text:  # a bracket that is not closed
        entries = []
    for entry in entries:
        pieces = [
            _expand_range(piece[1:-1], text) if piece.startswith("[") else [piece]
            for piece in re.findall(r"\[[^\]]*\]|[^\[]+", entry)
        ]
        names += ["".join(parts) for parts in itertools.product(*pieces)]
    if not names or not all(re.fullmatch(r"[\w.:-]+", name) for name in names):
        raise ConfigError(f"{text!r} is not a list of nodes as Slurm writes it, such as node[1-3,7]")
    return names


def _expand_range(inner: str, text: str) -> list[str]:
    """Return the numbers of "1-3,07", with their leading zeros."""
    numbers: list[str] = []
    for part in inner.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"{text!r} is not a list of nodes as Slurm writes it: {part!r} is no range of numbers")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
