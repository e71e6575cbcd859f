"""Settings of a worker's process: its loader processes, its exit, its logs, its memory, its files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing import process
from multiprocessing.util import Finalize

import torch

from farandole.base.env import has_malloc_settings
from farandole.base.machine import now_s

logger = logging.getLogger("farandole")

# Loader processes -----------------------------------------------------------------------------------------------------

LOADER_PROCESSES_END_S = 2.0
"""Seconds from SIGTERM to SIGKILL, for all loader processes together."""


@cache
def end_loader_processes_at_exit() -> None:
    """End daemonic children when this process ends, whatever they do about SIGTERM.

    multiprocessing sends SIGTERM to them at the exit, and then waits without limit (CPython 3.11,
    Lib/multiprocessing/util.py, _exit_function). (torch's loader processes are such children; they run the user's
    code.) Meanwhile the worker's job does not end. Idempotent.
    """
    # The first step at the exit: torch has declared by then that its loaders' deaths are not errors (torch 2.13,
    # torch/utils/data/_utils/__init__.py, _set_python_exit_flag).
    Finalize(None, _end_loader_processes, args=(os.getpid(),), exitpriority=0)


def _end_loader_processes(owner: int) -> None:
    if os.getpid() != owner:
        return
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline_s = now_s() + LOADER_PROCESSES_END_S
    for child in children:
        child.join(max(0.0, deadline_s - now_s()))
    stubborn = [child for child in children if child.exitcode is None]
    if stubborn:
        # torch takes the end of a loader process by SIGKILL for an error (torch 2.13,
        # torch/utils/data/_utils/signal_handling.py, _set_SIGCHLD_handler).
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in stubborn:
        child.kill()


# The exit: the objects that Python would search for garbage are skipped -----------------------------------------------

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def shorten_exit() -> None:
    """Exclude all present objects from the garbage collection. Call it in one of the last atexit handlers.

    At its exit Python looks for garbage several times, in all objects (CPython 3.11, Python/pylifecycle.c,
    Py_FinalizeEx() and finalize_modules()): with torch loaded that costs a worker a second of CPU time, for which the
    end of the job waits. The system frees the memory in any case.

    The rest of Python's exit is unchanged: other atexit handlers run, and the objects that modules' variables hold are
    finalized. Only objects in cycles are not, which Python does not promise either; files among them are flushed here.
    """
    for each in gc.get_objects():
        if issubclass(type(each), _WRITERS):  # isinstance() would access the objects behind proxies
            with contextlib.suppress(Exception):  # closed, detached, or without a reader
                each.flush()
    # Python clears the remaining modules at its end, which finalizes the objects in their variables: a cycle keeps the
    # modules.
    kept: list[object] = [*sys.modules.values()]
    kept.append(kept)
    gc.freeze()


NAMED_AFTER_S = 10.0
"""Seconds after the end of the script in which most processes have ended."""


def name_what_holds_the_exit(is_needed: Callable[[], bool]) -> None:
    """Have a thread of its own warn when the script has ended and the process does not, while other workers may wait
    for it: `is_needed` is asked at the end of the script."""
    arguments = (threading.main_thread(), is_needed, NAMED_AFTER_S)
    threading.Thread(target=_name_after, args=arguments, name="farandole-exit", daemon=True).start()


def _name_after(main: threading.Thread, is_needed: Callable[[], bool], after_s: float) -> None:
    main.join()
    if not is_needed():
        return
    threading.Event().wait(after_s)
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not main]
    named = f"these threads, which are no daemons: {', '.join(threads)}"
    logger.warning(
        "the script ended %g s ago, and its process waits for %s. The training was not finished, and other workers may "
        "wait for the end of this one",
        after_s,
        named if threads else "a function of atexit, or for children",
    )


# The log level, from HOROVOD_LOG_LEVEL --------------------------------------------------------------------------------

_LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def set_log_level(level: str) -> None:
    """Set the level of the logger `farandole` ("trace", "debug", "info", "warning", "error", "fatal"). Its output goes
    where the script has set up logging, else to stderr."""
    logger.setLevel(_LOG_LEVELS[level])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s] %(name)s: %(message)s"))
        logger.addHandler(handler)


# Memory: what one step frees is kept for the next one, and a newcomer has it before it joins --------------------------
#
# Gradients are allocated and freed in each step. The C library returns large blocks to the system at once, which
# clears them and maps them anew: 37 of 170 ms of a step of ResNet-18 on one core, and more with
# DistributedDataParallel.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; man 3 mallopt

_KEPT_BYTES = 512 << 20
"""Bytes that may be free at the end of the heap before they are returned: far more than a step allocates and frees,
less than a restored checkpoint leaves."""

_MAPPED_BYTES = 32 << 20
"""Larger blocks are always returned: the largest value that the library allows."""

_STATE_AND_GRADIENTS = 4
"""This many times the parameters: they arrive, with two tensors of Adam's for each, and there are gradients."""

_MOST_AHEAD_BYTES, _PIECE_BYTES = 384 << 20, 16 << 20


@cache
def keep_freed_memory() -> bool:
    """Keep freed memory from now on, in this process. False: it has another C library, or the user has set this
    otherwise."""
    if sys.platform != "linux" or has_malloc_settings():
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def map_memory_ahead(modules: Iterable[torch.nn.Module]) -> None:
    """Have the system map memory now for the tensors that a worker with these modules receives when it joins, and for
    its first step: later, the others would wait for that. Does nothing where freed memory is not kept."""
    if not keep_freed_memory():
        return
    nbytes = _STATE_AND_GRADIENTS * sum(p.numel() * p.element_size() for each in modules for p in each.parameters())
    pieces = min(nbytes, _MOST_AHEAD_BYTES) // _PIECE_BYTES
    mapped = [torch.zeros(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(pieces)]
    mapped.clear()


# Files: the folder in which this worker's loader processes keep the sockets that pass tensors -------------------------


def use_scratch_folder(folder: str) -> None:
    """Have multiprocessing, here and in its children, use `folder` for its own files.

    By default each process makes a folder in /tmp, and a killed process leaves it there. The folder is set in a private
    attribute of Python; where a version does not have it, nothing changes.
    """
    config = getattr(process.current_process(), "_config", None)
    if isinstance(config, dict):
        config.setdefault("tempdir", folder)
