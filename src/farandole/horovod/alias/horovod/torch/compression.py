"""Compression, where scripts look for it."""

from __future__ import annotations

from horovod.torch import _lazy

__getattr__, __all__ = _lazy.names(__name__, {"farandole.collectives.named.compression": ("Compression", "Compressor")})
