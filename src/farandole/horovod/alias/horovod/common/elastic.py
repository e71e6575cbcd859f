"""The framework-free side of elastic training, under Horovod's path."""

from farandole import HorovodInternalError, HostsUpdatedInterrupt
from farandole.elastic import HostUpdateResult, ObjectState, State, notification_manager, run_fn

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "notification_manager",
    "run_fn",
]
