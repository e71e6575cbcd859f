"""Compression, under Horovod's path."""

from farandole.training.optim.compression import (
    Compression as Compression,
    Compressor as Compressor,
    FP16Compressor as FP16Compressor,
    NoneCompressor as NoneCompressor,
)
