"""The interval between checkpoints, and the time of the next one. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from farandole.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Every:
    """An interval in seconds or in decided steps; the other one is None."""

    seconds: float | None = None
    steps: int | None = None


def parse_every(text: str) -> Every:
    """Parse `30s`, `10m`, `1.5h` or `500steps`. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|m|h|steps?)", text.strip())
    if match is not None:
        number, unit = match.groups()
        if unit in _SECONDS and float(number) > 0:
            return Every(seconds=float(number) * _SECONDS[unit])
        if unit not in _SECONDS and number.isdigit() and int(number) > 0:
            return Every(steps=int(number))
    raise ConfigError(
        f"--checkpoint-every must be a time such as 30s, 10m or 1h, or steps such as 500steps, got {text!r}"
    )


class Due:
    """The time of the next checkpoint, on one worker. `now_s`, `step`: the start of the count."""

    def __init__(self, every: Every, now_s: float, step: int) -> None:
        self._every = every
        self._since_s, self._since_step = now_s, step

    def is_due(self, now_s: float, step: int) -> bool:
        if self._every.seconds is not None:
            return now_s - self._since_s >= self._every.seconds
        assert self._every.steps is not None
        return step // self._every.steps > self._since_step // self._every.steps

    def restart(self, now_s: float, step: int) -> None:
        """Restart the count: a checkpoint was begun, or the state was replaced."""
        self._since_s, self._since_step = now_s, step
