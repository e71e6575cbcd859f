"""Elastic jobs."""
