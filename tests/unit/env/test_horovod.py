"""Horovod's variables, read and written without an environment."""

from __future__ import annotations

import pytest

from farandole.base import env
from farandole.base.membership import Placement
from farandole.errors import ConfigError


def test_workers_are_told_their_place_as_by_horovod() -> None:
    assert env.horovod_environment(Placement(3, 4, 1, 2, 0, 2), "node1", is_elastic=True) == {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "node1",
        "HOROVOD_ELASTIC": "1",
    }


def test_nothing_set_gives_horovod_s_defaults() -> None:
    assert env.read_horovod_settings({}) == env.HorovodSettings()
    assert env.read_horovod_settings({"HOROVOD_TIMELINE": "", "HOROVOD_CACHE_CAPACITY": ""}) == env.HorovodSettings()


def test_the_user_s_settings_are_read() -> None:
    said = {
        "HOROVOD_TIMELINE": "/tmp/timeline.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "true",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2.5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CACHE_CAPACITY": "16",
        "HOROVOD_LOG_LEVEL": "DEBUG",
    }
    assert env.read_horovod_settings(said) == env.HorovodSettings(
        timeline="/tmp/timeline.json",
        mark_cycles=True,
        stall_check_is_off=True,
        stall_warning_s=2.5,
        stall_shutdown_s=10.0,
        dynamic_process_sets=True,
        fusion_bytes=0,
        cache_capacity=16,
        log_level="debug",
    )


def test_a_dynamic_timeline_has_no_file_yet() -> None:
    assert env.read_horovod_settings({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline_file is None
    assert env.read_horovod_settings({}).timeline_file is None
    assert env.read_horovod_settings({"HOROVOD_TIMELINE": "t.json"}).timeline_file == "t.json"


@pytest.mark.parametrize(
    ("word", "is_on"),
    [
        *[(word, True) for word in ("1", "True", "on", "YES", "2", " 1 ")],
        *[(word, False) for word in ("0", "false", "off", "No", "")],
    ],
)
def test_a_switch_is_a_number_or_a_word(word: str, is_on: bool) -> None:
    assert env.read_horovod_settings({"HOROVOD_STALL_CHECK_DISABLE": word}).stall_check_is_off is is_on


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-1"),
        ("HOROVOD_STALL_CHECK_DISABLE", "maybe"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB"),
        ("HOROVOD_CACHE_CAPACITY", "-1"),
        ("HOROVOD_LOG_LEVEL", "loud"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        env.read_horovod_settings({name: value})


@pytest.mark.parametrize("prefix", ["HOROVOD_", "OMPI_COMM_WORLD_", "PMI_"])
def test_the_rank_that_a_process_was_started_with_is_read(prefix: str) -> None:
    assert env.read_rank_and_size({}) == (0, 1)
    assert env.read_rank_and_size({prefix + "RANK": "2", prefix + "SIZE": "3"}) == (2, 3)
    with pytest.raises(RuntimeError, match=f"the environment has {prefix}SIZE, but needs both"):
        env.read_rank_and_size({prefix + "SIZE": "3"})


def test_the_start_timeout_is_a_number_of_seconds() -> None:
    assert env.read_start_timeout_s(120.0, {}) == 120.0
    assert env.read_start_timeout_s(120.0, {"HOROVOD_START_TIMEOUT": "30"}) == 30.0
    with pytest.raises(ConfigError, match="HOROVOD_START_TIMEOUT"):
        env.read_start_timeout_s(120.0, {"HOROVOD_START_TIMEOUT": "soon"})
