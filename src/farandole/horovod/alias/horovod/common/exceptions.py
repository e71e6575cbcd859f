"""Horovod's exceptions, which Farandole raises itself."""

from farandole import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
