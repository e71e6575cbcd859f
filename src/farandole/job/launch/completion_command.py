"""`farandole completion SHELL`: prints the script by which a shell completes the commands, which shtab makes of their
parsers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from farandole.base.command_parser import Parser
from farandole.registry import COMMANDS, part

SHELLS = ("bash", "zsh", "fish")

_EPILOG = (
    "To install it, write the output to ~/.local/share/bash-completion/completions/farandole (bash, with the package "
    "bash-completion), to ~/.zfunc/_farandole (zsh, with fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc), or to "
    "~/.config/fish/completions/farandole.fish, and start a new shell. In bash without that package, add to ~/.bashrc: "
    "source <(farandole completion bash)"
)


def completion_command(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code. Raises SystemExit as argparse does."""
    options = completion_parser().parse_args(arguments)
    print(completion_script(options.shell))
    return 0


def completion_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole completion",
        description="Print the script by which a shell completes commands, options and their values.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    return parser


def all_commands() -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, by its words; those that take a command of the user have an argument for
    it."""
    # Here: the other commands need not wait for all of them.
    from farandole.job.launch.control_parser import COMMANDS as CONTROL, control_parser
    from farandole.job.launch.run_parser import run_parser

    taking = [run_parser("farandole run")[0], run_parser("horovodrun")[0]]
    taking += [part(each.parser)() for each in COMMANDS.values() if each.takes_command]
    for parser in taking:
        parser.add_argument("command", nargs=argparse.REMAINDER, help="command")
    others = [control_parser(name) for name in CONTROL]
    others += [part(each.parser)() for each in COMMANDS.values() if not each.takes_command]
    return {parser.prog.removeprefix("farandole "): parser for parser in (*taking, *others)}


def completion_script(shell: str) -> str:
    """Return the script for one of SHELLS."""
    import shtab

    commands = dict(all_commands())
    horovodrun = commands.pop("horovodrun")
    root = argparse.ArgumentParser("farandole")
    root.add_argument("-v", "--version", action="version", help="show the version")
    forms = {"": root.add_subparsers()}
    for name, parser in commands.items():
        before, _, last = name.rpartition(" ")
        if before not in forms:  # kubernetes manifest
            forms[before] = forms[""].add_parser(before, help=COMMANDS[before].summary).add_subparsers()
        _prepare(parser, shell)
        summary = (parser.description or "").partition(". ")[0].rstrip(".")
        forms[before].add_parser(last, help=summary, parents=[parser], add_help=False)
    _prepare(horovodrun, shell)
    scripts = {parser.prog: shtab.complete(parser, shell) for parser in (root, horovodrun)}
    if shell == "zsh":  # it reads one file for both programs, or both from the standard input of `source`
        of_each = (f"if [[ ${{service-{name}}} == {name} ]]; then\n{text}\nfi" for name, text in scripts.items())
        return "\n".join(("#compdef farandole horovodrun", *of_each))
    if shell == "fish":  # shtab takes options such as -np for short ones
        return re.sub(r" -s (?=\w[\w-])", " -o ", "\n".join(scripts.values()))
    return "\n".join((*scripts.values(), _BASH))


def _prepare(parser: argparse.ArgumentParser, shell: str) -> None:
    """Tell shtab of which kind the values are, and bring the options into a form that it understands."""
    import shtab

    for action in parser._actions:
        if action.help and action.help != argparse.SUPPRESS:
            text = " ".join(parser._get_formatter()._expand_help(action).split())
            action.help = re.split(r"[;(:]", text)[0].strip().replace("%", "%%")
        if action.nargs == "?":  # its value is given after "="
            action.nargs = 0
        if action.nargs == 0:
            continue
        names = action.metavar if isinstance(action.metavar, tuple) else (action.metavar or action.dest,)
        action.metavar = ": :".join(name.replace(":", r"\:") for name in names)  # for zsh: one for each value
        if action.nargs == argparse.REMAINDER:
            action.complete = _USERS_COMMAND  # type: ignore[attr-defined]
        elif action.choices is None and names[0].startswith("DIR"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.choices is None and (names[0].startswith("FILE") or action.type is Path):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if shell == "zsh":  # the value of a long option may also stand behind "="
            action.option_strings = [f"{flag}=" if flag.startswith("--") else flag for flag in action.option_strings]


_USERS_COMMAND = {
    "bash": "_farandole_users_command",
    "zsh": "_normal",
    "fish": "(__fish_complete_path (commandline -ct))",
}

_BASH = r"""
_farandole_users_command() {
    compopt -o default 2>/dev/null
    compgen -c -- "$1"
}

_farandole() {  # gives shtab's function whole words, which readline divides at = and :
    local -a words=()
    local i word
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((i > 1)) && [[ $word == [=:]* || ${COMP_WORDS[i - 1]} == [=:] ]]; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
    done
    local current=${words[-1]}
    unset 'words[-1]'
    for i in "${!words[@]}"; do  # these options are complete, and of the current one the value is wanted
        [[ ${words[i]} == -*=* ]] && unset "words[i]"
    done
    [[ $current == -*=* ]] && words+=("${current%%=*}")
    words=("${words[@]}" "${current#-*=}")
    local last=$((${#words[@]} - 1)) index=1 prefix=_shtab_${words[0]##*/} values variable
    for variable in "${prefix}_subparsers[@]" "${prefix}_${words[1]}_subparsers[@]"; do
        if ((index < last)) && [[ " ${!variable-} " == *" ${words[index]} "* ]]; then
            prefix+=_${words[index]}
            ((index++))
        fi
    done
    variable=${prefix}_pos_0_nargs
    if [[ ${!variable-} == ... ]]; then  # a command of the user follows, whose options are its own
        while ((index < last)) && [[ ${words[index]} == -* ]]; do
            [[ ${words[index]} == -- ]] && return
            variable=${prefix}_${words[index]//[^[:word:]]/_}_nargs
            values=${!variable-1}
            ((index += 1 + values))
        done
        COMPREPLY=()
        if ((index < last)) || ((index > last)) && [[ ${words[last]} == -* ]]; then
            compopt -o default 2>/dev/null
            return
        fi
    fi
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$last
    "_shtab_${words[0]##*/}"
}

complete -F _farandole farandole horovodrun"""
