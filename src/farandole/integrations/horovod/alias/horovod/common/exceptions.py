"""Horovod's exceptions. Farandole raises the first two itself."""

from __future__ import annotations

from farandole import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


class HorovodVersionMismatchError(ImportError):
    """An error for scripts that catch it. Farandole is not compiled against a version of torch, so it never raises
    it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version), name=name)
        self.version, self.installed_version = version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message when `version` of a framework is found, and `installed_version` was there at the
    installation."""
    return f"{name} has version {version} now, and had {installed_version} at the installation of Horovod; reinstall it"
