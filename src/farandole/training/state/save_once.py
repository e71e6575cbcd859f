"""state.save_once: one worker that is still in the job writes a file of the script, such as an exported model.

`if rank() == 0: torch.save(...)` is not enough in an elastic job: a worker that was disconnected and replaced may take
itself for rank 0 long afterwards. So the coordinator decides, as for a checkpoint.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from farandole.base.membership import Progress
from farandole.training.collectives import world
from farandole.training.state.session import SESSION

logger = logging.getLogger("farandole")

_UNNAMED = "the argument of save_once"


def save_once(write: Callable[..., object], path: str | os.PathLike[str] | None, progress: Progress) -> bool:
    """Have rank 0 write a file, if the coordinator agrees. Called by all ranks at the same place; no collective.
    Returns True on the rank that has saved.

    With a path (a local or mounted file), `write(temporary)` creates a file beside it, which replaces `path` atomically
    once the coordinator has agreed. `path` is never an incomplete file, and never comes from a worker that was
    disconnected or from an older state than the existing file. Without a path the coordinator is asked first; then
    `write()` may do anything that is harmless when repeated: after a fault the script may reach the same place a second
    time.

    Errors of `write` propagate unchanged, and no temporary file remains.
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
    if SESSION.may_save is None:
        return True
    progress = msgspec.structs.replace(progress, run_id=world.current().id.run_id)
    refusal = SESSION.may_save(f"save-once-{secrets.token_hex(8)}", progress, file)
    if refusal:
        logger.warning("save_once: %s was not saved: %s", file, refusal)
    return not refusal


def _force(path: Path) -> None:
    """Flush the file to disk: the rename must not precede its contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
