"""Horovod's exceptions, which Farandole raises itself."""

from farandole.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
