from __future__ import annotations

import datetime
import stat
import sys
from pathlib import Path

import pytest

from farandole.base.wire.encryption import Certificates
from farandole.errors import ConfigError
from farandole.job.launch.certificates_command import certificates_command as command, make_certificates
from tests.support.certificates import made


def test_private_files_are_for_this_user_only_and_the_folder_too(tmp_path: Path) -> None:
    folder = Path(made(tmp_path / "new"))
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "certificate.pem": 0o644, "key.pem": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_second_call_makes_another_certificate_of_the_same_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(made(tmp_path))
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert command([str(folder), "--days", "3"]) == 0
    after = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"certificate.pem", "key.pem"}
    in_three_days = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)
    assert f"made the certificate in {folder}, valid until {in_three_days:%Y-%m-%d}" in capsys.readouterr().out


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'farandole\[tls\]'"):
        make_certificates(tmp_path)


def test_a_folder_into_which_others_may_write_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"others may write into {tmp_path}, .*: chmod 700 {tmp_path}"):
        make_certificates(tmp_path)


def test_an_authority_that_is_not_valid_is_named_with_what_to_do(tmp_path: Path) -> None:
    folder = Path(made(tmp_path))
    (folder / "ca-key.pem").write_bytes((folder / "key.pem").read_bytes())
    with pytest.raises(
        ConfigError, match=r"is not valid .the key is not that of the auth.*: remove both, and new ones"
    ):
        make_certificates(folder)


@pytest.mark.parametrize("days", ["0", "99999"])
def test_days_that_make_no_sense_are_refused(tmp_path: Path, days: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(tmp_path), "--days", days]) == 2
    assert f"--days must be between 1 and 36500, got {days}" in capsys.readouterr().err


# A folder of certificates, as --tls reads it --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ca.pem", "certificate.pem", "key.pem"])
def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name} cannot be read: No such file.*certificates {folder}"):
        Certificates(folder)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (tmp_path / "key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match=rf"can be read by others: chmod 600 {folder}/key.pem"):
        Certificates(folder)


def test_a_folder_in_which_others_can_replace_files_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"others may write into {folder}, and so replace its files: chmod 700"):
        Certificates(folder)
    tmp_path.chmod(0o1777)  # as the folder of a Secret in a container: only the owner of a file may replace it
    Certificates(folder)


@pytest.mark.parametrize("damage", ["garbage", "another key", "another authority"])
def test_files_that_do_not_fit_together_are_refused(tmp_path: Path, damage: str) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    made(folder)
    made(other)
    if damage == "garbage":
        (folder / "certificate.pem").write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    elif damage == "another key":
        (folder / "key.pem").write_bytes((other / "key.pem").read_bytes())
    else:
        (folder / "ca.pem").write_bytes((other / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match=rf"--tls {folder}: .*; make .* with: farandole certificates {folder}"):
        Certificates(str(folder))


def test_a_certificate_that_has_expired_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    make_certificates(tmp_path, 1, datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2))
    with pytest.raises(ConfigError, match="certificate has expired; make a new one with: farandole certificates"):
        Certificates(str(tmp_path))
