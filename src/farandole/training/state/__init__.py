"""The state of a job that has to survive a change of the membership."""
