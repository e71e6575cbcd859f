"""CUDA tensors between ranks through torch's NCCL. Re-exports nothing; other packages import nccl_builder.py."""
