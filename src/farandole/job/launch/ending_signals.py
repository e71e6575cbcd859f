"""The signals that end a launcher: Ctrl-C, SIGTERM, the hang-up of its terminal, and Slurm's announcement that the job
will end. Used by job_runner.py and agent_command.py."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from farandole.base.env import is_under_slurm

_ANNOUNCEMENTS = (signal.SIGUSR1, signal.SIGUSR2)  # sbatch --signal=B:USR1@90, and the default of submitit


@contextlib.contextmanager
def ending_signals(on_signal: Callable[[signal.Signals, bool], None]) -> Iterator[None]:
    """Call `on_signal(number, is_urgent)` on the running event loop for each SIGINT, SIGTERM and SIGHUP inside the
    block, and in a job of Slurm for SIGUSR1 and SIGUSR2. Enter it in the main thread.

    The second Ctrl-C or SIGTERM is urgent. An announcement of Slurm counts as none of them: its SIGTERM comes later. A
    SIGHUP counts as the first one and never as the second: the kernel and the shell both send it when a terminal
    closes, and systemd sends it right after SIGTERM (SendSIGHUP= in systemd.kill(5)). Where it is ignored already, as
    under nohup, it stays so.
    """
    was_asked = False

    def on_number(number: signal.Signals) -> None:
        nonlocal was_asked
        is_request = number in (signal.SIGINT, signal.SIGTERM)
        is_urgent = was_asked and is_request
        was_asked |= is_request
        on_signal(number, is_urgent)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if is_under_slurm():
        numbers += _ANNOUNCEMENTS
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, on_number, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
