"""The job token in a file: made once, for one user only, and refused when it cannot be one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole.errors import ConfigError
from farandole.job.launch.joining import read_token_file, token_of_job


def test_a_missing_file_is_made_for_this_user_only_and_then_kept(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = token_of_job(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_of_job(path) == read_token_file(path) == token


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token_of_job(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"can be read by others: chmod 600 {path}"):
        read_token_file(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_secret_of_another_owner_may_be_readable_by_a_group_but_not_by_all(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = token_of_job(path)
    os.chown(path, 12345, -1)
    path.chmod(0o440)
    assert read_token_file(path) == token
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_token_file(path)


def test_a_short_token_is_refused_without_being_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hunter2\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has 7 characters, a token needs at least 32") as raised:
        read_token_file(path)
    assert "hunter2" not in str(raised.value)


def test_a_file_that_is_not_there_and_one_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be read: No such file"):
        read_token_file(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be created"):
        token_of_job(tmp_path / "no" / "folder")
