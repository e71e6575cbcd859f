"""The check, before any process is started, whether the command of `farandole run` can work; variables of the alias."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

from farandole.errors import ConfigError
from farandole.registry import factory

_PYTHON = re.compile(r"python[0-9.]*")
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def checked(command: Sequence[str]) -> list[str]:
    """Return the command to run in each worker, unchanged, except that a script that is not executable is run by this
    Python (`train.py` becomes `python train.py`). Raises ConfigError when it cannot be found."""
    if not command:
        raise ConfigError("the command is missing; for example: farandole run -np 3 python train.py")
    program = command[0]
    if shutil.which(program) is None:
        if program.endswith(".py") and os.path.isfile(program):
            return [sys.executable, *command]
        raise ConfigError(_why_not(program))
    if _PYTHON.fullmatch(os.path.basename(program)):
        script = python_script(command[1:])
        if script is not None and not os.path.exists(script):
            raise ConfigError(f"{script}: no such file (looked in {os.getcwd()})")
    return list(command)


def python_script(arguments: Sequence[str]) -> str | None:
    """Return the script among a Python interpreter's arguments; None for `-m module`, `-c code` and stdin."""
    rest = iter(arguments)
    for argument in rest:
        if argument in _OPTIONS_WITH_VALUE:
            next(rest, None)
        elif argument.startswith("--"):
            continue
        elif not argument.startswith("-"):
            return argument
        elif argument == "-" or re.match(r"-[^WXmc]*[mc]", argument):  # as in -um; in -Wonce the c belongs to a value
            return None
    return None


def _why_not(program: str) -> str:
    if os.path.isdir(program):
        return f"{program}: it is a directory, not a program"
    if os.path.isfile(program) and os.path.dirname(program):
        return f"{program}: it must be executable; try chmod +x {program}"
    if os.path.dirname(program) or program.endswith(".py"):
        return f"{program}: no such file (looked in {os.getcwd()})"
    return f"{program}: no such command (looked in PATH)"


# The import path through which `import horovod.torch` in the workers finds Farandole ----------------------------------


def alias_environment() -> dict[str, str]:
    """Return the variables that the workers' environment needs for it, beside the inherited ones: none where the alias
    is installed. Raises ConfigError where Horovod itself is."""
    from importlib.metadata import PackageNotFoundError, distribution  # here: few command lines need it

    from farandole.base.env import inherited_environment

    factory("check for the real Horovod")()
    try:
        distribution("farandole-horovod")
    except PackageNotFoundError:
        before = inherited_environment().get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(factory("alias folder")()), *([before] if before else [])])}
    return {}
