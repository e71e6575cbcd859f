"""start_timeline and stop_timeline: the timeline of this process, which outlives generations and shutdown()."""

from __future__ import annotations

import atexit
import os

from farandole.collectives import world
from farandole.collectives.named.timeline import Timeline

process_timeline = Timeline()
"""The timeline of every NamedCollectives of this process."""

atexit.register(process_timeline.stop)  # the last events are in the file too


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the named operations of all ranks into a file, in Chrome's trace format (see ui.perfetto.dev).

    All ranks may call it; rank 0 writes. It replaces the file before, if there is one.

    Args:
        file_path: The file to write.
        mark_cycles: Show each round of negotiation too.

    Raises:
        NotInitialized: Called before init().
        OSError: The file cannot be written.
    """
    if world.current().placement.rank == 0:
        process_timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the file of start_timeline(); it is complete when this returns."""
    process_timeline.stop()
