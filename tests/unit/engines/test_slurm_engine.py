"""The commands of the Slurm engine, and what the end of srun means; with stand-ins for Slurm's commands."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from farandole.base.env import slurm_client_environment
from farandole.base.events.host_events import HostDrained
from farandole.base.events.job_events import StopAsked
from farandole.base.membership import Address
from farandole.integrations.slurm.slurm_allocation import SlurmAllocation
from farandole.integrations.slurm.slurm_engine import SlurmEngine, exit_of_srun
from farandole.job.engines.discovery import DiscoveryFailed, HostsOver
from farandole.job.engines.engine_interface import AgentOrder, StartFailed
from farandole.job.engines.host_list import HostSlots

TOKEN = b"0123456789abcdef" * 4
ORDER = AgentOrder("n2", 2, (Address("10.0.0.1", 2000),), TOKEN)


def engine(python: str = "/opt/python") -> SlurmEngine:
    return SlurmEngine(SlurmAllocation("7", {"n1": 2, "n2": 2}, "the test"), python)


def squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "squeue"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_command_gets_the_whole_node_and_has_no_secret() -> None:
    command = engine().command(ORDER)
    assert command[:5] == ["srun", "--jobid=7", "--nodelist=n2", "--nodes=1", "--ntasks=1"]
    assert {"--overlap", "--mem=0", "--cpu-bind=none"} <= set(command)
    assert command[command.index("/opt/python") :][:4] == ["/opt/python", "-m", "farandole", "agent"]
    assert TOKEN.decode() not in " ".join(command)


def test_srun_does_not_take_the_options_of_the_job() -> None:
    environ = {"SLURM_NTASKS": "8", "SLURM_GPUS_PER_TASK": "1", "SLURM_CONF": "/etc/s", "PATH": "/bin"}
    assert slurm_client_environment(environ) == {"SLURM_CONF": "/etc/s", "PATH": "/bin"}


def test_the_hosts_are_the_nodes_that_the_job_still_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, "echo 'RUNNING|n[2-9]'")
    assert asyncio.run(engine().find()) == (HostSlots("n2", 2),)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "it has ended"),
        ("echo 'TIMEOUT|n[1-2]'", "TIMEOUT"),
        ("echo 'RUNNING|'", "RUNNING"),
    ],
)
def test_an_allocation_without_nodes_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    squeue(tmp_path, monkeypatch, script)
    with pytest.raises(HostsOver, match=f"Slurm job 7 has no nodes any more .{says}"):
        asyncio.run(engine().find())


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "squeue --jobs 7 ended with exit code 1: Unable"),
        ("echo 'RUNNING|n[1'", "is not a list of nodes"),
    ],
)
def test_a_controller_that_does_not_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    squeue(tmp_path, monkeypatch, script)
    with pytest.raises(DiscoveryFailed, match=says) as caught:
        asyncio.run(engine().find())
    assert not isinstance(caught.value, HostsOver)


def test_without_slurms_commands_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiscoveryFailed, match=r"squeue cannot be run .*needs Slurm's commands in PATH"):
        asyncio.run(engine().find())


def test_no_agent_is_started_on_a_node_that_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, "echo 'RUNNING|n1'")
    with pytest.raises(StartFailed, match="it does not belong to Slurm job 7 any more"):
        asyncio.run(engine().start(ORDER))


@pytest.mark.parametrize(
    ("code", "lines", "reason", "is_final", "are_gone"),
    [
        (0, "", "", False, True),
        (137, "srun: error: n2: task 0: Killed", "its agent was killed", False, False),
        (1, "srun: error: Node failure on n2", "Slurm has lost the node", False, True),
        (2, "slurmstepd: error: execve(): /opt/python: No such file", "give --remote-python PATH", True, True),
        (1, "No module named farandole; srun: error: n2", "Farandole is not installed for /opt/python", True, True),
        (-9, "", "srun was killed by signal 9", False, False),
        (2, "farandole agent: refused", "refused", True, True),
    ],
)
def test_what_the_end_of_srun_means(code: int, lines: str, reason: str, is_final: bool, are_gone: bool) -> None:
    end = exit_of_srun(code, lines, "/opt/python")
    assert reason in end.reason
    assert (end.is_final, end.are_workers_gone) == (is_final, are_gone)


def test_the_announced_end_is_that_of_the_whole_allocation() -> None:
    slurm = engine()
    assert slurm.reason_to_end(HostDrained("n4-12", "SIGUSR1 was received", ())) == ""
    assert slurm.reason_to_end(HostDrained("n2", "SIGTERM was received", ())) == ""
    assert not slurm.was_announced
    assert "Slurm announced the end of job 7" in slurm.reason_to_end(HostDrained("n2", "SIGUSR1 was received", ()))
    assert slurm.was_announced


def test_a_signal_to_the_launcher_announces_the_end_as_well() -> None:
    slurm = engine()
    slurm.watch(StopAsked("SIGTERM", 5.0))
    assert not slurm.was_announced
    slurm.watch(StopAsked("SIGUSR2", 5.0))
    assert slurm.was_announced
