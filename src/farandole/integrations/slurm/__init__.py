"""Jobs in an allocation of Slurm."""
