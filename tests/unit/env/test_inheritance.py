"""What children are told of their parent's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.base import env
from farandole.base.membership import Address, Placement
from farandole.errors import ConfigError


def worker_variables(worker: str, secret: str, slot: int) -> dict[str, str]:
    """Return the variables that an agent adds for this worker."""
    return env.environment_of(env.WorkerEnv("@farandole-1", worker, secret, slot))


def test_children_do_not_inherit_what_an_outer_job_said() -> None:
    said = {**worker_variables("w3", "secret", 2), "HOME": "/home/somebody"}
    assert env.inherited_environment(said) == {"HOME": "/home/somebody"}


def test_the_place_in_an_outer_job_is_not_inherited_but_the_user_s_settings_are() -> None:
    outer = env.horovod_environment(Placement(0, 1, 0, 1, 0, 1), "node1", is_elastic=False)
    said = {**outer, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_FUSION_THRESHOLD": "0"}
    assert env.inherited_environment(said) == {"HOROVOD_FUSION_THRESHOLD": "0"}


def test_torchrun_s_variables_of_an_outer_job_are_not_inherited() -> None:
    placement, store = Placement(5, 8, 1, 4, 1, 2), Address("10.0.0.1", 29500)
    outer = env.torchrun_environment(placement, store, "outer", group_rank=1, group_size=2, attempt=3)
    assert env.inherited_environment({**outer, "TORCHELASTIC_ERROR_FILE": "x", "TORCH_LOGS": "dynamo"}) == {
        "TORCH_LOGS": "dynamo"
    }


def test_torchrun_s_variables_have_their_names_and_values() -> None:
    placement, store = Placement(5, 8, 1, 4, 1, 2), Address("10.0.0.1", 29500)
    assert env.torchrun_environment(placement, store, "job", group_rank=1, group_size=2, attempt=3) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def test_torchrun_s_variables_are_hidden_from_libraries_in_our_workers_only() -> None:
    placement = env.torchrun_environment(Placement(0, 2, 0, 2, 0, 1), Address("127.0.0.1", 1), "job")
    ours, theirs = {**worker_variables("w3", "secret", 2), **placement}, dict(placement)
    assert env.read_torchrun_rank_and_size(ours) == (0, 2)
    assert env.read_torchrun_rank_and_size(theirs) is None
    env.hide_torchrun_place(ours)
    env.hide_torchrun_place(theirs)
    assert ours == worker_variables("w3", "secret", 2)
    assert theirs == placement
    assert env.read_torchrun_rank_and_size(ours) is None


def test_a_changed_environment_is_as_it_was_afterwards_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "info")
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    before, inside = dict(os.environ), dict[str, str]()

    @env.changed_environment(HOROVOD_LOG_LEVEL="debug", HOROVOD_TIMELINE="t.json", HOME=None)
    def fail() -> None:
        inside.update(os.environ)
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == {**before, "HOROVOD_LOG_LEVEL": "debug", "HOROVOD_TIMELINE": "t.json"}
    assert dict(os.environ) == before


def test_what_is_said_to_one_worker_alone_makes_no_difference_for_a_library() -> None:
    common = {"HOME": "/home/somebody", "OMP_NUM_THREADS": "2"}
    first = common | worker_variables("w3", "secret", 2)
    second = common | worker_variables("w4", "other", 3) | {"HOROVOD_RANK": "1", "RANK": "1", "MASTER_PORT": "29500"}
    assert not env.differs_for_all(first, second)
    assert env.differs_for_all(first, second | {"OMP_NUM_THREADS": "1"})
    assert env.differs_for_all(first, second | {"LD_PRELOAD": "x"})
    assert env.differs_for_all(first | {"MKL_NUM_THREADS": "1"}, second)


def test_a_replaced_environment_has_nothing_of_the_old_one() -> None:
    before = dict(os.environ)
    try:
        env.replace_environment({"ONLY": "this"})
        assert dict(os.environ) == {"ONLY": "this"}
        child = subprocess.run(["/bin/sh", "-c", "echo $ONLY-$HOME"], capture_output=True, text=True)
        assert child.stdout == "this-\n"
    finally:
        env.replace_environment(before)
    assert dict(os.environ) == before


def test_children_hear_what_the_user_says_of_gives_exit_notice() -> None:
    assert env.inherited_environment({"FARANDOLE_EXIT_NOTICE": "0"}) == {"FARANDOLE_EXIT_NOTICE": "0"}
    assert [env.read_exit_notice({"FARANDOLE_EXIT_NOTICE": said}) for said in ("0", "off", "False", "1", "")] == [
        *[False] * 3,
        *[True] * 2,
    ]
    assert env.read_exit_notice({})


def test_children_hear_whether_process_groups_live_through_the_generations() -> None:
    assert env.inherited_environment({"FARANDOLE_RECONFIGURE": "0"}) == {"FARANDOLE_RECONFIGURE": "0"}
    assert env.read_reconfigure({"FARANDOLE_RECONFIGURE": "1"}) is True
    assert env.read_reconfigure({"FARANDOLE_RECONFIGURE": "0"}) is False
    assert env.read_reconfigure({}) is None
    with pytest.raises(ConfigError, match="FARANDOLE_RECONFIGURE must be 0 or 1, got 'maybe'"):
        env.read_reconfigure({"FARANDOLE_RECONFIGURE": "maybe"})


def test_python_becomes_the_one_beside_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("system", "venv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python").write_text("#!/bin/sh\n")
        (tmp_path / folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python3.99"))
    for before in (f"{tmp_path}/system:/bin", ""):
        monkeypatch.setenv("PATH", before)
        for _ in range(2):
            env.put_own_python_first()
            assert os.environ["PATH"] == f"{tmp_path}/venv:{before}".rstrip(":")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python3.99"))
    monkeypatch.setenv("PATH", "/bin")
    env.put_own_python_first()
    assert os.environ["PATH"] == "/bin"
