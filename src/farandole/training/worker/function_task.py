"""The program of each worker of farandole.run(): `python -m farandole.training.worker.function_task` calls the function
that its agent has put into the scratch folder, and leaves the result there. The agent sends it to
launch/run_function.py."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from farandole.base.env import WorkerEnv, read_rank_and_size, read_worker_env
from farandole.base.wire.function_call import LARGEST_BYTES, Call, Return, call_file, return_file
from farandole.errors import ConfigError


def main() -> None:
    """Call the function. Raises what the function raises, and TypeError when its result cannot be sent back."""
    env = read_worker_env()
    if env is None:
        raise ConfigError("function_task is the program of a worker of farandole.run(), which starts it")
    scratch = Path(env.scratch_folder)
    sent = msgspec.msgpack.decode(call_file(scratch).read_bytes(), type=Call)
    sys.path += [entry for entry in sent.search_path if entry not in sys.path]
    try:
        # The agent got the call from a launcher that has proved the token: this is equivalent to an import of the
        # user's script.
        call: Callable[[], Any] = cloudpickle.loads(sent.pickled)
        result = call()
        rank, size = _place()
        _leave(env, Return(rank, is_error=False, data=_pickled(result), size=size))
    except Exception as error:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next or error.__traceback__  # without this function
        text = traceback.format_exc().encode("utf-8", "backslashreplace")
        rank, size = _place()
        _leave(env, Return(rank, is_error=True, data=text[-LARGEST_BYTES:], size=size))
        raise


def _place() -> tuple[int, int]:
    """Return this worker's rank, and the number of workers, in its last generation; of a worker that was in none, those
    for which it was started."""
    context = sys.modules.get("farandole.training.worker.context")  # a function without Farandole needs no torch either
    place = None if context is None else context.last_placement()
    return read_rank_and_size() if place is None else (place.rank, place.size)


def _pickled(result: object) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(result)
    except Exception as error:  # noqa: BLE001 - any: it is that of the object's own __reduce__
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be pickled: {error}; return an object "
            "that can be pickled"
        ) from None
    if len(data) > LARGEST_BYTES:
        raise TypeError(
            f"the function returned a {type(result).__name__} of {len(data)} bytes when pickled, at most "
            f"{LARGEST_BYTES} can be sent back; write it to a file, and return the path"
        )
    return data


def _leave(env: WorkerEnv, returned: Return) -> None:
    """Write the whole file, or no part of it."""
    path = return_file(Path(env.scratch_folder), env.worker)
    unfinished = path.with_name(f"unfinished.{os.getpid()}")
    unfinished.write_bytes(msgspec.msgpack.encode(returned))
    unfinished.replace(path)


if __name__ == "__main__":
    main()
