"""The arguments of run() and its likes, and the jobs that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.base.config import JobConfig
from farandole.base.env import CheckpointEnv
from farandole.errors import ConfigError
from farandole.integrations.ray.ray_function import RayOptions
from farandole.integrations.spark import spark_function
from farandole.job.launch import run_function
from farandole.job.launch.call_options import FunctionOptions, by_name, function_job, job_of


@pytest.mark.parametrize(
    ("known", "order"),
    [
        (run_function.RunOptions, run_function.BY_POSITION),
        (spark_function.SparkOptions, spark_function.BY_POSITION),
        (spark_function.SparkElasticOptions, spark_function.ELASTIC_BY_POSITION),
    ],
    ids=["run", "spark.run", "spark.run_elastic"],
)
def test_an_argument_may_be_given_by_its_position_or_by_its_name(known: Any, order: str) -> None:
    names = order.split()
    values = tuple(range(len(names)))
    given = by_name("run", known, {}, values, order)
    assert given == dict(zip(names, values, strict=True))
    assert by_name("run", known, given, (), order) == given


def test_every_argument_arrives_in_the_job() -> None:
    options: FunctionOptions = {
        "start_timeout": 7.0,
        "elastic_timeout": 8.0,
        "reset_limit": 3,
        "cooldown_range": (1.0, 2.0),
        "env": {"A": "b"},
        "prefix_output_with_timestamp": True,
        "network_interfaces": ["lo"],
        "output_filename": "out",
        "verbose": True,
        "checkpoint": "/data",
        "checkpoint_every": "5steps",
        "checkpoint_keep": 4,
        "progress": "always",
    }
    spec = job_of(options, JobConfig(2, min_np=1, max_np=4), host="10.0.0.1")
    assert spec.config == JobConfig(
        2,
        1,
        4,
        elastic_timeout_s=8.0,
        start_timeout_s=7.0,
        on_failure="host",
        cooldown_range_s=(1.0, 2.0),
        reset_limit=3,
    )
    assert (spec.environment, spec.interfaces, spec.host) == ({"A": "b"}, ("lo",), "10.0.0.1")
    assert (spec.output_directory, spec.prefix_timestamp) == (Path("out"), True)
    assert spec.checkpoint == CheckpointEnv("/data", "5steps", 4)
    assert (spec.loudness, spec.progress) == ("VERBOSE", "always")


def test_without_arguments_a_job_is_as_its_configuration_and_says_nothing() -> None:
    spec = job_of({}, JobConfig(2))
    assert spec == function_job(JobConfig(2))
    assert (spec.loudness, spec.progress, spec.checkpoint, spec.environment) == ("QUIET", "never", None, {})


def test_strict_mode_has_a_shard_for_each_of_the_most_workers() -> None:
    assert job_of({"strict": True}, JobConfig(2, max_np=4)).environment["FARANDOLE_SHARDS"] == "4"
    assert job_of({"shards": 8}, JobConfig(2, max_np=4)).environment["FARANDOLE_SHARDS"] == "8"
    with pytest.raises(ConfigError, match="shards=3 is below the largest number of workers, 4"):
        job_of({"shards": 3}, JobConfig(2, max_np=4))


def test_what_an_entry_does_not_know_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"farandole.ray.run\(\) got an unexpected keyword argument 'hosts'"):
        by_name("farandole.ray.run", RayOptions, {"hosts": "a"})
    with pytest.raises(ConfigError, match="progress must be one of"):
        job_of({"progress": "yes"}, JobConfig(2))
