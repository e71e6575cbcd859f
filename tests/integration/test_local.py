"""A whole job on this machine, ended in every way; nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.generation_events import GenerationStarted
from farandole.errors import ConfigError
from farandole.job.coordinator.transition import Outcome
from farandole.job.launch.job_runner import Surroundings, run_job
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.output import OutputOptions
from tests.support.jobs import SCRIPTS, processes_with
from tests.support.waiting import EventLog, run

TALKING_WORKER = (sys.executable, str(SCRIPTS / "talking_worker.py"))


def job(folder: Path, command: Sequence[str], events: EventLog, *, port: int = 0, grace_s: float = 0.2) -> Outcome:
    """Run it to its end; the command has to name the folder, so that leftovers can be found by it."""
    config = JobConfig(num_proc=2, grace_s=grace_s)
    output = OutputOptions(directory=folder, prefix_timestamp=False)
    spec = JobSpec(config=config, command=tuple(command), host="127.0.0.1", port=port)
    running = run_job(spec, Surroundings(on_event=events, output=output))
    try:
        return run(running)
    finally:
        assert processes_with(str(folder)) == []


class SignalAtStart(EventLog):
    """Sends these signals to this process, one after the other, once the job trains."""

    def __init__(self, *signals: signal.Signals) -> None:
        super().__init__()
        self._signals = signals

    def __call__(self, event: object) -> None:
        if isinstance(event, GenerationStarted):
            loop = asyncio.get_running_loop()
            for number in self._signals:
                loop.call_soon(os.kill, os.getpid(), number)


def test_a_command_that_needs_no_job_runs_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"print({str(tmp_path)!r})"]
    assert job(tmp_path, command, EventLog()).exit_code == 0


def test_a_command_that_fails_fails_the_job(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"raise SystemExit(5 if {str(tmp_path)!r} else 0)"]
    assert job(tmp_path, command, EventLog()).exit_code == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_with_grace(tmp_path: Path, number: signal.Signals) -> None:
    outcome = job(tmp_path, [*TALKING_WORKER, "obey", str(tmp_path)], SignalAtStart(number), grace_s=15.0)
    assert outcome.exit_code == 130
    assert number.name in outcome.reason


def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    twice = SignalAtStart(signal.SIGINT, signal.SIGINT)
    outcome = job(tmp_path, [*TALKING_WORKER, "stubborn", str(tmp_path)], twice, grace_s=15.0)
    assert outcome.exit_code == 130
    assert time.monotonic() - begin_s < 10.0


def test_a_port_in_use_is_an_error_and_starts_nothing(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="choose another --port"),
    ):
        job(tmp_path, [*TALKING_WORKER, "obey", str(tmp_path)], EventLog(), port=taken.getsockname()[1])
