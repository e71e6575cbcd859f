"""The settings that Horovod reads from HOROVOD_ variables: flag, key in a configuration file, variable, and whether
they have an effect here. Pure; launcher_options.py makes flags of them, and reads them from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from farandole.errors import ConfigError

Value: TypeAlias = "int | float | str | bool"

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Setting:
    """A setting.

    name       of the parsed option, as in Horovod
    kind       type of its value
    variable   the workers' variable for it
    key        section and key in a configuration file
    no_effect  why it has no effect here; empty where it has one
    on, off    flags of a switch; any other setting has one flag, made of its name
    unit       factor from the setting's value to the variable's
    most       greatest value; the smallest is 0
    needs      a setting without which the workers do not get this one
    """

    name: str
    kind: type[int] | type[float] | type[str] | type[bool]
    variable: str
    key: tuple[str, str]
    help: str
    no_effect: str = ""
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    unit: int = 1
    most: float = float("inf")
    choices: tuple[str, ...] = ()
    needs: str = ""

    @property
    def flag(self) -> str:
        return self.on[0] if self.on else "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Given:
    """The value of a setting, and its label in messages: a flag, or a key of a file."""

    value: Value
    label: str


def check(setting: Setting, given: Given) -> None:
    """Raise ConfigError for a value that Horovod refuses too."""
    value, label = given.value, given.label
    if setting.choices and value not in setting.choices:
        raise ConfigError(f"{label} must be one of {', '.join(setting.choices)}, got {value}")
    if setting.kind in (int, float):
        assert isinstance(value, (int, float))
        if not 0 <= value <= setting.most:
            limits = ">= 0" if setting.most == float("inf") else f"between 0 and {setting.most:g}"
            raise ConfigError(f"{label} must be {limits}, got {value}")


def check_stall_times(given: Mapping[str, Given]) -> None:
    """Raise ConfigError if a stalled operation would fail before the warning about it."""
    warning, shutdown = (given.get(f"stall_check_{name}_time_seconds") for name in ("warning", "shutdown"))
    if warning is None or shutdown is None or not shutdown.value:
        return
    if float(shutdown.value) <= float(warning.value):
        raise ConfigError(
            f"{shutdown.label} must be more than the {warning.value} s of {warning.label}, got {shutdown.value}"
        )


def variables(given: Mapping[str, Given]) -> dict[str, str]:
    """Return the variables of these settings for the workers' environment."""
    environment = {}
    for setting in SETTINGS:
        if setting.name in given and (not setting.needs or (setting.needs in given and given[setting.needs].value)):
            value = given[setting.name].value
            if setting.name == "log_with_timestamp":  # The variable has the opposite meaning of the setting.
                value = not value
            if isinstance(value, bool):
                value = int(value)
            environment[setting.variable] = str(value * setting.unit if isinstance(value, (int, float)) else value)
    if "autotune" in given and not given["autotune"].value:
        del environment["HOROVOD_AUTOTUNE"]
    return environment


def without_effect(given: Mapping[str, Given]) -> list[tuple[str, str]]:
    """Return (label, reason) of the given settings that have no effect."""
    return [
        (given[setting.name].label, reason)
        for setting in SETTINGS
        if setting.name in given and given[setting.name].value is not False and (reason := _reason(setting, given))
    ]


def _reason(setting: Setting, given: Mapping[str, Given]) -> str:
    if setting.needs == "timeline_filename" and "timeline_filename" not in given:
        return "there is no timeline without --timeline-filename"
    return setting.no_effect


_AT_ONCE = "operations start as soon as all ranks have submitted them"
_TRANSPORT = "--transport selects the transport, which is hierarchical by default on several hosts"
_NO_TUNING = "only the size of buckets is tuned, in the first steps, with a loader of Farandole"
_OF_TUNING: dict[str, Any] = {"no_effect": _NO_TUNING, "needs": "autotune"}


def _setting(
    section: str,
    name: str,
    kind: type[int] | type[float] | type[str] | type[bool],
    text: str = "",
    *,
    variable: str = "",
    key: str = "",
    **more: Any,
) -> Setting:
    """Return a setting whose key, variable and flags follow from its name, except for those that are given."""
    if kind is bool and "on" not in more:
        flag = name.replace("_", "-")
        more["on"], more["off"] = (f"--{flag}",), (f"--no-{flag}",)
    place = section, key or name.removeprefix(f"{section}_")
    return Setting(name, kind, f"HOROVOD_{variable or name.upper()}", place, text, **more)


SETTINGS = (
    _setting(
        "params",
        "fusion_threshold_mb",
        int,
        "maximum MiB of tensors that are reduced together; 0: each tensor separately (default: 64)",
        variable="FUSION_THRESHOLD",
        unit=1 << 20,
    ),
    _setting(
        "params",
        "cache_capacity",
        int,
        "number of operations that are cached, so that their announcement takes few bytes (default: 1024)",
    ),
    _setting("params", "cycle_time_ms", float, variable="CYCLE_TIME", no_effect=_AT_ONCE),
    _setting("params", "hierarchical_allreduce", bool, no_effect=_TRANSPORT),
    _setting("params", "hierarchical_allgather", bool, no_effect=_TRANSPORT),
    _setting("params", "torus_allreduce", bool, no_effect=_TRANSPORT),
    _setting("autotune", "autotune", bool, key="enabled", no_effect=_NO_TUNING),
    _setting("autotune", "autotune_log_file", str, variable="AUTOTUNE_LOG", **_OF_TUNING),
    _setting("autotune", "autotune_warmup_samples", int, **_OF_TUNING),
    _setting("autotune", "autotune_steps_per_sample", int, **_OF_TUNING),
    _setting("autotune", "autotune_bayes_opt_max_samples", int, **_OF_TUNING),
    _setting("autotune", "autotune_gaussian_process_noise", float, most=1, **_OF_TUNING),
    _setting(
        "timeline",
        "timeline_filename",
        str,
        "write a timeline of the named operations to this file, for chrome://tracing",
        variable="TIMELINE",
    ),
    _setting(
        "timeline",
        "timeline_mark_cycles",
        bool,
        "mark the start of each negotiation round in the timeline",
        needs="timeline_filename",
    ),
    _setting(
        "stall_check",
        "no_stall_check",
        bool,
        "do not warn about operations that only some ranks have submitted",
        variable="STALL_CHECK_DISABLE",
        key="disabled",
        on=("--no-stall-check",),
        off=("--stall-check",),
    ),
    _setting(
        "stall_check",
        "stall_check_warning_time_seconds",
        int,
        "seconds until the warning about such operations (default: 60)",
        variable="STALL_CHECK_TIME_SECONDS",
    ),
    _setting(
        "stall_check",
        "stall_check_shutdown_time_seconds",
        int,
        "seconds until such operations fail; must be more than those of the warning (default: no limit)",
        variable="STALL_SHUTDOWN_TIME_SECONDS",
    ),
    _setting("library_options", "mpi_threads_disable", bool, no_effect="Farandole does not use MPI"),
    _setting("library_options", "num_nccl_streams", int, no_effect="torch determines the streams on which NCCL runs"),
    _setting(
        "library_options", "thread_affinity", int, no_effect="the operating system schedules the threads of a worker"
    ),
    _setting(
        "library_options",
        "gloo_timeout_seconds",
        int,
        no_effect=(
            "operations have no timeout; --detection-budget and --step-timeout limit how long a fault stays undetected"
        ),
    ),
    _setting(
        "logging",
        "log_level",
        str,
        "lowest level of the workers' log lines to show (default: that of the script's logging, in Python WARNING)",
        key="level",
        choices=LOG_LEVELS,
    ),
    _setting(
        "logging",
        "log_with_timestamp",
        bool,
        variable="LOG_HIDE_TIME",
        key="with_timestamp",
        no_effect="log lines of workers have no time; --prefix-timestamp adds it to every line",
        on=("--log-with-timestamp", "--no-log-hide-timestamp"),
        off=("--log-without-timestamp", "--log-hide-timestamp"),
    ),
)
