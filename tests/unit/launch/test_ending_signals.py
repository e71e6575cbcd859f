"""The signals that end a launcher, in a job of Slurm and elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from farandole.job.launch.ending_signals import ending_signals


async def received(*numbers: signal.Signals) -> list[tuple[str, bool]]:
    """What is reported for these signals, and whether each is urgent."""
    found: list[tuple[str, bool]] = []
    with ending_signals(lambda number, is_urgent: found.append((number.name, is_urgent))):
        for count, number in enumerate(numbers, start=1):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(20):
                while len(found) < count:
                    await asyncio.sleep(0)
    return found


def test_in_a_job_of_slurm_its_announcement_ends_the_launcher_and_is_never_urgent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = asyncio.run(received(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM))
    assert found == [
        ("SIGUSR1", False),
        ("SIGUSR2", False),
        ("SIGTERM", False),  # which Slurm sends after the announcement
        ("SIGUSR1", False),
        ("SIGTERM", True),
    ]


def test_elsewhere_these_signals_keep_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before = signal.getsignal(signal.SIGUSR1)

    async def inside() -> object:
        with ending_signals(lambda number, is_urgent: None):
            return signal.getsignal(signal.SIGUSR1)

    assert asyncio.run(inside()) == before
