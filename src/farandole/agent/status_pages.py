"""The status pages of this agent's workers: their statuses, and the beginning of their exits."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

from farandole.clock import now_s
from farandole.liveness import exit_notice
from farandole.liveness.status_reporting import MUTEX_AT, StatusPage
from farandole.membership import WorkerStatus

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


async def wait_for_stacks(page: StatusPage) -> None:
    """Return when the worker has written its stacks, or does not begin to."""
    before, deadline_s = "", now_s() + _DUMP_S
    while now_s() < deadline_s:
        await asyncio.sleep(_DUMP_LOOK_S)
        stacks = page.stacks()
        if stacks and stacks == before:
            return
        before = stacks


# The thread that detects the beginning of a worker's exit, by the mutexes that the main threads hold ------------------

_SLICE_S = 1.0


class ExitWatcher:
    """Calls `on_mark(worker)` in the thread, once for each worker whose mutex is found marked. At most MOST_WORDS
    workers are watched at a time; any further ones are not."""

    def __init__(self, on_mark: Callable[[str], None]) -> None:
        self._on_mark = on_mark
        self._lock = threading.Lock()
        self._words: dict[str, memoryview] = {}
        self._changes = ctypes.c_uint32(0)  # counts changes of the watched words: the thread looks anew
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="farandole-deaths", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, worker: str, memory: mmap.mmap, offset: int) -> None:
        """Watch the worker's mutex at this place, which the worker may lock at any time."""
        with self._lock:
            self._words[worker] = memoryview(memory)[offset:][:4].cast("I")
        self._look_anew()

    def forget(self, worker: str) -> None:
        """Stop watching a worker whose process is gone."""
        with self._lock:
            self._words.pop(worker, None)
        self._look_anew()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._is_over = True
        self._look_anew()

    def _look_anew(self) -> None:
        with self._lock:
            self._changes.value += 1
        exit_notice.wake(ctypes.addressof(self._changes))

    def _run(self) -> None:
        while not self._is_over:
            with self._lock:
                changes = (ctypes.addressof(self._changes), self._changes.value)
                now = {worker: word[0] for worker, word in self._words.items()}
                marked = [worker for worker, value in now.items() if exit_notice.is_marked(value)]
                # A view is kept for as long as its address is in use: it holds the memory.
                views = [(self._words.pop(each) if each in marked else self._words[each]) for each in now]
            for worker in marked:
                self._on_mark(worker)
            pairs = [(_address(view), value) for view, value in zip(views, now.values(), strict=True)]
            calm = [pair for pair in pairs if not exit_notice.is_marked(pair[1])]
            exit_notice.wait([changes, *calm[: exit_notice.MOST_WORDS]], _SLICE_S)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_uint32.from_buffer(view))
