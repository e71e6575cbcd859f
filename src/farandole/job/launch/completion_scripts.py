"""The scripts by which bash, zsh and fish complete the commands, made of the commands' parsers. Pure."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["any", "files", "folders", "words"]


@dataclass(frozen=True)
class Value:
    """The values of an option, or an argument: how many, of which kind, and which words if there are few."""

    count: int = 0
    kind: Kind = "any"
    words: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Option:
    """An option, with all its flags."""

    flags: tuple[str, ...]
    help: str
    value: Value


@dataclass(frozen=True)
class Command:
    """A command of `farandole`, or another program with `program`.

    Attributes:
        words: Its words, such as ("slurm", "grow"); empty for a program of its own.
        takes_command: A command of the user follows its options.
    """

    words: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Value, ...]
    takes_command: bool = False
    program: str = "farandole"

    @property
    def name(self) -> str:
        """The name by which the scripts tell it from others."""
        return " ".join(self.words) or self.program


def describe(
    words: Sequence[str], parser: argparse.ArgumentParser, takes_command: bool = False, program: str = "farandole"
) -> Command:
    """Return the command whose options this parser reads."""
    options, arguments = [], []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        if action.option_strings:
            options.append(Option(tuple(action.option_strings), _help_of(parser, action), _value_of(action)))
        elif not _is_word_of(action, words):
            arguments.append(_value_of(action))
    text = " ".join((parser.description or "").split()).partition(". ")[0].rstrip(".")
    return Command(tuple(words), text, tuple(options), tuple(arguments), takes_command, program)


def _is_word_of(action: argparse.Action, words: Sequence[str]) -> bool:
    return action.choices is not None and any(word in action.choices for word in words)


def _help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return re.split(r"[;(:]", " ".join(text.split()))[0].strip()


def _value_of(action: argparse.Action) -> Value:
    if action.nargs == 0:
        return Value()
    name = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar or action.dest.upper()
    # The value of an option that may stand alone is given after "=".
    count = 1 if action.nargs in (None, "*", "+") else action.nargs if isinstance(action.nargs, int) else 0
    if action.choices is not None:
        return Value(count, "words", tuple(map(str, action.choices)), name)
    if name.startswith("DIR"):
        return Value(count, "folders", (), name)
    is_file = name.startswith("FILE") or action.type is Path
    return Value(count, "files" if is_file else "any", (), name)


# bash -----------------------------------------------------------------------------------------------------------------

_BASH = r"""# Completion of `farandole` and `horovodrun` in bash, made by `farandole completion bash`.

_farandole_commands="@COMMANDS@"

_farandole_further() {  # the words that may follow a command
    case "$1" in
@FURTHER@
    esac
}

_farandole_flags() {  # the flags of a command
    case "$1" in
@FLAGS@
    esac
}

_farandole_value() {  # the values of a command's flag: how many, of which kind, and which words
    case "$1 $2" in
@VALUES@
        *) echo "0 any" ;;
    esac
}

_farandole_argument() {  # the arguments of a command: "command" where one of the user's follows
    case "$1" in
@ARGUMENTS@
    esac
}

_farandole_of_kind() {  # kind, beginning, words
    local kind=$1 beginning=$2
    shift 2
    case "$kind" in
        words) COMPREPLY=($(compgen -W "$*" -- "$beginning")) ;;
        files) compopt -o default 2>/dev/null ;;
        folders) compopt -o dirnames -o nospace 2>/dev/null ;;
    esac
}

_farandole() {
    local -a words=()
    local i word
    for ((i = 0; i <= COMP_CWORD; i++)); do  # readline also divides words at = and :
        word=${COMP_WORDS[i]}
        if ((i > 1)) && [[ $word == [=:]* || ${COMP_WORDS[i - 1]} == [=:] ]]; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
    done
    local last=$((${#words[@]} - 1)) current=${words[${#words[@]} - 1]} command index
    COMPREPLY=()
    if [[ ${words[0]##*/} == horovodrun ]]; then
        command=horovodrun index=1
    elif ((last == 1)); then
        COMPREPLY=($(compgen -W "$_farandole_commands --help --version" -- "$current"))
        return
    else
        command=${words[1]} index=2
        local further
        further=$(_farandole_further "$command")
        if [[ -n $further ]]; then
            if ((last == 2)); then
                COMPREPLY=($(compgen -W "$further --help" -- "$current"))
                return
            fi
            command+=" ${words[2]}" index=3
        fi
    fi
    local argument value
    argument=$(_farandole_argument "$command")
    while ((index < last)); do
        word=${words[index]}
        if [[ $word == -- ]]; then
            ((index++))
            break
        elif [[ $word == -*=* ]]; then
            ((index++))
        elif [[ $word == -* ]]; then
            value=($(_farandole_value "$command" "$word"))
            if ((index + value[0] >= last)); then
                _farandole_of_kind "${value[1]}" "$current" "${value[@]:2}"
                return
            fi
            ((index += 1 + value[0]))
        elif [[ $argument == command ]]; then
            break
        else
            ((index++))
        fi
    done
    if [[ $argument == command && ( $index -lt $last || ${words[last - 1]} == -- ) ]]; then
        compopt -o default 2>/dev/null
    elif [[ $current == -*=* ]]; then
        value=($(_farandole_value "$command" "${current%%=*}"))
        _farandole_of_kind "${value[1]}" "${current#*=}" "${value[@]:2}"
    elif [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$(_farandole_flags "$command")" -- "$current"))
    elif [[ $argument == command ]]; then
        compopt -o default 2>/dev/null
        COMPREPLY=($(compgen -c -- "$current"))
    else
        _farandole_of_kind "${argument%% *}" "$current" ${argument#* }
    fi
}

complete -F _farandole farandole horovodrun
"""


def bash_script(commands: Sequence[Command]) -> str:
    """Return the script for bash, which needs nothing but bash 4."""
    further = _further(commands)
    flags, values, arguments = [], [], []
    for command in commands:
        every = " ".join(flag for option in command.options for flag in option.flags)
        flags.append(f'        "{command.name}") echo "{every}" ;;')
        for option in command.options:
            if option.value.count or option.value.words or option.value.kind != "any":
                cases = " | ".join(f'"{command.name} {flag}"' for flag in option.flags)
                what = " ".join((str(option.value.count), option.value.kind, *option.value.words))
                values.append(f'        {cases}) echo "{what}" ;;')
        arguments.append(f'        "{command.name}") echo "{_bash_argument(command)}" ;;')
    lines = {
        "COMMANDS": " ".join(_first_words(commands)),
        "FURTHER": "\n".join(f'        {first}) echo "{" ".join(others)}" ;;' for first, others in further.items()),
        "FLAGS": "\n".join(flags),
        "VALUES": "\n".join(values),
        "ARGUMENTS": "\n".join(arguments),
    }
    return re.sub(r"@(\w+)@", lambda found: lines[found[1]], _BASH)


def _bash_argument(command: Command) -> str:
    if command.takes_command:
        return "command"
    if not command.arguments:
        return ""
    return " ".join((command.arguments[0].kind, *command.arguments[0].words))


# zsh ------------------------------------------------------------------------------------------------------------------

_ZSH = r"""#compdef farandole horovodrun
# Completion of `farandole` and `horovodrun` in zsh, made by `farandole completion zsh`.

_farandole() {
    local command=horovodrun
    local -a commands
    if [[ $service != horovodrun ]]; then
        if (( CURRENT == 2 )); then
            commands=(
@COMMANDS@
            )
            _describe -t commands command commands
            return
        fi
        command=$words[2]
        shift words
        (( CURRENT-- ))
        case $command in
@FURTHER@
        esac
    fi
    case $command in
@CASES@
    esac
}

if [[ $funcstack[1] == _farandole ]]; then
    _farandole "$@"
else
    compdef _farandole farandole horovodrun
fi
"""

_ZSH_FURTHER = """            {first})
                if (( CURRENT == 2 )); then
                    _arguments '1:what:({others})'
                    return
                fi
                command="{first} $words[2]"
                shift words
                (( CURRENT-- ))
                ;;"""


def zsh_script(commands: Sequence[Command]) -> str:
    """Return the script for zsh."""
    cases = []
    for command in commands:
        specifications = [_zsh_option(option) for option in command.options]
        if command.takes_command:
            specifications += ["'(-)1:command: _command_names -e'", "'*::argument: _normal'"]
        specifications += [_zsh_argument(each) for each in command.arguments]
        lines = " \\\n".join(f"                {each}" for each in specifications)
        cases.append(f'        "{command.name}")\n            _arguments -S \\\n{lines}\n            ;;')
    helps = {command.words[0]: command.help for command in reversed(commands) if command.words}
    parts = {
        "COMMANDS": "\n".join(
            f"                {_quoted(first + ':' + helps[first])}" for first in _first_words(commands)
        ),
        "FURTHER": "\n".join(
            _ZSH_FURTHER.format(first=first, others=" ".join(others)) for first, others in _further(commands).items()
        ),
        "CASES": "\n".join(cases),
    }
    return re.sub(r"@(\w+)@", lambda found: parts[found[1]], _ZSH)


def _zsh_option(option: Option) -> str:
    values = _zsh_value(option.value) * option.value.count
    text = option.help.replace("[", r"\[").replace("]", r"\]")
    if len(option.flags) == 1:
        return _quoted(f"{_zsh_flag(option.flags[0], option.value)}[{text}]{values}")
    exclusive, flags = " ".join(option.flags), ",".join(_zsh_flag(flag, option.value) for flag in option.flags)
    return f"'({exclusive})'{{{flags}}}{_quoted(f'[{text}]{values}')}"


def _zsh_flag(flag: str, value: Value) -> str:
    """Return the flag; after a long one with one value "=" may stand in place of a space."""
    return f"{flag}=" if flag.startswith("--") and value.count == 1 else flag


def _zsh_value(value: Value) -> str:
    name = (value.name or "value").replace(":", r"\:")
    actions = {"files": "_files", "folders": "_files -/", "words": f"({' '.join(value.words)})", "any": " "}
    return f":{name}:{actions[value.kind]}"


def _zsh_argument(value: Value) -> str:
    return _quoted(f"*{_zsh_value(value)}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"'\''") + "'"


# fish -----------------------------------------------------------------------------------------------------------------


def fish_script(commands: Sequence[Command]) -> str:
    """Return the script for fish."""
    lines = ["# Completion of `farandole` and `horovodrun` in fish, made by `farandole completion fish`.", ""]
    further = _further(commands)
    helps = {command.words[0]: command.help for command in reversed(commands) if command.words}
    lines.append("complete -c farandole -f")
    lines += [
        f"complete -c farandole -n __fish_use_subcommand -a {first} -d {_fish_quoted(helps[first])}"
        for first in _first_words(commands)
    ]
    for first, others in further.items():
        condition = f"__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {' '.join(others)}"
        lines.append(f"complete -c farandole -n {_fish_quoted(condition)} -a {_fish_quoted(' '.join(others))}")
    for command in commands:
        begin = f"complete -c {command.program}"
        if command.words:
            seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
            begin += f" -n {_fish_quoted(seen)}"
        if command.takes_command or any(each.kind in ("files", "folders") for each in command.arguments):
            lines.append(f"{begin} -F")
        for option in command.options:
            flags = " ".join(_fish_flag(flag) for flag in option.flags)
            values = {
                "files": " -r -F",
                "folders": " -x -a '(__fish_complete_directories)'",
                "words": f" -x -a {_fish_quoted(' '.join(option.value.words))}",
                "any": " -x",
            }
            what = values[option.value.kind] if option.value.count else ""
            lines.append(f"{begin} {flags}{what} -d {_fish_quoted(option.help)}")
    return "\n".join((*lines, ""))


def _fish_flag(flag: str) -> str:
    if flag.startswith("--"):
        return f"-l {flag[2:]}"
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# What all have in common ----------------------------------------------------------------------------------------------


def _first_words(commands: Iterable[Command]) -> list[str]:
    return list(dict.fromkeys(command.words[0] for command in commands if command.words))


def _further(commands: Iterable[Command]) -> Mapping[str, tuple[str, ...]]:
    """Return the second words of the commands that have one, by their first words."""
    found: dict[str, tuple[str, ...]] = {}
    for command in commands:
        if len(command.words) > 1:
            first, second = command.words
            found[first] = (*found.get(first, ()), second)
    return found
