"""horovod.torch.elastic is farandole.elastic."""

from __future__ import annotations

from horovod.torch import _lazy

__getattr__, __all__ = _lazy.names(
    __name__,
    {
        "farandole.elastic": ("TorchState", "run"),
        "farandole.data.sampler": ("ElasticSampler",),
    },
)
