"""The thread that detects the beginning of a worker's exit, by the mutexes that the main threads hold. Used by
status_pages.py; exit_notice.py explains the use."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

from farandole import exit_notice

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
