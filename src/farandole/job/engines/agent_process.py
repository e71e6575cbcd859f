"""An agent that is a child process of this one, or whose client is, as that of ssh. Engines use it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from farandole.job.engines.engine_interface import AgentExit, AgentOrder, StartFailed

_USAGE_ERROR = 2  # of an agent that would fail again: wrong arguments, a wrong token, another version
_MISSING = re.compile(r"No module named '?(farandole|msgspec|psutil|yaml|cloudpickle)\b")  # it, or what it imports
_LAST_LINES = 8
_END_S = 5.0  # from the end of its standard input to SIGKILL
_LINE_LIMIT = 1 << 16


class AgentProcess:
    """A process whose standard input is the agent's, and whose output is the agent's report.

    judge    tells what its exit code and the last lines of its report mean
    on_line  called with each line of its report
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_line: Callable[[str], None],
        judge: Callable[[int, str], AgentExit],
    ) -> None:
        self._process, self._on_line, self._judge = process, on_line, judge
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._kill_timer: asyncio.TimerHandle | None = None
        self._life = asyncio.create_task(self._live())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        order: AgentOrder,
        on_line: Callable[[str], None],
        judge: Callable[[int, str], AgentExit] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> AgentProcess:
        """Start the command, and give it the token. `environment`: None: that of this process. Raises StartFailed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                limit=_LINE_LIMIT,
                start_new_session=True,  # Ctrl-C at the terminal is for this process, which ends the job with grace
            )
        except OSError as error:
            raise StartFailed(f"{command[0]} cannot be started: {error.strerror}", is_final=True) from None
        assert process.stdin is not None
        process.stdin.write(order.standard_input())
        return cls(process, on_line, exit_of_agent if judge is None else judge)

    async def wait(self) -> AgentExit:
        """Wait until the process has ended."""
        await asyncio.shield(self._life)
        code = self._process.returncode
        assert code is not None
        return self._judge(code, "; ".join(self._last))

    def kill_workers(self) -> None:
        """End the agent and its workers at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._kill_timer is None:  # a client of a host that is gone does not end by itself
            self._kill_timer = asyncio.get_running_loop().call_later(_END_S, self._kill)

    async def close(self) -> None:
        """End the process."""
        self.kill_workers()
        await self._life
        if self._kill_timer is not None:
            self._kill_timer.cancel()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _live(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than _LINE_LIMIT, and dropped
                continue
            if not line:
                break
            text = line.decode("utf-8", "backslashreplace").rstrip()
            self._last.append(text)
            self._on_line(text)
        await self._process.wait()


def exit_of_agent(
    code: int, last_lines: str, where: str = "there", advice: str = "install it on all hosts"
) -> AgentExit:
    """Return what the exit code of `farandole agent` and the last lines of its standard error mean. A code below 0 is
    that of the signal that killed it. `where` and `advice`: where Farandole is not installed, and what to do then."""
    if code == 0:
        return AgentExit()
    if _MISSING.search(last_lines):
        return AgentExit(f"Farandole is not installed {where}: {advice} ({last_lines})", is_final=True)
    if code < 0:  # then its guard kills the workers, and tells the coordinator
        return AgentExit(f"its agent was killed by signal {-code}", are_workers_gone=False)
    return AgentExit(last_lines or f"its agent has ended with exit code {code}", is_final=code == _USAGE_ERROR)
