"""The states and their handlers, where scripts look for them."""

from __future__ import annotations

from horovod.torch import _lazy

__getattr__, __all__ = _lazy.names(
    __name__,
    {
        "farandole.elastic": (
            "ModelStateHandler",
            "OptimizerStateHandler",
            "SamplerStateHandler",
            "StateHandler",
            "TorchState",
            "get_handler_registry",
            "set_handler_registry",
        ),
    },
)
