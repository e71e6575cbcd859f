"""Collectives through memory that workers of one host share. Other packages import shared_memory_transport.py."""
