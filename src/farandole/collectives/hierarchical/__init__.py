"""Collectives among several hosts: shared memory within each, rings across. hierarchical_transport.py is what others
import."""
