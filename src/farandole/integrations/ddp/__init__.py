"""The support of torch's DistributedDataParallel in an elastic function: the user's objects keep their identity, and
become elastic."""
