"""The secret by which processes of one user recognize each other where no agent has given them a key: under torchrun,
mpirun and srun, and in groups that a script makes by itself. Also the private folder of the user's files, and how such
files are replaced.

The secret is that of FARANDOLE_TOKEN, or of a file that only this user can read. It never leaves the process: keys are
derived from it and from values that everybody may know, such as what the ranks have left in torch's store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from farandole.base.env import read_runtime_folder, read_token
from farandole.base.wire.authentication import checked_token, new_token
from farandole.errors import ConfigError

_FILE = "user.secret"
_ADVICE = "set FARANDOLE_TOKEN to the same text of at least 32 random characters for all processes of the job"


def user_secret(folder: Path | None = None) -> bytes:
    """Return the secret of this process's user. `folder`: the private one of the file, which is made when it is
    missing; None: that of the environment. Raises ConfigError when FARANDOLE_TOKEN is too short, or when it is not set
    and there is no file that only this user can read."""
    token = read_token()
    if token is not None:
        return checked_token(token.encode(), "FARANDOLE_TOKEN")
    try:
        path = private_folder(read_runtime_folder() if folder is None else folder) / _FILE
        if not path.exists():
            _create(path)
        return _read(path)
    except OSError as error:
        raise ConfigError(
            f"this user's secret cannot be kept on this machine ({error.filename}: {error.strerror}), and without it "
            f"the ranks cannot prove to each other who they are: {_ADVICE}"
        ) from None


def private_folder(folder: Path) -> Path:
    """Return the folder, created if needed. Raises ConfigError when others could read or change its contents."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a private folder of this user (it has owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}; it needs owner {os.geteuid()}, mode drwx------): remove it, or set "
            "XDG_RUNTIME_DIR to a private folder"
        )
    return folder


def replace_file(path: Path, data: bytes, mode: int = 0o600, *, is_durable: bool = False) -> None:
    """Write the whole file or no part of it, which is never readable by more users than `mode` permits. Raises OSError.
    With `is_durable` it survives a power failure, as do the other names in its folder."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with open(descriptor, "wb") as file:
        file.write(data)
        if is_durable:
            file.flush()
            os.fsync(descriptor)
    beside.replace(path)
    if is_durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # to flush a file does not flush its name: man 2 fsync
        finally:
            os.close(folder)


def may_others_read(descriptor: int) -> bool:
    """Return whether an open file can be read by others than its owner. A file of another owner may be readable by a
    group of this user: so a cluster hands a Secret to a container that does not run as root (fsGroup, in the Kubernetes
    documentation of security contexts)."""
    found = os.fstat(descriptor)
    others = 0o077 if found.st_uid == os.geteuid() else 0o007
    return stat.S_ISREG(found.st_mode) and bool(found.st_mode & others)


def _create(path: Path) -> None:
    """Create the file with a random secret. Of several processes that do so at once, one creates it."""
    beside = path.with_name(f".{secrets.token_hex(8)}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(new_token())
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink()


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path} can be read by others (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}), and it is "
                f"this user's secret: remove it, and a new one is made"
            )
        return checked_token(file.read(4096), str(path))
