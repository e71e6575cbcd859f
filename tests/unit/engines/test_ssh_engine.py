"""The command line of the ssh client, and what its end means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.base.membership import Address
from farandole.job.engines.engine_interface import AgentOrder
from farandole.job.engines.host_list import SshSettings
from farandole.job.engines.ssh_engine import SshEngine, exit_of_ssh, ssh_command

TOKEN = b"0123456789abcdef" * 4
ORDER = AgentOrder("b", 2, (Address("10.0.0.1", 29400), Address("10.1.0.1", 29400)), TOKEN, folder="/data/my job")


def test_the_command_has_all_settings_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/our code")
    settings = SshSettings(port=2222, identity_file="/keys/id", python="/opt/python")
    command = SshEngine(settings, lambda event: None).command(ORDER)
    assert command[0] == "ssh"
    text = " ".join(command)
    assert " -p 2222 -i /keys/id -- b " in text
    assert command[-1].startswith(
        """exec env PATH=/opt:"$PATH" 'PYTHONPATH=/our code' /opt/python -m farandole agent --join """
    )
    assert "--join 10.0.0.1:29400,10.1.0.1:29400 --host b --slots 2" in command[-1]
    assert "--token-file - " in command[-1]
    assert command[-1].endswith("--folder '/data/my job'")
    assert TOKEN.decode() not in text


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("chosen", [False, True])
def test_python_in_the_command_is_that_of_the_launcher_or_the_one_beside_a_chosen_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: bool
) -> None:
    program(tmp_path / "activated" / "python", "")
    program(tmp_path / "a venv" / "python", "")
    program(tmp_path / "a venv" / "interpreter", "command -v python")
    monkeypatch.setenv("PATH", f"{tmp_path / 'activated'}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a venv" / "interpreter"))
    settings = SshSettings(python=sys.executable if chosen else "")
    remote = ssh_command(settings, "b", ["agent"])[-1]
    there = subprocess.run(["/bin/sh", "-c", remote], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert there.stdout.strip() == str(tmp_path / ("a venv" if chosen else "activated") / "python")


@pytest.mark.parametrize(
    ("code", "last_lines", "reason", "is_final", "are_workers_gone"),
    [
        (0, "", "", False, True),
        (255, "b: Permission denied (publickey).", "`ssh b true` must work without a password", True, False),
        (255, "Connection to b closed by remote host.", "closed by remote host", False, False),
        (255, "Timeout, server b not responding.", "not responding", False, False),
        (127, "sh: 1: exec: /py: not found", "/py cannot be run there (sh: 1: exec: /py: not found)", True, True),
        (1, "/py: No module named farandole", "Farandole is not installed for /py there", True, True),
        (2, "[farandole] 10.0.0.1:1 refuses this agent: x", "refuses this agent: x", True, True),
        (1, "[farandole] no process listens", "no process listens", False, True),
        (-9, "", "its agent was killed by signal 9", False, False),
    ],
)
def test_the_end_of_the_client(code: int, last_lines: str, reason: str, is_final: bool, are_workers_gone: bool) -> None:
    end = exit_of_ssh(code, last_lines, "/py", "b")
    assert reason in end.reason
    assert (end.is_final, end.are_workers_gone) == (is_final, are_workers_gone)
