"""Settings from a YAML file, in the form of Horovod's `--config-file`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import ConfigError
from farandole.integrations.horovod.horovod_settings import SETTINGS, Given, Setting, Value, check

# Settings that a file expresses the other way around: key in the file -> (the setting's key, whether to invert it).
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
