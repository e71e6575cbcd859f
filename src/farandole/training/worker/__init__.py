"""The training process: its link to the job, the elastic run loop, and recovery."""
