"""farandole.spark.run() and run_elastic() run a function as the workers of a job in tasks of a Spark application."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from farandole.base.config import JobConfig
from farandole.base.env import inherited_environment
from farandole.errors import ConfigError
from farandole.integrations.spark.spark_engine import SparkEngine
from farandole.job.engines.host_list import HostSlots
from farandole.job.launch.output import output_options
from farandole.job.launch.run_function import StartSettings, encryption_of_call, run_function, strict_variables

T = TypeVar("T")

_START_TIMEOUT_S = 600.0  # as in Horovod: executors may be allocated on demand


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    tls: str | Path | None = None,
    strict: bool = False,
    shards: int | None = None,
) -> list[T]:
    """Call `fn(*args, **kwargs)` in each of `num_proc` workers, each in a task of the active Spark application, and
    return their results, by rank. The loss of a worker ends the job.

    See the example of `run`.

    Args:
        fn: The function for the workers. It travels as with farandole.run().
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of workers; None: spark.default.parallelism.
        start_timeout: Seconds within which all workers must have started; None: 600.
        env: Variables of the workers in addition to those of this process.
        stdout: The stream for what workers write to standard output; None: sys.stdout.
        stderr: The stream for what workers write to standard error; None: sys.stderr.
        verbose: From 2 on, the launcher's log is shown.
        nics: The network interfaces that are used between hosts; None: those that Spark uses.
        prefix_output_with_timestamp: As in farandole.run().
        executable: Another Python for the workers.
        tls: As in farandole.run().
        strict: As in farandole.run().
        shards: As in farandole.run().
        use_gloo: Accepted; requests the default behaviour.
        use_mpi: Accepted with a warning, as there is no MPI.
        extra_mpi_args: Accepted with a warning, as there is no MPI.

    Returns:
        The results of the workers, by rank.

    Raises:
        FunctionFailed: A worker raised; with the traceback of the first one. It is a RuntimeError.
        ConfigError: There is no active SparkContext, pyspark is not installed, or the arguments cannot work.
        TypeError: `fn` cannot be sent.
    """
    if use_mpi or extra_mpi_args:
        warnings.warn("farandole.spark.run: use_mpi and extra_mpi_args have no effect: there is no MPI", stacklevel=2)
    context = active_context()
    workers = context.defaultParallelism if num_proc is None else num_proc
    config = JobConfig(
        num_proc=workers,
        min_np=workers,
        max_np=workers,
        restarts=0,
        start_timeout_s=start_timeout or _START_TIMEOUT_S,
        tls=encryption_of_call(tls),
    )
    variables = strict_variables(strict, shards, config, env)
    output = _Output(stdout, stderr, verbose, prefix_output_with_timestamp)
    return _run(context, lambda: fn(*args, **(kwargs or {})), config, variables, nics, output, executable)


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    tls: str | Path | None = None,
    strict: bool = False,
    shards: int | None = None,
) -> list[T]:
    """Call an elastic function in tasks of the active Spark application, and return the results of the workers that
    completed it, by rank. The job continues when executors are taken away, and grows when there are more.

    See the example of `run`.

    Args:
        fn: The function for the workers.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of workers at the start; None: spark.default.parallelism.
        min_num_proc: The fewest workers that may train; None: num_proc.
        max_num_proc: The most workers, and the number of tasks that are submitted; None: num_proc.
        start_timeout: As in run(), in seconds.
        elastic_timeout: Seconds for which the job may have fewer workers than `min_num_proc`; None: 600.
        reset_limit: As --reset-limit.
        env: As in run().
        stdout: As in run().
        stderr: As in run().
        verbose: As in run().
        nics: As in run().
        prefix_output_with_timestamp: As in run().
        tls: As in run().
        strict: As in farandole.run().
        shards: As in farandole.run().
        min_np: Another name of min_num_proc.
        max_np: Another name of max_num_proc.

    Returns:
        The results of the workers that completed the function, by rank.

    Raises:
        FunctionFailed: A worker raised, or the job had too few workers for too long. It is a RuntimeError.
        ConfigError: There is no active SparkContext, pyspark is not installed, or the arguments cannot work.
        TypeError: `fn` cannot be sent.
    """
    context = active_context()
    workers = context.defaultParallelism if num_proc is None else num_proc
    fewest = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    config = JobConfig(
        num_proc=workers,
        min_np=workers if fewest is None else fewest,
        max_np=workers if most is None else most,
        fills_slots=True,  # a task of each further executor is a slot
        reset_limit=reset_limit,
        start_timeout_s=start_timeout or _START_TIMEOUT_S,
        elastic_timeout_s=JobConfig.elastic_timeout_s if elastic_timeout is None else elastic_timeout,
        tls=encryption_of_call(tls),
    )
    variables = strict_variables(strict, shards, config, env)
    output = _Output(stdout, stderr, verbose, prefix_output_with_timestamp)
    return _run(context, lambda: fn(*args, **(kwargs or {})), config, variables, nics, output)


def active_context() -> Any:
    """Return the active SparkContext. Raises ConfigError when there is none."""
    try:
        from pyspark import SparkContext
    except ImportError:
        raise ConfigError("pyspark is not installed: pip install 'farandole[spark]'") from None
    context = SparkContext._active_spark_context
    if context is None:
        raise ConfigError("there is no active SparkContext: create a SparkSession first; Spark Connect has none")
    return context


@dataclass(frozen=True)
class _Output:
    """What becomes of the workers' output; the names are those of run()."""

    stdout: TextIO | None
    stderr: TextIO | None
    verbose: int
    prefix_output_with_timestamp: bool


def _run(
    context: Any,
    call: Callable[[], T],
    config: JobConfig,
    env: Mapping[str, str] | None,
    nics: Iterable[str] | None,
    output: _Output,
    executable: str | None = None,
) -> list[T]:
    inherited = inherited_environment()
    found_by = {"PYTHONPATH": inherited["PYTHONPATH"]} if "PYTHONPATH" in inherited else {}
    engine = SparkEngine(context, found_by)
    interfaces = tuple(nics or ())
    # Executors reach this process at this address: Spark needs it, too.
    host = "" if interfaces else context.getConf().get("spark.driver.host", "")
    return run_function(
        call,
        config,
        hosts=tuple(HostSlots(f"spark-task-{index}", 1) for index in range(config.max_np or config.num_proc)),
        start=StartSettings(lambda _on_event: engine, interfaces, host),
        output=output_options(config, None, output.prefix_output_with_timestamp),
        streams=(output.stdout, output.stderr),
        is_verbose=output.verbose >= 2,
        environment=env,
        executable=executable,
    )


__all__ = ["run", "run_elastic"]
