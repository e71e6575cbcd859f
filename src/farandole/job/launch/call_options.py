"""The arguments of farandole.run() and its likes by name, and the job that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from farandole.base.config import JobConfig
from farandole.base.env import JobEnv, environment_of, inherited_environment, read_job_env, strict_environment
from farandole.errors import ConfigError
from farandole.job.launch.arguments import checkpoint_settings, start_timeout_s
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.joining import check_encryption, tls_folder
from farandole.job.launch.run_parser import CHECKPOINT_DEFAULTS

_TASK = "farandole.training.worker.function_task"


class JobOptions(TypedDict, total=False):
    """The arguments of every such function. farandole.run() describes them."""

    start_timeout: float | None
    env: Mapping[str, str] | None
    prefix_output_with_timestamp: bool
    tls: str | Path | None
    strict: bool
    shards: int | None


class ElasticOptions(JobOptions, total=False):
    """The arguments of those whose job may change."""

    elastic_timeout: float | None
    reset_limit: int | None


class FunctionOptions(ElasticOptions, total=False):
    """The arguments of farandole.run() and farandole.ray.run()."""

    cooldown_range: tuple[float, float] | None
    network_interfaces: Iterable[str] | None
    output_filename: str | Path | None
    verbose: bool | None
    checkpoint: str | Path | None
    checkpoint_every: str
    checkpoint_keep: int
    progress: str


def by_name(
    function: str, known: Any, options: Mapping[str, Any], others: tuple[Any, ...] = (), order: str = ""
) -> dict[str, Any]:
    """Return the arguments of a function, which the TypedDict `known` has, by name: `options`, and those that were
    given by position, `others`, whose names are in `order`. Raises TypeError as Python does."""
    names = order.split()
    if len(others) > len(names):
        raise TypeError(f"{function}() has {len(others) - len(names)} positional arguments too many")
    given = dict(zip(names, others, strict=False))
    if unknown := options.keys() - known.__optional_keys__:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")
    if twice := given.keys() & options.keys():
        raise TypeError(f"{function}() got multiple values for argument {min(twice)!r}")
    return {**given, **options}


def function_job(
    config: JobConfig, *, executable: str | None = None, is_verbose: bool = False, **others: Any
) -> JobSpec:
    """Return the job of a function, about which nothing but warnings is shown unless `is_verbose`. `executable`: the
    Python of the workers; None: that of each agent. `others`: as in JobSpec."""
    others.setdefault("progress", "never")
    command = (executable or "", "-m", _TASK)
    return JobSpec(config=config, command=command, loudness="VERBOSE" if is_verbose else "QUIET", **others)


def job_of(options: Mapping[str, Any], sizes: JobConfig, **others: Any) -> JobSpec:
    """Return the job of a call with these FunctionOptions. `sizes`: the configuration as far as the numbers of workers
    determine it; `others`: as in function_job(). Raises ConfigError where the options cannot work."""
    asked, tls = options.get, tls_folder(options.get("tls"))
    check_encryption(tls, read_job_env().transport)
    elastic_timeout = asked("elastic_timeout")
    config = dataclasses.replace(
        sizes,
        reset_limit=asked("reset_limit"),
        on_failure="host" if asked("cooldown_range") else "slot",
        cooldown_range_s=asked("cooldown_range"),
        start_timeout_s=start_timeout_s(asked("start_timeout")),
        elastic_timeout_s=JobConfig.elastic_timeout_s if elastic_timeout is None else elastic_timeout,
        tls=tls,
    )
    every, keep = CHECKPOINT_DEFAULTS
    folder = asked("output_filename")
    return function_job(
        config,
        is_verbose=bool(asked("verbose")),
        environment=_variables(options, config),
        interfaces=tuple(asked("network_interfaces") or ()),
        checkpoint=checkpoint_settings(
            asked("checkpoint"), asked("checkpoint_every", every), asked("checkpoint_keep", keep)
        ),
        output_directory=None if folder is None else Path(folder),
        prefix_timestamp=asked("prefix_output_with_timestamp", False),
        progress=asked("progress", "never"),
        **others,
    )


def _variables(options: Mapping[str, Any], config: JobConfig) -> Mapping[str, str]:
    """Return the variables of the workers, with those of strict mode."""
    given, shards = dict(options.get("env") or {}), options.get("shards")
    if not options.get("strict") and shards is None:
        return given
    most = config.most_workers
    if shards is not None and shards < most:
        raise ConfigError(f"shards={shards} is below the largest number of workers, {most}: some would have none")
    job = environment_of(JobEnv(strict=True, shards=shards or most))
    return {**job, **strict_environment({**inherited_environment(), **given}), **given}
