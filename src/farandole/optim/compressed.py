"""An all-reduce with fewer bytes on the wire. All ranks add rounded values and receive the rounded sum: their results
are bitwise equal, on the owner of a part too."""

from __future__ import annotations

import torch

from farandole.collectives.named.compression import BF16Compressor, Compressor, FP16Compressor, NoneCompressor
from farandole.collectives.shared_memory.tensors import shareable_zeros
from farandole.collectives.transport import Transport

_DTYPES: dict[object, torch.dtype] = {BF16Compressor: torch.bfloat16, FP16Compressor: torch.float16}


class CompressedReduce:
    """All-reduce with a compressor. It keeps the memory of the sent tensors, whose sizes are equal in each step.

    Farandole's own compressors cost only the casts in both directions; others return new tensors each time.
    """

    def __init__(self, compression: Compressor) -> None:
        self._compression = compression
        self._dtype = _DTYPES.get(compression)
        self._sent: dict[tuple[int, int], torch.Tensor] = {}

    def forget(self) -> None:
        """Drop the buffers, since other tensors will follow."""
        self._sent.clear()

    def all_reduce(self, transport: Transport, flat: torch.Tensor, trailer: bytes) -> list[bytes]:
        """Reduce as the transport does: `flat` is overwritten with the sum."""
        if self._compression is NoneCompressor or flat.dtype == self._dtype:
            return transport.all_reduce(flat, trailer)
        if self._dtype is None or not flat.is_floating_point():
            sent, ctx = self._compression.compress(flat)
            trailers = transport.all_reduce(sent, trailer)
            if sent is not flat:
                flat.copy_(self._compression.decompress(sent, ctx))
            return trailers
        key = (flat.data_ptr(), flat.numel())
        small = self._sent.get(key)
        if small is None:
            small = self._sent[key] = shareable_zeros(flat.numel(), self._dtype, flat.device)
        small.copy_(flat)
        trailers = transport.all_reduce(small, trailer)
        flat.copy_(small)
        return trailers
