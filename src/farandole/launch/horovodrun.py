"""`horovodrun`: the command line of Horovod. The same options as `farandole run`; what is not said is decided as
Horovod does."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.launch.arguments import HOROVODRUN
from farandole.launch.cli import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of `horovodrun` with these arguments (sys.argv's unless given). Raises SystemExit after
    --help, --version, --check-build and usage errors."""
    return run_program(arguments, HOROVODRUN)
