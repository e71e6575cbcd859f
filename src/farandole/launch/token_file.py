"""The job token in a file, which its owner copies to the machines that may join. Used by the command lines."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from farandole.errors import ConfigError

SHORTEST_TOKEN = 32
"""Characters. A process on the network may guess: use no words, but a token as `farandole run` writes it."""


def token_of_job(path: Path) -> bytes:
    """Return the token in the file, which is created, for this user only, when it is missing. Raises ConfigError as
    read_token does, and when the file cannot be created."""
    if not path.exists():
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return read_token_file(path)
        except OSError as error:
            raise ConfigError(f"the token file {path} cannot be made: {error.strerror}") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    return read_token_file(path)


def read_token_file(path: Path) -> bytes:
    """Return the token in the file (also /dev/fd/3, for one that a parent passes). Raises ConfigError when it cannot be
    read, can be read by others, or is too short."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigError(f"the token file {path} can be read by others: chmod 600 {path}")
    return checked_token(text, f"the token file {path}")


def checked_token(text: bytes, where: str) -> bytes:
    """Return the token without surrounding blanks. Raises ConfigError for a token that is too short."""
    token = text.strip()
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"{where} holds {len(token)} characters, a token has at least {SHORTEST_TOKEN}")
    return token
