"""farandole.spark.run() and run_elastic() run a function as the workers of a job in tasks of a Spark application."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar, Unpack

from farandole.base.config import JobConfig
from farandole.base.env import inherited_environment
from farandole.errors import ConfigError
from farandole.integrations.spark.spark_engine import SparkEngine
from farandole.job.engines.host_list import HostSlots
from farandole.job.launch.call_options import ElasticOptions, JobOptions, by_name, job_of
from farandole.job.launch.job_runner import Additions
from farandole.job.launch.output import OutputSink
from farandole.job.launch.run_function import run_function

T = TypeVar("T")

_START_TIMEOUT_S = 600.0  # as in Horovod: executors may be allocated on demand


class SparkOptions(JobOptions, total=False):
    """The further arguments of run()."""

    use_mpi: bool | None
    use_gloo: bool | None
    extra_mpi_args: str | None
    stdout: TextIO | None
    stderr: TextIO | None
    verbose: int
    nics: Iterable[str] | None
    executable: str | None


class SparkElasticOptions(ElasticOptions, total=False):
    """The further arguments of run_elastic()."""

    stdout: TextIO | None
    stderr: TextIO | None
    verbose: int
    nics: Iterable[str] | None
    min_np: int | None
    max_np: int | None


_OUTPUT = "env stdout stderr verbose nics prefix_output_with_timestamp"
BY_POSITION = f"start_timeout use_mpi use_gloo extra_mpi_args {_OUTPUT} executable tls strict shards"
ELASTIC_BY_POSITION = f"start_timeout elastic_timeout reset_limit {_OUTPUT} min_np max_np tls strict shards"
"""The arguments of run() after num_proc, and of run_elastic() after max_num_proc, in Horovod's order."""


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *others: Any,
    **options: Unpack[SparkOptions],
) -> list[T]:
    """Call `fn(*args, **kwargs)` in each of `num_proc` workers, each in a task of the active Spark application, and
    return their results, by rank. The loss of a worker ends the job.

    See the example of `run`.

    Args:
        fn: The function for the workers. It travels as with farandole.run().
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of workers; None: spark.default.parallelism.
        others: Further arguments by position, in the order of horovod.spark.run().
        options: The keyword arguments below; and env, prefix_output_with_timestamp, tls, strict and shards as in
            farandole.run().

    Keyword Args:
        start_timeout: Seconds within which all workers must have started; None: 600.
        stdout: The stream for what workers write to standard output; None: sys.stdout.
        stderr: The stream for what workers write to standard error; None: sys.stderr.
        verbose: From 2 on, the launcher's log is shown.
        nics: The network interfaces that are used between hosts; None: those that Spark uses.
        executable: Another Python for the workers.
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
    given = by_name("farandole.spark.run", SparkOptions, options, others, BY_POSITION)
    if given.get("use_mpi") or given.get("extra_mpi_args"):
        warnings.warn("farandole.spark.run: use_mpi and extra_mpi_args have no effect: there is no MPI", stacklevel=2)
    context = active_context()
    workers = context.defaultParallelism if num_proc is None else num_proc
    sizes = JobConfig(workers, min_np=workers, max_np=workers, restarts=0)
    return _run(context, lambda: fn(*args, **(kwargs or {})), sizes, given)


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *others: Any,
    **options: Unpack[SparkElasticOptions],
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
        others: Further arguments by position, in the order of horovod.spark.run_elastic().
        options: The keyword arguments below; and start_timeout, stdout, stderr, verbose, nics and all others as in
            run().

    Keyword Args:
        elastic_timeout: Seconds for which the job may have fewer workers than `min_num_proc`; None: 600.
        reset_limit: As --reset-limit.
        min_np: Another name of min_num_proc.
        max_np: Another name of max_num_proc.

    Returns:
        The results of the workers that completed the function, by rank.

    Raises:
        FunctionFailed: A worker raised, or the job had too few workers for too long. It is a RuntimeError.
        ConfigError: There is no active SparkContext, pyspark is not installed, or the arguments cannot work.
        TypeError: `fn` cannot be sent.
    """
    given = by_name("farandole.spark.run_elastic", SparkElasticOptions, options, others, ELASTIC_BY_POSITION)
    context = active_context()
    workers = context.defaultParallelism if num_proc is None else num_proc
    fewest = min_num_proc if given.get("min_np") is None else given["min_np"]
    most = max_num_proc if given.get("max_np") is None else given["max_np"]
    sizes = JobConfig(
        workers,
        min_np=workers if fewest is None else fewest,
        max_np=workers if most is None else most,
        fills_slots=True,  # a task of each further executor is a slot
    )
    return _run(context, lambda: fn(*args, **(kwargs or {})), sizes, given)


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


def _run(context: Any, call: Callable[[], T], sizes: JobConfig, given: Mapping[str, Any]) -> list[T]:
    inherited = inherited_environment()
    found_by = {"PYTHONPATH": inherited["PYTHONPATH"]} if "PYTHONPATH" in inherited else {}
    engine = SparkEngine(context, found_by)
    asked = {
        **given,
        "start_timeout": given.get("start_timeout") or _START_TIMEOUT_S,
        "verbose": given.get("verbose", 1) >= 2,
        "network_interfaces": given.get("nics"),
    }
    spec = job_of(
        asked,
        sizes,
        hosts=tuple(HostSlots(f"spark-task-{index}", 1) for index in range(sizes.most_workers)),
        # Executors reach this process at this address: Spark needs it, too.
        host="" if asked["network_interfaces"] else context.getConf().get("spark.driver.host", ""),
        executable=given.get("executable"),
    )
    additions = Additions(
        make_engine=lambda _on_event: engine,
        make_sink=lambda options, line: OutputSink(options, line, given.get("stdout"), given.get("stderr")),
    )
    return run_function(call, spec, additions)


__all__ = ["run", "run_elastic"]
