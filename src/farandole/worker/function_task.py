"""The program of each worker of farandole.run(). `python -m farandole.worker.function_task FOLDER` calls the function
in the job's folder, and writes its result there. launch/run_function.py reads it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from farandole.env import read_rank_and_size

CALL, SEARCH_PATH = "call", "search_path"
"""Files in the folder: the function as written by cloudpickle, and the sys.path on which its modules were found."""


def main(folder: Path) -> None:
    """Call the function. Raises what the function raises, and TypeError when its result cannot be sent back."""
    sys.path += [entry for entry in json.loads((folder / SEARCH_PATH).read_text()) if entry not in sys.path]
    try:
        # The folder belongs to the user and no other user can write there: this is equivalent to an import of the
        # user's script.
        call: Callable[[], Any] = cloudpickle.loads((folder / CALL).read_bytes())
        _leave(result_file(folder, _rank_after(result := call())), _pickled(result))
    except Exception as error:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next or error.__traceback__  # without this function
        _leave(folder / f"error.{os.getpid()}", traceback.format_exc().encode("utf-8", "backslashreplace"))
        raise


def result_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's result."""
    return folder / f"result.{rank}"


def _rank_after(_: object) -> int:
    """Return this worker's rank after the function has returned: its rank in the job's last generation if it is still a
    member, otherwise the rank for which it was started."""
    context = sys.modules.get("farandole.worker.context")  # a function without Farandole needs no torch either
    if context is not None and context.is_initialized():
        rank: int = context.rank()
        return rank
    return read_rank_and_size()[0]


def _pickled(result: object) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(result)
    except Exception as error:  # noqa: BLE001 - any: it is that of the object's own __reduce__
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be pickled: {error}; return an object "
            "that can be pickled"
        ) from None
    return data


def _leave(path: Path, data: bytes) -> None:
    """Write the whole file, or no part of it."""
    unfinished = path.with_name(f"unfinished.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
