"""start_timeline and stop_timeline: the timeline of this process, which outlives generations and shutdown()."""

from __future__ import annotations

import atexit
import os

from farandole.collectives import world
from farandole.collectives.named.timeline import Timeline

process_timeline = Timeline()
"""What every NamedCollectives of this process is given."""

atexit.register(process_timeline.stop)  # what was told last is in the file too


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the named operations of all ranks into a file, in Chrome's trace format (see ui.perfetto.dev).

    All ranks may call it; rank 0 writes. In place of the file before, if there is one.

    mark_cycles  show each round of negotiation too

    Raises NotInitialized before init(), OSError when the file cannot be written.
    """
    if world.current().placement.rank == 0:
        process_timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the file that start_timeline() began; everything is in it when this returns."""
    process_timeline.stop()
