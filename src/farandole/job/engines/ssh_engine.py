"""The engine of hosts that are reached by ssh, with the system's client: one connection for each host carries the
agent's standard input and its report. All else travels over the agent's own connection to the coordinator.

When the client or this process ends, sshd closes the agent's standard input, which ends the agent.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence

from farandole.base.env import inherited_environment
from farandole.base.events.event import Event
from farandole.base.events.host_events import AgentPrinted
from farandole.job.engines.agent_process import AgentProcess, exit_of_agent
from farandole.job.engines.engine_interface import AgentExit, AgentOrder, StartFailed
from farandole.job.engines.host_list import SshSettings

_CONNECT_S = 10
_ALIVE_EVERY_S, _ALIVE_TIMES = 5, 3  # the coordinator detects a silent host sooner; this ends the client
_SSH_FAILED = 255  # ssh(1), EXIT STATUS
_NOT_FOUND = (126, 127)  # of the remote shell
_OTHER_PYTHON = "give --remote-python PATH (farandole.run: executable=PATH)"
# What the client prints when a connection that worked has ended (OpenSSH 9.2: clientloop.c, packet.c).
_ENDED = ("closed by remote host", "Broken pipe", "Connection reset", "not responding")


class SshEngine:
    """Starts agents by ssh. `on_event` gets the lines that they print."""

    def __init__(self, settings: SshSettings, on_event: Callable[[Event], None]) -> None:
        self._settings, self._on_event = settings, on_event

    async def start(self, order: AgentOrder) -> AgentProcess:
        """Start the agent on the host of this name, or raise StartFailed."""
        key = self._settings.identity_file
        if key and not os.path.isfile(key):  # otherwise ssh tries without it
            raise StartFailed(f"--ssh-identity-file {key}: no such file", is_final=True)

        def on_line(line: str) -> None:
            self._on_event(AgentPrinted(order.host, line))

        def judge(code: int, last_lines: str) -> AgentExit:
            return exit_of_ssh(code, last_lines, self._settings.python or sys.executable, order.host)

        return await AgentProcess.start(self.command(order), order, on_line, judge)

    async def close(self) -> None:
        """Do nothing: the agents are closed already."""

    def command(self, order: AgentOrder) -> list[str]:
        """Return the command that runs the agent; it contains no secret."""
        return ssh_command(self._settings, order.host, order.arguments())


def ssh_command(settings: SshSettings, host: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `farandole` with these arguments on the host."""
    variables = inherited_environment()
    search_path = variables.get("PYTHONPATH", "")  # for a Farandole that is not installed
    # sshd gives a command the system's PATH: without ours `python` would be another one than in an activated
    # environment. Where another interpreter was chosen, `python` is the one beside it.
    programs = os.path.dirname(settings.python) if settings.python else variables.get("PATH", "")
    path = f'PATH={shlex.quote(programs)}:"$PATH" ' if programs else ""
    remote = [f"PYTHONPATH={search_path}"] if search_path else []
    remote += [settings.python or sys.executable, "-m", "farandole", *arguments]
    return [
        *(settings.program, "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}"),
        *("-o", f"ServerAliveInterval={_ALIVE_EVERY_S}", "-o", f"ServerAliveCountMax={_ALIVE_TIMES}"),
        *(("-p", str(settings.port)) if settings.port is not None else ()),
        *(("-i", settings.identity_file) if settings.identity_file else ()),
        *("--", host, f"exec env {path}{shlex.join(remote)}"),
    ]


def exit_of_ssh(code: int, last_lines: str, python: str, host: str) -> AgentExit:
    """Return what the exit code of the client and the last lines of its output mean."""
    if code == _SSH_FAILED:
        has_ended = any(text in last_lines for text in _ENDED)
        hint = "" if has_ended else f"; `ssh {host} true` must work without a password"
        reason = f"ssh: {last_lines or 'the connection failed'}{hint}"
        return AgentExit(reason, is_final=not has_ended, are_workers_gone=False)
    if code in _NOT_FOUND:
        return AgentExit(f"{python} cannot be run there ({last_lines}): {_OTHER_PYTHON}", is_final=True)
    return exit_of_agent(code, last_lines, f"for {python} there", f"install it, or {_OTHER_PYTHON}")
