"""`horovodrun`: the command line of Horovod. It has the options of `farandole run`, with Horovod's defaults."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.job.launch.arguments import HOROVODRUN
from farandole.job.launch.cli import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `horovodrun` with these arguments (sys.argv's unless given) and return the exit code. Raises SystemExit after
    --help, --version, --check-build and usage errors."""
    return run_program(arguments, HOROVODRUN)
