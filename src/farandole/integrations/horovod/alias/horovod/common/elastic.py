"""The framework-free side of elastic training, under Horovod's path."""

from farandole import HorovodInternalError as HorovodInternalError, HostsUpdatedInterrupt as HostsUpdatedInterrupt
from farandole.elastic import (
    HostUpdateResult as HostUpdateResult,
    ObjectState as ObjectState,
    State as State,
    notification_manager as notification_manager,
    run_fn as run_fn,
)
