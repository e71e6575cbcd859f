"""Horovod's folder of this name."""
