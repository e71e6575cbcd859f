"""The common code of transports through torch's process groups: gloo/ and nccl/. Re-exports nothing."""
