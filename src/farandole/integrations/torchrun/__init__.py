"""Scripts and jobs of torchrun: its command, its contract, its process group, and in place training."""
