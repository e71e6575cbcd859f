"""What each worker of farandole.run() runs: `python -m farandole.worker.function_task FOLDER` calls the function that
lies in the job's folder, and leaves there what came of it. launch/run_function.py reads it."""

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
"""Files in the folder: the function as cloudpickle wrote it, and the sys.path that its modules were found on."""


def main(folder: Path) -> None:
    """Raises what the function raises, and TypeError when its result cannot be sent back."""
    sys.path += [entry for entry in json.loads((folder / SEARCH_PATH).read_text()) if entry not in sys.path]
    try:
        # The folder is the user's own and nobody else can write there: this is no more than importing his script.
        call: Callable[[], Any] = cloudpickle.loads((folder / CALL).read_bytes())
        _leave(result_file(folder, _rank_after(result := call())), _pickled(result))
    except Exception as error:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next or error.__traceback__  # without this function
        _leave(folder / f"error.{os.getpid()}", traceback.format_exc().encode("utf-8", "backslashreplace"))
        raise


def result_file(folder: Path, rank: int) -> Path:
    """Where the result of a rank lies."""
    return folder / f"result.{rank}"


def _rank_after(_: object) -> int:
    """This worker's rank, now that the function has returned: the one in the job's last generation if it is still in
    it, otherwise the one that it was started for."""
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
            f"the function returned a {type(result).__name__} that cannot be sent back: {error}; return something "
            "that can be pickled"
        ) from None
    return data


def _leave(path: Path, data: bytes) -> None:
    """Write all of the file, or none of it."""
    unfinished = path.with_name(f"unfinished.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
