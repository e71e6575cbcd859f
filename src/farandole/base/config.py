"""The configuration of a job, and of the notices that end it: checked when built, never changed afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from farandole.errors import ConfigError

ForkServerUse: TypeAlias = Literal["off", "auto", "on"]
"""The workers that a process forks which has imported torch: "off" none; "auto" replacements, which start some seconds
after the beginning of the training; "on" all."""

LEAST_DETECTION_BUDGET_S = 0.1

LONGEST_NAME = 253
"""Characters of the name of a host: as many as the domain name system permits (RFC 1035)."""
MOST_SLOTS = 4_096
"""Slots of one host."""
MOST_AGENTS = 32_768
"""Agents of one job, and its hosts."""
MOST_WORKERS = 65_536
"""Workers of one job, and the slots of all its hosts: beyond it a number is a mistake."""


@dataclass(frozen=True)
class JobConfig:
    """Size, budgets and time limits of one job. Raises ConfigError for invalid values.

    Attributes:
        num_proc: The number of workers to start with and to keep.
        min_np, max_np: The fewest workers that may train; the most that may ever train.
        restarts: The number of times that a slot's worker is replaced after it was lost.
        elastic_timeout_s: How long a job may stay below min_np before it fails.
        start_timeout_s: The time from the first worker's init() until all workers must have called it.
        detection_budget_s: How long a silent host or a stopped worker may stay undetected.
        grace_s: The time from SIGTERM to SIGKILL when a worker is stopped.
        deferred_restart_s: How long, at most, a lost worker's replacement waits for the survivors to train again.
        takes_agents: Agents of other machines may join at any time.
        spares: The number of workers beyond those that train, which wait until one of them is lost.
        step_timeout_s: The time without progress of any worker after which workers that hang are stopped; None: never.
        max_restarts: The number of times that all workers are stopped and started again after one of them failed while
            none had entered an elastic function, as under torchrun. No worker is started before there are slots for
            all. None: such a failure ends the job, except that a worker that is killed before init() is replaced.
        tls: The folder of the job's certificates, with which its TCP connections are encrypted; empty: they are not.
        last_call_s: How long workers that start together in all slots wait for further hosts, when there are enough.

    Options for the different behaviour of Horovod's elastic jobs:

        on_failure: The consequence of a lost worker: its "slot" is restarted within its budget, or its whole "host" is
            excluded with all workers there, whatever the budget.
        cooldown_range_s: The shortest and longest time for which a host is excluded; None: for ever.
        reset_limit: The highest number of generations after the first one; None: any number.
        fills_slots: The job has as many workers as hosts offer slots (up to max_np) and follows the hosts as they come
            and go; it waits for num_proc workers before it begins.
        waits_for_newcomers: Members are told of new hosts at once and then wait for the workers there; otherwise they
            are told of new workers once those are ready to train.
    """

    num_proc: int
    min_np: int = 1
    max_np: int | None = None
    restarts: int = 3
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    detection_budget_s: float = 3.0
    grace_s: float = 5.0
    spares: int = 0
    step_timeout_s: float | None = None
    on_failure: Literal["slot", "host"] = "slot"
    cooldown_range_s: tuple[float, float] | None = None
    reset_limit: int | None = None
    fills_slots: bool = False
    waits_for_newcomers: bool = False
    takes_agents: bool = False
    deferred_restart_s: float = 1.0
    max_restarts: int | None = None
    last_call_s: float = 0.0
    tls: str = ""

    @property
    def most_workers(self) -> int:
        """The most workers that train at once, as far as it is known when the job begins: without a limit a job may
        grow beyond it by `farandole scale`, or with its hosts where it fills their slots."""
        return self.num_proc if self.max_np is None else self.max_np

    @property
    def most_slots(self) -> int:
        """The slots for `most_workers` and for the spares."""
        return self.most_workers + self.spares

    def most_workers_in(self, slots: int) -> int:
        """Return the most workers that train at once in `slots` slots of one host, at least 1. Spares wait, and need no
        cores."""
        is_unlimited = self.max_np is None and self.may_change
        return max(1, min(slots - self.spares, slots if is_unlimited else self.most_workers))

    @property
    def may_change(self) -> bool:
        """True when the job may survive the loss of a worker, or grow. False for a job of fixed size."""
        is_fixed = self.min_np == self.num_proc == self.most_workers
        return self.fills_slots or self.restarts > 0 or self.spares > 0 or not is_fixed

    @property
    def may_start_workers_again(self) -> bool:
        """True when workers may be started after the first ones: a fork server then has something to do."""
        return self.may_change or bool(self.max_restarts)

    def __post_init__(self) -> None:
        for flag, number in (("-np", self.num_proc), ("--min-np", self.min_np)):
            if number < 1:
                raise ConfigError(f"{flag} must be at least 1, got {number}")
        for flag, number in (("-np", self.num_proc), ("--max-np", self.max_np or 0), ("--spares", self.spares)):
            if number > MOST_WORKERS:
                raise ConfigError(f"{flag} must be at most {MOST_WORKERS}, got {number}")
        if self.max_np is not None and self.min_np > self.max_np:
            raise ConfigError(f"--min-np {self.min_np} is above --max-np {self.max_np}")
        if self.min_np > self.num_proc:
            raise ConfigError(f"--min-np {self.min_np} is above -np {self.num_proc}")
        if self.max_np is not None and self.num_proc > self.max_np:
            raise ConfigError(f"-np {self.num_proc} is above --max-np {self.max_np}")
        for flag, most in (
            ("--restarts", self.restarts),
            ("--max-restarts", self.max_restarts),
            ("--spares", self.spares),
            ("--reset-limit", self.reset_limit),
        ):
            if most is not None and most < 0:
                raise ConfigError(f"{flag} must not be negative, got {most}")
        if self.max_restarts is not None and self.on_failure == "host":
            raise ConfigError(
                f"--max-restarts {self.max_restarts} and --on-failure host contradict each other: all workers are "
                "started again, on the same hosts; give one of them"
            )
        if self.spares and self.fills_slots and self.max_np is None:
            raise ConfigError(
                f"--spares {self.spares} needs --max-np: this job trains in every slot that its hosts offer, which "
                "leaves none for a spare"
            )
        for flag, value in (
            ("--elastic-timeout", self.elastic_timeout_s),
            ("--start-timeout", self.start_timeout_s),
            ("--detection-budget", self.detection_budget_s),
            ("--step-timeout", self.step_timeout_s),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{flag} must be a positive number of seconds, got {value}")
        if self.detection_budget_s < LEAST_DETECTION_BUDGET_S:
            raise ConfigError(
                f"--detection-budget must be at least {LEAST_DETECTION_BUDGET_S} s, got {self.detection_budget_s:g}: "
                "a process that waits for a core can be silent for that long"
            )
        if not 0 <= self.grace_s < float("inf"):
            raise ConfigError(f"--grace must be a number of seconds >= 0, got {self.grace_s}")
        if self.on_failure not in ("slot", "host"):
            raise ConfigError(f"--on-failure must be slot or host, got {self.on_failure!r}")
        if self.cooldown_range_s is not None:
            low, high = self.cooldown_range_s
            if not 0 < low <= high < float("inf"):
                raise ConfigError(
                    f"--blacklist-cooldown-range needs two positive numbers of seconds, the smaller one first, "
                    f"got {low} {high}"
                )


CLOUDS = ("auto", "aws", "gcp", "azure", "none")
"""The values of --preemption. "auto": the cloud that the machine's firmware names; "none": nothing is asked."""

_METADATA_SERVICE = "http://169.254.169.254"  # of all these clouds


@dataclass(frozen=True)
class Preemption:
    """Where preemption notices are looked for.

    Attributes:
        cloud: One of CLOUDS.
        endpoint: The address of the metadata service.
    """

    cloud: str = "none"
    endpoint: str = _METADATA_SERVICE

    def __str__(self) -> str:
        return self.cloud if self.endpoint == _METADATA_SERVICE else f"{self.cloud}={self.endpoint}"


def parse_preemption(text: str) -> Preemption:
    """Return the setting: one of CLOUDS, or CLOUD=URL for another address of the metadata service. Raises
    ConfigError."""
    cloud, equals, endpoint = text.partition("=")
    if cloud not in CLOUDS:
        raise ConfigError(f"--preemption must be one of {', '.join(CLOUDS)}, got {text!r}")
    if not equals:
        return Preemption(cloud)
    if cloud in ("auto", "none"):
        raise ConfigError(f"--preemption {text}: an address needs the cloud that answers there, such as aws={endpoint}")
    match = re.fullmatch(r"http://([\w.-]+|\[[0-9a-fA-F:.]+\])(:(?P<port>\d{1,5}))?(/\S*)?", endpoint)
    if match is None or not 0 < int(match["port"] or 80) < 65536:
        raise ConfigError(f"--preemption {text}: the address must look like http://HOST:PORT")
    return Preemption(cloud, endpoint.rstrip("/"))
