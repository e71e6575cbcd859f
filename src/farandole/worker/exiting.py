"""The exit of a worker's process: the objects that Python would search for garbage are skipped. Called by
context.py."""

from __future__ import annotations

import contextlib
import gc
import io
import sys

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def shorten_exit() -> None:
    """Exclude all present objects from the garbage collection. Call it in one of the last atexit handlers.

    At its exit Python looks for garbage several times, in all objects: with torch loaded that costs a worker a second
    of CPU time, for which the end of the job waits. The system frees the memory in any case.

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
