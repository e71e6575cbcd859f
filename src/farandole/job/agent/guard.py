"""The agent's guard, which ensures that no worker outlives its agent: a small process (guard_process.py) that kills the
workers' groups when the agent is gone, also after a kill -9 of it, and removes the files that they leave on disk.

PR_SET_PDEATHSIG (man 2 prctl) would do less: it reaches a worker but not its loader processes, and fires when the
thread that started the worker ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from farandole.base.wire.sockets import can_write

_SCRIPT = Path(__file__).with_name("guard_process.py")
_STOP_S = 1.0


class Guard:
    """The agent's handle on its guard process. The calls do not block.

    If the guard is killed, the next call starts another one, which watches the same groups.

    scratch          a folder that it removes as well when the agent is gone
    silence_limit_s  it also kills the groups when it received nothing for this time: the agent is stopped
    last_message     what it sends when it has killed the groups: the descriptor of a connection, and the bytes
    """

    def __init__(
        self, scratch: Path, silence_limit_s: float | None = None, last_message: tuple[int, bytes] | None = None
    ) -> None:
        self._scratch, self._silence_limit_s = scratch, silence_limit_s
        self._last_message = last_message
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: set[int] = set()

    def start(self) -> None:
        """Start the guard. Raises OSError when that is impossible.

        Python keeps the other end of its stdin out of all other children of this process: the end of this
        process, and nothing else, ends the stream.
        """
        arguments, descriptors = [str(self._scratch), str(self._silence_limit_s or 0)], []
        if self._last_message is not None:
            descriptor, data = self._last_message
            arguments += [str(descriptor), data.hex()]
            descriptors.append(descriptor)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C at the agent's terminal must not reach the guard
        )

    def watch(self, pgid: int) -> None:
        """Kill this process group when the agent is gone."""
        self._watched.add(pgid)
        self._send_command(f"watch {pgid}\n")

    def heartbeat(self) -> None:
        """Tell the guard that the agent is not stopped. Does nothing where silence has no limit."""
        process = self._process
        if self._silence_limit_s is None or process is None or process.stdin is None:
            return
        if can_write(process.stdin, within_s=0):  # else the guard itself is stopped: do not wait for it
            self._send_command("heartbeat\n")

    def release(self, pgid: int) -> None:
        """Forget this process group; call it when the group was killed, before its number can be used again."""
        self._watched.discard(pgid)
        self._send_command(f"release {pgid}\n")

    def renew(self, last_message: tuple[int, bytes] | None) -> None:
        """Let another process watch the same groups, which will send this last message. Does nothing after stop(): a
        connection that an agent has begun to open may be there only after its end. Raises OSError when the process
        cannot be started; then nothing changes."""
        if self._process is None:
            return
        before, kept = self._process, self._last_message
        self._last_message = last_message
        try:
            self._start_again()
        except OSError:
            self._process, self._last_message = before, kept
            raise
        watching, self._process = self._process, before
        self.stop()
        self._process = watching

    def stop(self) -> None:
        """End the guard; no process is killed. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(b"stop\n", timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send_command(self, line: str) -> None:
        process = self._process
        assert process is not None, "call start() first"
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode())
        except BrokenPipeError:
            process.stdin.close()
            process.wait()
            self._start_again()

    def _start_again(self) -> None:
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        watched = "".join(f"watch {pgid}\n" for pgid in sorted(self._watched))
        with contextlib.suppress(BrokenPipeError):  # killed again already: the next call handles it
            self._process.stdin.write(watched.encode())
