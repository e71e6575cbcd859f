"""The base of all events, and how their lines name things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, dataclass_transform

Level: TypeAlias = Literal["info", "warning"]
Field: TypeAlias = str | int | float | bool | tuple[str, ...] | None


@dataclass_transform(frozen_default=True)
class Event:
    """Base of all events, which are frozen dataclasses. `level`, an argument of the class, is the log level, `line()`
    the text for people, `fields()` the values for programs."""

    level: ClassVar[Level]
    sentence: ClassVar[str]
    """The line of an event, with fields in braces, where it needs no more than these."""

    def __init_subclass__(cls, level: Level = "info") -> None:
        cls.level = level
        dataclass(frozen=True)(cls)

    def line(self) -> str:
        """Return one sentence without a full stop, for the log."""
        return self.sentence.format(**vars(self))

    def fields(self) -> dict[str, Field]:
        """Return the event's name and values, ready for JSON."""
        return {"event": type(self).__name__, **vars(self)}


def count(number: int, noun: str) -> str:
    """Format a count: `1 slot`, `2 slots`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


MOST_NAMED = 16


def named(names: Sequence[str]) -> str:
    """Join names for a line. A line of a large job has the first ones, and the number of the others."""
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    first = names[: MOST_NAMED // 2]
    return f"{', '.join(first)} and {len(names) - len(first)} others"
