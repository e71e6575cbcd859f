"""The options that `farandole run` has from horovodrun, and what they ask for, also in a file for `--config-file`.
Registered in registry.py.

It loads no asyncio: `--help` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.errors import ConfigError
from farandole.integrations.horovod.horovod_settings import (
    SETTINGS,
    Given,
    Setting,
    Value,
    check,
    check_stall_times,
    variables,
    without_effect,
)

# Options of horovodrun that are accepted without effect: flags, the option's name, the name of its value, the reason.
_LAUNCHER_FLAGS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("--mpi",), "use_mpi", "", "Farandole does not use MPI"),
    (("--jsrun",), "use_jsrun", "", "Farandole does not use jsrun"),
    (("--mpi-args",), "mpi_args", "ARGS", "Farandole does not use MPI"),
    (("--binding-args",), "binding_args", "ARGS", "Farandole does not use MPI"),
    (("--tcp",), "tcp_flag", "", "only NCCL can use InfiniBand, and NCCL_IB_DISABLE=1 is set for it"),
    (("--disable-cache",), "disable_cache", "", "results of checks are never cached"),
)


def reason_without_effect(option: str) -> str:
    """Return why an option of horovodrun has no effect, by its name as an argument of farandole.run()."""
    return next(reason for _, name, _, reason in _LAUNCHER_FLAGS if name == option)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the groups of these options."""
    group = parser.add_argument_group("scripts written for Horovod")
    group.add_argument(
        "--horovod",
        action="store_true",
        help="make `import horovod.torch` in the workers import Farandole (horovodrun: always)",
    )
    group.add_argument(
        "--config-file", type=Path, metavar="FILE", help="settings in Horovod's YAML format; flags override them"
    )
    group.add_argument("--gloo", action="store_true", dest="use_gloo", help=argparse.SUPPRESS)
    unused = parser.add_argument_group("options of horovodrun that are accepted without effect")
    for flags, name, value, reason in _LAUNCHER_FLAGS:
        kwargs: dict[str, Any] = {"action": "store_true"} if not value else {"metavar": value}
        unused.add_argument(*flags, dest=name, help=reason, **kwargs)
    for setting in SETTINGS:
        _add_setting(unused if setting.no_effect else group, setting)


def asked_for(options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the variables of the workers, from flags and, with lower priority, from the configuration file; and a
    sentence about the given ones that have no effect. Raises ConfigError for values that Horovod refuses too."""
    given: dict[str, Given] = {}
    reasons = [(flags[0], reason) for flags, name, _, reason in _LAUNCHER_FLAGS if getattr(options, name)]
    notes: list[str] = []
    if options.config_file is not None:
        file = read_config_file(options.config_file)
        given |= file.settings
        notes += [f"{options.config_file}: the unknown setting {key} is ignored" for key in file.unknown]
        if file.controller == "mpi" and not (options.use_gloo or options.use_mpi):
            reasons.append((f"{options.config_file}: controller mpi", "Farandole does not use MPI"))
    for setting in SETTINGS:
        value = getattr(options, setting.name)
        if value is not None:
            given[setting.name] = Given(value, setting.flag)
            check(setting, given[setting.name])
    check_stall_times(given)
    reasons += without_effect(given)
    by_reason: dict[str, list[str]] = {}
    for label, reason in reasons:
        by_reason.setdefault(reason, []).append(label)
    for reason, labels in by_reason.items():
        notes.append(f"{', '.join(labels)} {'has' if len(labels) == 1 else 'have'} no effect: {reason}")
    environment = variables(given)
    if options.tcp_flag:
        environment["NCCL_IB_DISABLE"] = "1"
    return environment, notes


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    text = setting.help or setting.no_effect
    if setting.kind is bool:
        switch = group.add_mutually_exclusive_group()
        for flags, value in ((setting.on, True), (setting.off, False)):
            switch.add_argument(
                *flags,
                dest=setting.name,
                action="store_const",
                const=value,
                default=None,
                help=text if value else argparse.SUPPRESS,
            )
        return
    convert: Callable[[str], object] = setting.kind
    metavar = {int: "N", float: "X", str: "TEXT"}[setting.kind]
    if setting.choices:
        group.add_argument(setting.flag, choices=setting.choices, help=text)
    else:
        group.add_argument(setting.flag, type=convert, metavar=metavar, help=text)


# Settings from a YAML file, in Horovod's form -------------------------------------------------------------------------

# Those that a file expresses the other way around: key in the file -> the setting's key.
_INVERSE_KEYS = {
    ("stall_check", "enabled"): ("stall_check", "disabled"),
    ("logging", "hide_timestamp"): ("logging", "with_timestamp"),
}


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a file.

    settings    by name; all of the right type, and checked
    controller  "gloo" or "mpi"; empty when not given
    unknown     unknown keys, such as "params.colour"; Horovod ignores them too
    """

    settings: Mapping[str, Given]
    controller: str
    unknown: tuple[str, ...]


def read_config_file(path: Path) -> ConfigFile:
    """Read a file. Raises ConfigError that names the file, the key and the value if it cannot be read or cannot
    work."""
    settings: dict[str, Given] = {}
    unknown: list[str] = []
    controller = ""
    known = {setting.key: setting for setting in SETTINGS}
    for section, content in _sections(path).items():
        if section == "controller":
            controller = _controller(path, content)
            continue
        if section not in {key[0] for key in known}:
            unknown.append(section)
            continue
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {section} must contain keys and values, got {content!r}")
        for key, value in content.items():
            place = (section, _normalized(key))
            setting = known.get(_INVERSE_KEYS.get(place, place))
            label = f"{path}: {section}.{key}"
            if setting is None:
                unknown.append(f"{section}.{key}")
            elif value is not None:
                given = Given(_typed(setting, value, label, is_negated=place in _INVERSE_KEYS), label)
                check(setting, given)
                settings[setting.name] = given
    return ConfigFile(settings, controller, tuple(unknown))


def _sections(path: Path) -> dict[str, object]:
    import yaml  # here: few command lines need it

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config-file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config-file {path} is not valid YAML: {error}".replace("\n", " ")) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path} must contain sections such as 'params:', got {content!r}")
    return {_normalized(section): inner for section, inner in content.items() if inner is not None}


def _normalized(key: object) -> str:
    return str(key).replace("-", "_")


def _controller(path: Path, value: object) -> str:
    name = str(value).lower()
    if name not in ("gloo", "mpi"):
        raise ConfigError(f"{path}: controller must be gloo or mpi, got {value}")
    return name


def _typed(setting: Setting, value: object, label: str, is_negated: bool) -> Value:
    kind = setting.kind
    if kind is bool and isinstance(value, bool):
        return value != is_negated
    if kind is str and isinstance(value, str):
        return value
    # bool is an int in Python, but a user does not mean 1 by it.
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    wanted = {bool: "true or false", str: "a text", float: "a number", int: "a whole number"}[kind]
    raise ConfigError(f"{label} must be {wanted}, got {value!r}")
