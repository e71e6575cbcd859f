"""torch.distributed's view of the world: the backend "farandole", and the groups that it makes."""

from farandole.process_group.c10d_group import FarandoleGroup
from farandole.process_group.failures import failure

__all__ = ["FarandoleGroup", "failure"]
