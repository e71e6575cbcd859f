"""Report this worker's status to its agent through a page of shared memory. Worker, collectives and state call it.

Every function may be called anywhere and at any time: without a page, in a process that no agent started, it does
nothing. A call costs well below a microsecond.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from types import TracebackType

from farandole.liveness import exit_notice
from farandole.liveness.status_page import MUTEX_AT, OwnStatusPage
from farandole.worker_status import Phase

DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
"""The signal on which a worker writes the stacks of all its threads into its page, whatever it executes. A real-time
signal: no other code uses it, while scripts use SIGUSR1 and SIGUSR2 for checkpoints."""

_page: OwnStatusPage | None = None
_phase = Phase.OUTSIDE
_main = threading.main_thread().ident


def open_status_page(path: str, *, gives_exit_notice: bool) -> None:
    """Open the status page, so that the agent sees the status of this worker. Called by the main thread.

    In another thread, or when the page cannot be opened, the status stays unreported, which does the worker no harm.
    With `gives_exit_notice` the agent may learn of this process's death before its memory is freed.
    """
    global _page, _main
    if threading.current_thread() is not threading.main_thread():
        return
    _main = threading.get_ident()
    with contextlib.suppress(OSError):
        page = OwnStatusPage(path)
        faulthandler.register(DUMP_SIGNAL, page.descriptor, all_threads=True, chain=False)
        page.enable_dump()
        page.set_phase(_phase)
        _page = page
        if gives_exit_notice and exit_notice.is_supported():
            exit_notice.lock(page.memory, MUTEX_AT)


def set_phase(phase: Phase) -> Phase:
    """Set the phase of the main thread, and return the previous one. Calls of other threads have no effect."""
    global _phase
    before = _phase
    if before != phase and (threading.get_ident() == _main or _is_of_autograd()):
        _phase = phase
        if _page is not None:
            _page.set_phase(phase)
    return before


def set_step(generation: int, step: int) -> None:
    """Set the number of decided steps, and the generation."""
    if _page is not None:
        _page.set_step(generation, step)


def report_progress() -> None:
    """Report progress: a boundary was passed, a batch evaluated."""
    if _page is not None:
        _page.report_progress()


class InPhase:
    """Set the phase of the main thread within a `with` block, `with InPhase(phase):`, and restore it afterwards."""

    __slots__ = ("_before", "_phase")

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._before = set_phase(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_phase(self._before)


class WaitingForPeers(InPhase):
    """Mark within a `with` block, `with WaitingForPeers():`, that the main thread waits for other workers."""

    __slots__ = ()

    def __init__(self) -> None:
        self._phase = Phase.WAITING


def _is_of_autograd() -> bool:
    """Return whether this thread was not made by Python.

    torch computes the gradients of devices in threads of its own, for which the main thread waits.
    """
    return isinstance(threading.current_thread(), threading._DummyThread)


def _forget() -> None:
    global _page
    _page = None


if hasattr(os, "register_at_fork"):  # a loader process must not report for its worker
    os.register_at_fork(after_in_child=_forget)
