"""Whole objects between ranks, where scripts look for them."""

from __future__ import annotations

from horovod.torch import _lazy

__getattr__, __all__ = _lazy.names(
    __name__,
    {
        "farandole.collectives.named.objects": (
            "allgather_object",
            "broadcast_object",
            "broadcast_optimizer_state",
            "broadcast_parameters",
        )
    },
)
