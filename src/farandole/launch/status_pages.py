"""The status pages through which this agent's workers report their status. Used by agent.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from farandole import exit_notice
from farandole.clock import now_s
from farandole.launch.exit_watcher import ExitWatcher
from farandole.status_page import MUTEX_AT, StatusPage
from farandole.worker_status import WorkerStatus

_DUMP_S, _DUMP_LOOK_S = 1.0, 0.02  # for a handler that needs no lock, on a machine that may be busy


class StatusPages:
    """The status pages, used on one event loop. `on_exit_notice(worker)`: its main thread has apparently begun to
    end."""

    def __init__(self, on_exit_notice: Callable[[str], None]) -> None:
        self._on_exit_notice = on_exit_notice
        self._pages: dict[str, StatusPage] = {}
        self._deaths: ExitWatcher | None = None

    def start(self) -> None:
        if exit_notice.is_supported():
            loop = asyncio.get_running_loop()

            def marked(worker: str) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed before
                    loop.call_soon_threadsafe(self._hint, worker)

            self._deaths = ExitWatcher(marked)
            self._deaths.start()

    def add(self, worker: str) -> str:
        """Create a page for this worker and return its address; empty if there is none."""
        try:
            page = StatusPage()
        except OSError:
            return ""
        self._pages[worker] = page
        if self._deaths is not None:
            self._deaths.watch(worker, page.memory, MUTEX_AT)
        return page.path

    def get(self, worker: str) -> StatusPage | None:
        return self._pages.get(worker)

    def look(self) -> dict[str, WorkerStatus]:
        """Return the statuses of the workers that have reported one."""
        looks = ((worker, page.look()) for worker, page in self._pages.items())
        return {worker: seen for worker, seen in looks if seen is not None}

    def remove(self, worker: str) -> None:
        """Remove the page of a worker whose process is gone."""
        if self._deaths is not None:
            self._deaths.forget(worker)
        if (page := self._pages.pop(worker, None)) is not None:
            page.close()

    def stop(self) -> None:
        """Remove all pages. Idempotent."""
        for worker in list(self._pages):
            self.remove(worker)
        if self._deaths is not None:
            self._deaths.stop()

    def _hint(self, worker: str) -> None:
        if worker in self._pages:
            self._on_exit_notice(worker)


async def written(page: StatusPage) -> None:
    """Return when the worker has written its stacks, or does not begin to."""
    before, deadline_s = "", now_s() + _DUMP_S
    while now_s() < deadline_s:
        await asyncio.sleep(_DUMP_LOOK_S)
        stacks = page.stacks()
        if stacks and stacks == before:
            return
        before = stacks
