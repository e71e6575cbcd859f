"""`farandole completion SHELL`: prints the script by which a shell completes the commands, made of all parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from farandole.base.command_parser import Parser
from farandole.job.launch.completion_scripts import Command, bash_script, describe, fish_script, zsh_script
from farandole.registry import COMMANDS, part

_SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}

_EPILOG = (
    "To install it, write the output to ~/.local/share/bash-completion/completions/farandole (bash, with the package "
    "bash-completion), to ~/.zfunc/_farandole (zsh, with fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc), or to "
    "~/.config/fish/completions/farandole.fish, and start a new shell. In bash without that package, add to ~/.bashrc: "
    "source <(farandole completion bash)"
)


def completion_command(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code. Raises SystemExit as argparse does."""
    options = completion_parser().parse_args(arguments)
    sys.stdout.write(_SCRIPTS[options.shell](all_commands()))
    return 0


def completion_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole completion",
        description="Print the script by which a shell completes commands, options and their values.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=[*_SCRIPTS], metavar="SHELL", help=f"one of {', '.join(_SCRIPTS)}")
    return parser


def all_commands() -> tuple[Command, ...]:
    """Return all commands, from their parsers."""
    # Here: the other commands need not wait for all of them.
    from farandole.job.launch.control_parser import COMMANDS as CONTROL, control_parser
    from farandole.job.launch.run_parser import run_parser

    return (
        describe(["run"], run_parser("farandole run")[0], takes_command=True),
        *(describe([name], control_parser(name)) for name in CONTROL),
        *(
            describe([*words], part(each.parser)(), takes_command=each.takes_command)
            for each in COMMANDS.values()
            for words in each.words
        ),
        describe([], run_parser("horovodrun")[0], takes_command=True, program="horovodrun"),
    )
