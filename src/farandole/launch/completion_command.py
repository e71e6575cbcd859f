"""`farandole completion SHELL`: prints the script by which a shell completes the commands, made of all parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from farandole.launch.completion_scripts import Command, bash_script, describe, fish_script, zsh_script
from farandole.launch.run_parser import Parser

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
    from farandole.demo.demo_command import demo_parser
    from farandole.launch.agent_command import agent_parser
    from farandole.launch.certificates_command import certificates_parser
    from farandole.launch.control_parser import COMMANDS, control_parser
    from farandole.launch.doctor_command import doctor_parser
    from farandole.launch.kubernetes_command import manifest_parser
    from farandole.launch.ledger_command import ledger_parser
    from farandole.launch.page_command import page_parser
    from farandole.launch.run_parser import run_parser
    from farandole.launch.slurm_command import slurm_parser
    from farandole.launch.torchrun_parser import torchrun_parser

    return (
        describe(["run"], run_parser("farandole run")[0], takes_command=True),
        describe(["torchrun"], torchrun_parser(), takes_command=True),
        *(describe([name], control_parser(name)) for name in COMMANDS),
        describe(["page"], page_parser()),
        describe(["agent"], agent_parser()),
        describe(["kubernetes", "manifest"], manifest_parser(), takes_command=True),
        describe(["slurm", "grow"], slurm_parser()),
        describe(["slurm", "shrink"], slurm_parser()),
        describe(["ledger", "check"], ledger_parser()),
        describe(["doctor"], doctor_parser()),
        describe(["certificates"], certificates_parser()),
        describe(["completion"], completion_parser()),
        describe(["demo"], demo_parser()),
        describe([], run_parser("horovodrun")[0], takes_command=True, program="horovodrun"),
    )
