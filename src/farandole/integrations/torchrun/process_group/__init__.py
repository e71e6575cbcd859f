"""The backend "farandole" of torch.distributed, and the groups that it makes.

The names are loaded when first used: autoload.py is imported by each `import torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
    from farandole.integrations.torchrun.process_group.works import failure

__all__ = ["FarandoleGroup", "failure"]


def __getattr__(name: str) -> Any:
    if name == "FarandoleGroup":
        from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup

        return FarandoleGroup
    if name == "failure":
        from farandole.integrations.torchrun.process_group.works import failure

        return failure
    raise AttributeError(f"module 'farandole.integrations.torchrun.process_group' has no attribute {name!r}")
