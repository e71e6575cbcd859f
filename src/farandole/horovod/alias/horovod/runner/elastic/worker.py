"""What may have happened to the hosts of a job, as numbers that scripts compare."""

from farandole.elastic import HostUpdateResult

__all__ = ["HostUpdateResult"]
