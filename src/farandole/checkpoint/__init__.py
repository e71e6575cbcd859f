"""What outlives the whole job: copies of its state in a folder, and how a job goes on from one."""
