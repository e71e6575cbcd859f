"""What connects the job and the training process with other people's programs; each folder stands by itself."""
