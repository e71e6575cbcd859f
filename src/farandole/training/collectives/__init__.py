"""Tensors between ranks: the transports of a generation, and the process's view of the world."""
