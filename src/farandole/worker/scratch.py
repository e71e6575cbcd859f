"""Where this worker's loader processes keep the sockets that they pass tensors through."""

from __future__ import annotations

from multiprocessing import process


def use(folder: str) -> None:
    """Have multiprocessing, here and in its children, use `folder` for its own files.

    By default each process makes a folder in /tmp, and one that is killed leaves it there. The folder is given
    in a private setting; where Python has it no more, nothing changes.
    """
    config = getattr(process.current_process(), "_config", None)
    if isinstance(config, dict):
        config.setdefault("tempdir", folder)
