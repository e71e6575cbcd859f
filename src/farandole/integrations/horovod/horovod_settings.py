"""The settings that Horovod reads from HOROVOD_ variables: flag, key in a configuration file, variable, and whether
they have an effect here. Pure; launcher_options.py makes flags of them, settings_file.py reads them from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

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


def by_key() -> dict[tuple[str, str], Setting]:
    """Return all settings, by section and key in a configuration file."""
    return {setting.key: setting for setting in SETTINGS}


def _reason(setting: Setting, given: Mapping[str, Given]) -> str:
    if setting.needs == "timeline_filename" and "timeline_filename" not in given:
        return "there is no timeline without --timeline-filename"
    return setting.no_effect


_AT_ONCE = "operations start as soon as all ranks have submitted them"
_TRANSPORT = "--transport selects the transport, which is hierarchical by default on several hosts"
_NO_TUNING = "only the size of buckets is tuned, in the first steps, with a loader of Farandole"
_NO_MPI = "Farandole does not use MPI"
_NO_TIMES = "log lines of workers have no time; --prefix-timestamp adds it to every line"


def _switch(name: str, variable: str, key: tuple[str, str], text: str, no_effect: str = "") -> Setting:
    flag = name.replace("_", "-")
    return Setting(name, bool, variable, key, text, no_effect, on=(f"--{flag}",), off=(f"--no-{flag}",))


def _tuning(name: str, kind: type[int] | type[float] | type[str], most: float = float("inf")) -> Setting:
    variable = {"log_file": "LOG"}.get(name, name.upper())
    return Setting(
        f"autotune_{name}",
        kind,
        f"HOROVOD_AUTOTUNE_{variable}",
        ("autotune", name),
        "",
        _NO_TUNING,
        most=most,
        needs="autotune",
    )


SETTINGS = (
    Setting(
        "fusion_threshold_mb",
        int,
        "HOROVOD_FUSION_THRESHOLD",
        ("params", "fusion_threshold_mb"),
        "maximum MiB of tensors that are reduced together; 0: each tensor separately (default: 64)",
        unit=1 << 20,
    ),
    Setting(
        "cache_capacity",
        int,
        "HOROVOD_CACHE_CAPACITY",
        ("params", "cache_capacity"),
        "number of operations that are cached, so that their announcement takes few bytes (default: 1024)",
    ),
    Setting("cycle_time_ms", float, "HOROVOD_CYCLE_TIME", ("params", "cycle_time_ms"), "", _AT_ONCE),
    _switch(
        "hierarchical_allreduce",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        ("params", "hierarchical_allreduce"),
        "",
        _TRANSPORT,
    ),
    _switch(
        "hierarchical_allgather",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        ("params", "hierarchical_allgather"),
        "",
        _TRANSPORT,
    ),
    _switch("torus_allreduce", "HOROVOD_TORUS_ALLREDUCE", ("params", "torus_allreduce"), "", _TRANSPORT),
    _switch("autotune", "HOROVOD_AUTOTUNE", ("autotune", "enabled"), "", _NO_TUNING),
    _tuning("log_file", str),
    _tuning("warmup_samples", int),
    _tuning("steps_per_sample", int),
    _tuning("bayes_opt_max_samples", int),
    _tuning("gaussian_process_noise", float, most=1),
    Setting(
        "timeline_filename",
        str,
        "HOROVOD_TIMELINE",
        ("timeline", "filename"),
        "write a timeline of the named operations to this file, for chrome://tracing",
    ),
    Setting(
        "timeline_mark_cycles",
        bool,
        "HOROVOD_TIMELINE_MARK_CYCLES",
        ("timeline", "mark_cycles"),
        "mark the start of each negotiation round in the timeline",
        on=("--timeline-mark-cycles",),
        off=("--no-timeline-mark-cycles",),
        needs="timeline_filename",
    ),
    Setting(
        "no_stall_check",
        bool,
        "HOROVOD_STALL_CHECK_DISABLE",
        ("stall_check", "disabled"),
        "do not warn about operations that only some ranks have submitted",
        on=("--no-stall-check",),
        off=("--stall-check",),
    ),
    Setting(
        "stall_check_warning_time_seconds",
        int,
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        ("stall_check", "warning_time_seconds"),
        "seconds until the warning about such operations (default: 60)",
    ),
    Setting(
        "stall_check_shutdown_time_seconds",
        int,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        ("stall_check", "shutdown_time_seconds"),
        "seconds until such operations fail; must be more than those of the warning (default: no limit)",
    ),
    _switch(
        "mpi_threads_disable",
        "HOROVOD_MPI_THREADS_DISABLE",
        ("library_options", "mpi_threads_disable"),
        "",
        _NO_MPI,
    ),
    Setting(
        "num_nccl_streams",
        int,
        "HOROVOD_NUM_NCCL_STREAMS",
        ("library_options", "num_nccl_streams"),
        "",
        "torch determines the streams on which NCCL runs",
    ),
    Setting(
        "thread_affinity",
        int,
        "HOROVOD_THREAD_AFFINITY",
        ("library_options", "thread_affinity"),
        "",
        "the operating system schedules the threads of a worker",
    ),
    Setting(
        "gloo_timeout_seconds",
        int,
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        ("library_options", "gloo_timeout_seconds"),
        "",
        "operations have no timeout; --detection-budget and --step-timeout limit how long a fault stays undetected",
    ),
    Setting(
        "log_level",
        str,
        "HOROVOD_LOG_LEVEL",
        ("logging", "level"),
        "lowest level of the workers' log lines to show (default: that of the script's logging, in Python WARNING)",
        choices=LOG_LEVELS,
    ),
    Setting(
        "log_with_timestamp",
        bool,
        "HOROVOD_LOG_HIDE_TIME",
        ("logging", "with_timestamp"),
        "",
        _NO_TIMES,
        on=("--log-with-timestamp", "--no-log-hide-timestamp"),
        off=("--log-without-timestamp", "--log-hide-timestamp"),
    ),
)
