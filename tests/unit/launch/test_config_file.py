"""A configuration file in Horovod's form says what flags say; what is wrong in it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.errors import ConfigError
from farandole.integrations.horovod.launcher_options import read_config_file
from farandole.job.launch.arguments import parse_run

EVERYTHING = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 10, cache_capacity: 2048, hierarchical_allreduce: true,
         hierarchical_allgather: true, torus_allreduce: false}
autotune: {enabled: true, log_file: tuning.txt, warmup_samples: 5, steps_per_sample: 20, bayes_opt_max_samples: 50,
           gaussian_process_noise: 0.9}
timeline: {filename: timeline.json, mark_cycles: true}
stall_check: {enabled: true, warning_time_seconds: 120, shutdown_time_seconds: 240}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, thread_affinity: 1, gloo_timeout_seconds: 60}
logging: {level: INFO, hide_timestamp: true}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_everything_that_horovod_knows_is_read(file: Path) -> None:
    file.write_text(EVERYTHING)
    read = read_config_file(file)
    assert (read.controller, read.unknown) == ("gloo", ())
    assert {name: given.value for name, given in read.settings.items()} == {
        "fusion_threshold_mb": 32,
        "cycle_time_ms": 10.0,
        "cache_capacity": 2048,
        "hierarchical_allreduce": True,
        "hierarchical_allgather": True,
        "torus_allreduce": False,
        "autotune": True,
        "autotune_log_file": "tuning.txt",
        "autotune_warmup_samples": 5,
        "autotune_steps_per_sample": 20,
        "autotune_bayes_opt_max_samples": 50,
        "autotune_gaussian_process_noise": 0.9,
        "timeline_filename": "timeline.json",
        "timeline_mark_cycles": True,
        "no_stall_check": False,
        "stall_check_warning_time_seconds": 120,
        "stall_check_shutdown_time_seconds": 240,
        "mpi_threads_disable": True,
        "num_nccl_streams": 2,
        "thread_affinity": 1,
        "gloo_timeout_seconds": 60,
        "log_level": "INFO",
        "log_with_timestamp": False,
    }


@pytest.mark.parametrize("text", ["", "params:\n", "params: {cache_capacity: }\n", "# nothing\n"])
def test_what_is_empty_says_nothing(file: Path, text: str) -> None:
    file.write_text(text)
    assert read_config_file(file).settings == {}


@pytest.mark.parametrize("order", ["--config-file {} {}", "{1} --config-file {0}"])
def test_flags_win_over_the_file_wherever_they_stand(file: Path, order: str) -> None:
    file.write_text("params: {fusion-threshold-mb: 32, cache_capacity: 4}\nstall-check: {enabled: false}\n")
    words = order.format(file, "--fusion-threshold-mb 256 --stall-check")
    assert parse_run(["-np", "2", *words.split(), "sh"]).environment == {
        "HOROVOD_FUSION_THRESHOLD": str(256 << 20),
        "HOROVOD_CACHE_CAPACITY": "4",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
    }


def test_what_has_no_effect_is_named_by_its_key(file: Path) -> None:
    file.write_text("controller: mpi\nparams: {cycle_time_ms: 1, colour: red}\nengine: {speed: 3}\n")
    assert parse_run(["-np", "2", "--config-file", str(file), "sh"]).notes == (
        f"{file}: the unknown setting params.colour is ignored",
        f"{file}: the unknown setting engine is ignored",
        f"{file}: controller mpi has no effect: Farandole does not use MPI",
        f"{file}: params.cycle_time_ms has no effect: operations start as soon as all ranks have submitted them",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("params: {cache_capacity: -1}", "params.cache_capacity must be >= 0, got -1"),
        ("params: {cache_capacity: many}", "params.cache_capacity must be a whole number, got 'many'"),
        ("params: {cache_capacity: true}", "params.cache_capacity must be a whole number, got True"),
        ("params: {cycle_time_ms: [1]}", r"params.cycle_time_ms must be a number, got \[1\]"),
        ("timeline: {filename: 3}", "timeline.filename must be a text, got 3"),
        ("timeline: {mark_cycles: 1}", "timeline.mark_cycles must be true or false, got 1"),
        ("stall_check: {enabled: 'off'}", "stall_check.enabled must be true or false, got 'off'"),
        ("autotune: {gaussian_process_noise: 2}", "gaussian_process_noise must be between 0 and 1, got 2"),
        ("logging: {level: LOUD}", "logging.level must be one of TRACE, .* got LOUD"),
        ("controller: smoke", "controller must be gloo or mpi, got smoke"),
        ("params: 3", "params must contain keys and values, got 3"),
        ("- params", r"must contain sections such as 'params:', got \['params'\]"),
        ("params: {", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_and_value(file: Path, text: str, reason: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason) as error:
        read_config_file(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings.yaml cannot be read: .*No such file"):
        read_config_file(file)
