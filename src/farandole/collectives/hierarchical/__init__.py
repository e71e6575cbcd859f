"""Collectives among several hosts: shared memory within each, rings across. Others import hierarchical_transport.py."""
