"""Checkpoints, which survive the whole job: copies of its state in a folder, and the resumption of a job from one."""
