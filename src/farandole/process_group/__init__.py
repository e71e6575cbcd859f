"""The backend "farandole" of torch.distributed, and the groups that it makes."""

from farandole.process_group.c10d_group import FarandoleGroup
from farandole.process_group.works import failure

__all__ = ["FarandoleGroup", "failure"]
