"""Groups of variables as Structs, read from an environment and written to one. Pure. Errors name the variable.

The Struct of a group states each variable once: its name in the environment, its type and its default. A variable that
is empty counts as not set. All readers raise ConfigError for a value that makes no sense.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from farandole.errors import ConfigError

# The description of a type says in an error what the value must be.
WholeNumber = Annotated[int, Meta(description="a whole number")]
Amount = Annotated[int, Meta(ge=0, description="a whole number >= 0")]
PositiveAmount = Annotated[int, Meta(ge=1, description="a whole number >= 1")]
Port = Annotated[int, Meta(ge=1, le=65535, description="between 1 and 65535")]
Seconds = Annotated[float, Meta(ge=0.0, le=sys.float_info.max, description="a number of seconds >= 0")]
Switch = Annotated[bool, Meta(description="0 or 1")]

T = TypeVar("T", bound=msgspec.Struct)

# Horovod reads numbers as switches; users also write words. msgspec knows 0, 1, false and true itself.
_SWITCH_WORDS = {"yes": "1", "on": "1", "no": "0", "off": "0"}


def read_variables(environ: Mapping[str, str], group: type[T]) -> T:
    """Return the group's variables. Raises ConfigError also when one without a default is not set."""
    fields = _fields(group)
    missing = [each.encode_name for each in fields if each.required and not environ.get(each.encode_name)]
    if missing:
        prefix = missing[0].partition("_")[0]
        raise ConfigError(f"the environment has some {prefix}_ variables but lacks {', '.join(missing)}")
    return group(**{each.name: read_value(environ, each.encode_name, each.type, each.default) for each in fields})


def has_variables(environ: Mapping[str, str], group: type[msgspec.Struct]) -> bool:
    """Return whether any of the group's variables without a default is set."""
    return any(environ.get(each.encode_name) for each in _fields(group) if each.required)


def environment_of(group: msgspec.Struct) -> dict[str, str]:
    """Return the variables from which read_variables() reads an equal group."""
    return {name: str(value) for name, value in msgspec.to_builtins(group).items()}


def read_value(environ: Mapping[str, str], name: str, type_: Any, default: Any = None) -> Any:
    """Return the value of one variable, or `default` when it is not set."""
    if not environ.get(name, "").strip():
        return default
    text = environ[name] if type_ is str else environ[name].strip().lower()
    if type_ == Switch:
        text = "1" if text.isdecimal() and int(text) else _SWITCH_WORDS.get(text, text)
    try:
        return msgspec.convert(text, type_, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{name} must be {_expected(type_)}, got {environ[name]!r}") from None


@functools.cache
def _fields(group: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(group)


def _expected(type_: Any) -> str:
    return next(str(each.description) for each in get_args(type_) if isinstance(each, Meta))
