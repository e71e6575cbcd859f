"""Groups of torch.distributed in a job: `failure()`, the error that has ended the current generation, and the class of
the groups. Loaded by the backend "farandole" itself."""

from farandole.integrations.torchrun.process_group import FarandoleGroup as FarandoleGroup, failure as failure

__all__ = ["FarandoleGroup", "failure"]
