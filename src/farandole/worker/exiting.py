"""The last moments of a worker's process: what Python would look through at its exit is left alone. context.py asks."""

from __future__ import annotations

import contextlib
import gc
import io
import sys

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def shorten_exit() -> None:
    """From now on the garbage collector passes over what there is. Call it in one of the last atexit handlers.

    At its exit Python looks for garbage several times, in all objects that there are: with torch loaded that costs a
    worker a second of CPU time, which the end of the job waits for. The system takes the memory back in any case.

    What Python does besides, it still does: other atexit handlers run, and what modules' variables hold is finalized.
    Only objects in cycles are not, which Python does not promise either; files among them are flushed here.
    """
    for each in gc.get_objects():
        if issubclass(type(each), _WRITERS):  # isinstance() would ask proxies what they stand for
            with contextlib.suppress(Exception):  # closed, detached, or nobody reads it
                each.flush()
    # Python empties the modules that are still there at its end, which finalizes what their variables hold: they are
    # kept by a cycle.
    kept: list[object] = [*sys.modules.values()]
    kept.append(kept)
    gc.freeze()
