"""Replicas in one process, in several threads or on several devices: fd.DataParallel."""
