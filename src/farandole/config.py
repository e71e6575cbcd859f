"""What a job was asked to be: checked when built, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.errors import ConfigError


@dataclass(frozen=True)
class JobConfig:
    """Size, budgets and time limits of one job. Raises ConfigError on values that cannot work.

    num_proc            workers to start with and to keep
    min_np, max_np      fewest workers that may train; most that may ever train
    restarts            how often a slot's worker is replaced after it was lost
    elastic_timeout_s   how long a job may stay below min_np before it fails
    start_timeout_s     from the first worker's init() until all workers must have called it
    detection_budget_s  how long a silent host or a stopped worker may stay unnoticed
    grace_s             from SIGTERM to SIGKILL when a worker is stopped
    """

    num_proc: int
    min_np: int = 1
    max_np: int | None = None
    restarts: int = 3
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    detection_budget_s: float = 3.0
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if self.num_proc < 1:
            raise ConfigError(f"-np must be at least 1, got {self.num_proc}")
        if self.min_np < 1:
            raise ConfigError(f"--min-np must be at least 1, got {self.min_np}")
        if self.max_np is not None and self.min_np > self.max_np:
            raise ConfigError(f"--min-np {self.min_np} is above --max-np {self.max_np}")
        if self.min_np > self.num_proc:
            raise ConfigError(f"--min-np {self.min_np} is above -np {self.num_proc}")
        if self.max_np is not None and self.num_proc > self.max_np:
            raise ConfigError(f"-np {self.num_proc} is above --max-np {self.max_np}")
        if self.restarts < 0:
            raise ConfigError(f"--restarts must not be negative, got {self.restarts}")
        for flag, value in (
            ("--elastic-timeout", self.elastic_timeout_s),
            ("--start-timeout", self.start_timeout_s),
            ("--detection-budget", self.detection_budget_s),
        ):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{flag} must be a positive number of seconds, got {value}")
        if not 0 <= self.grace_s < float("inf"):
            raise ConfigError(f"--grace must be a number of seconds >= 0, got {self.grace_s}")
