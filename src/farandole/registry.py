"""What integrations register: the commands of `farandole`, and the factories for which the storeys below ask.

No other file names parts of a storey that it may not import; docs/architecture.md has the storeys. A part is written as
"module:name", and its module is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command of the command line, beside `run` and those that ask a running job (control_parser.py).

    usage     its line of `farandole --help`, without "farandole"; empty: none
    summary   what it does, for the same
    function  gets the arguments behind the name, and returns the exit code
    parser    returns the parser of its options, for completion
    takes_command  the command of a program follows
    """

    usage: str
    summary: str
    function: str
    parser: str
    takes_command: bool = False


COMMANDS = {
    "torchrun": Command(
        "torchrun [options] script.py ...",
        "train with torchrun's command line",
        "integrations.torchrun.torchrun_command:torchrun_command",
        "integrations.torchrun.torchrun_parser:torchrun_parser",
        takes_command=True,
    ),
    "page": Command(
        "",
        "serve the live page of a job, and its metrics",
        "integrations.page.page_command:page_command",
        "integrations.page.page_command:page_parser",
    ),
    "agent": Command(
        "agent --join HOST:PORT [options]",
        "offer this machine's slots to a job of another machine",
        "job.launch.agent_command:agent_command",
        "job.launch.agent_command:agent_parser",
    ),
    "kubernetes": Command(
        "kubernetes manifest [options] command ...",
        "print the objects of a job on Kubernetes",
        "integrations.kubernetes.kubernetes_command:kubernetes_command",
        "integrations.kubernetes.kubernetes_command:manifest_parser",
        takes_command=True,
    ),
    "slurm": Command(
        "slurm grow|shrink N [options]",
        "add nodes to a job, or remove them",
        "integrations.slurm.slurm_command:slurm_command",
        "integrations.slurm.slurm_command:slurm_parser",
    ),
    "ledger": Command(
        "ledger check DIR",
        "prove that each sample was trained once",
        "training.ledger.ledger_command:ledger_command",
        "training.ledger.ledger_command:ledger_parser",
    ),
    "doctor": Command(
        "doctor [options]",
        "look at this machine, and at hosts, before a job runs",
        "job.launch.doctor_command:doctor_command",
        "job.launch.doctor_command:doctor_parser",
    ),
    "certificates": Command(
        "certificates DIR",
        "make the certificates of a job whose connections are encrypted",
        "job.launch.certificates_command:certificates_command",
        "job.launch.certificates_command:certificates_parser",
    ),
    "completion": Command(
        "completion bash|zsh|fish",
        "print what lets a shell complete commands",
        "job.launch.completion_command:completion_command",
        "job.launch.completion_command:completion_parser",
    ),
    "demo": Command(
        "demo",
        "three workers train, one is killed, another one joins",
        "integrations.demo.demo_command:demo_command",
        "integrations.demo.demo_command:demo_parser",
    ),
}

EXTENDERS = {"named operations": "integrations.horovod.named.named_extender:NamedExtender"}
"""What extends the world of each worker (training/collectives/extension.py), in the order in which worlds have it."""

FACTORIES = {
    "alias folder": "integrations.horovod:alias_path",
    "Adasum's optimizer": "integrations.horovod.adasum_delta:DeltaOptimizer",
    "adoption of DDP": "integrations.ddp.module:adopt",
    "adoption of DDP in strict mode": "integrations.ddp.shard_module:adopt_for_shards",
    "adoption of shards": "integrations.sharding.adoption:adopt_shards",
    "check for the real Horovod": "integrations.horovod:refuse_beside_real_horovod",
    "commit loop": "integrations.horovod.commit_loop:CommitLoop",
    "default group": "integrations.torchrun.process_group.registration:open_default_group",
    "etcd state": "integrations.etcd.etcd_state:etcd_state",
    "Horovod option without effect": "integrations.horovod.launcher_options:reason_without_effect",
    "Horovod options": "integrations.horovod.launcher_options:add_options",
    "Horovod settings": "integrations.horovod.launcher_options:asked_for",
    "launcher in Slurm": "integrations.slurm.slurm_launcher:launch_in_slurm",
    "meeting": "integrations.torchrun.process_group.autoload:note_meeting",
    "note of a wrapped module": "integrations.ddp.module:note_wrapped",
    "path without a loader": "integrations.horovod.named_path:NamedPath",
    "pod watch": "integrations.kubernetes.kubernetes_pods:PodWatch",
    "Slurm allocation": "integrations.slurm.slurm_allocation:allocation_of",
    "Slurm node's name": "integrations.slurm.slurm_allocation:own_name",
    "Slurm node's slots": "integrations.slurm.slurm_allocation:own_slots",
    "values of a loop": "integrations.torchrun.in_place.loop_values:LoopValues",
}


def factory(name: str) -> Any:
    """Return the part that is registered under this name, one of FACTORIES."""
    return part(FACTORIES[name])


def part(place: str) -> Any:
    """Import "module:name", and return it."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"farandole.{module}"), name)
