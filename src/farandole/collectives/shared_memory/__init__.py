"""Collectives through memory that workers of one host share. shared_memory_transport.py is what others import."""
