"""CUDA tensors between ranks through torch's NCCL. Re-exports nothing; builder.py is what others import."""
