"""What transports through process groups of torch's have in common: gloo/ and nccl/. Re-exports nothing."""
