"""Collectives among several hosts: shared memory within each, rings across. transport.py is what others import."""
