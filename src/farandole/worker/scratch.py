"""The folder in which this worker's loader processes keep the sockets that pass tensors."""

from __future__ import annotations

from multiprocessing import process


def use(folder: str) -> None:
    """Have multiprocessing, here and in its children, use `folder` for its own files.

    By default each process makes a folder in /tmp, and a killed process leaves it there. The folder is set in a private
    attribute of Python; where a version does not have it, nothing changes.
    """
    config = getattr(process.current_process(), "_config", None)
    if isinstance(config, dict):
        config.setdefault("tempdir", folder)
