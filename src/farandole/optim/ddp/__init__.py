"""torch's DistributedDataParallel in an elastic function: the user's objects stay what they are, and become elastic."""
