"""The backend "farandole" of torch.distributed, and the groups that it makes."""

from farandole.process_group.c10d_failures import failure
from farandole.process_group.c10d_group import FarandoleGroup

__all__ = ["FarandoleGroup", "failure"]
