"""Collectives through memory that workers of one host share. transport.py is what others import."""
