"""The secret of a user's processes: who can read it, and what is said when nobody may."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farandole.base.wire.user_secret import user_secret
from farandole.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARANDOLE_TOKEN", raising=False)


def test_processes_that_start_together_find_one_secret_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: user_secret(folder), range(64)))
    assert len(set(found)) == 1
    assert len(found[0]) >= 32
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()  # nothing unfinished is left
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_another_folder_has_another_secret(tmp_path: Path) -> None:
    assert user_secret(tmp_path / "one") != user_secret(tmp_path / "two")


def test_the_token_of_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_TOKEN", "x" * 32)
    assert user_secret(tmp_path / "absent") == b"x" * 32
    assert not (tmp_path / "absent").exists()
    monkeypatch.setenv("FARANDOLE_TOKEN", "short")
    with pytest.raises(ConfigError, match="FARANDOLE_TOKEN has 5 characters"):
        user_secret(tmp_path)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    user_secret(folder)
    (file,) = folder.iterdir()
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        user_secret(folder)


def test_a_folder_that_others_can_enter_or_a_link_is_refused(tmp_path: Path) -> None:
    open_folder, link = tmp_path / "open", tmp_path / "link"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    with pytest.raises(ConfigError, match="not a private folder"):
        user_secret(open_folder)
    user_secret(tmp_path / "private")
    link.symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match="not a private folder"):
        user_secret(link)


def test_a_secret_behind_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    user_secret(folder)
    (file,) = folder.iterdir()
    file.rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", file)
    with pytest.raises(ConfigError, match="FARANDOLE_TOKEN"):
        user_secret(folder)


def test_without_a_place_for_it_the_error_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*set FARANDOLE_TOKEN"):
        user_secret(tmp_path / "missing" / "private")
