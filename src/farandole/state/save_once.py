"""state.save_once: a file of the script's own, an exported model say, written by one worker that is still in the job.

`if rank() == 0: torch.save(...)` is not enough in an elastic job: a worker that was cut off, and replaced, may take
itself for rank 0 long afterwards. So the coordinator is asked, as for a checkpoint.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from farandole.collectives import world
from farandole.membership import Progress

logger = logging.getLogger("farandole")

Ask = Callable[[str, Progress, str], str]
"""ask(name, progress, file): whether this worker may save; "", or why not. `name` tells questions apart."""

_UNNAMED = "what save_once was given"

_ask: Ask | None = None


def install(ask: Ask | None) -> None:
    """Who decides: a job's coordinator; None where there is none, and rank 0 is the same worker until the end."""
    global _ask
    _ask = ask


def save_once(write: Callable[..., object], path: str | os.PathLike[str] | None, progress: Progress) -> bool:
    """Called by all ranks at the same place; no collective. True on the one that has saved.

    With a path (a local or mounted file), `write(temporary)` makes a file beside it, which takes the place of `path`
    in one go once the coordinator has agreed: `path` is never half a file, and never one of a worker that was cut off,
    or of an older state than the file that is there. Without a path the coordinator is asked first, and then `write()`
    does what it likes; it should be something that does no harm when it is done again: after a fault the same place in
    the script may be reached a second time.

    Whatever `write` raises leaves as it is, and nothing is left of the temporary file.
    """
    if world.current().placement.rank != 0:
        return False
    if path is None:
        if not _is_agreed(progress, _UNNAMED):
            return False
        write()
        return True
    target = Path(path).absolute()
    temporary = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    try:
        write(temporary)
        _force(temporary)
        if not _is_agreed(progress, str(target)):
            return False
        temporary.replace(target)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _is_agreed(progress: Progress, file: str) -> bool:
    if _ask is None:
        return True
    progress = msgspec.structs.replace(progress, run_id=world.current().id.run_id)
    refusal = _ask(f"save-once-{secrets.token_hex(8)}", progress, file)
    if refusal:
        logger.warning("save_once: %s was not saved: %s", file, refusal)
    return not refusal


def _force(path: Path) -> None:
    """Onto the disk: a rename must not come before what is in the file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
