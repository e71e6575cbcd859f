"""CUDA tensors between ranks through torch's NCCL. Re-exports nothing; nccl_builder.py is what others import."""
